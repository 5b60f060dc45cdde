#include "llama/context.h"

#include <llama.h>

#include <algorithm>
#include <string>
#include <thread>

#include "llama/tap.h"

namespace dropkv::llama {
namespace {

ggml_type ToGgml(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return GGML_TYPE_F32;
    case DType::kBF16:
      return GGML_TYPE_BF16;
    case DType::kQ8_0:
      return GGML_TYPE_Q8_0;
    case DType::kF16:
      break;
  }
  return GGML_TYPE_F16;
}

bool IsCancelled(void* flag) { return static_cast<const std::atomic<bool>*>(flag)->load(); }

struct BatchDeleter {
  void operator()(llama_batch* batch) const {
    llama_batch_free(*batch);
    delete batch;
  }
};

}  // namespace

void Context::Deleter::operator()(llama_context* context) const { llama_free(context); }

Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;
Context::~Context() = default;

int32_t Context::MaxSequences() { return static_cast<int32_t>(llama_max_parallel_sequences()); }

Result<Context> Context::Create(const Model& model, const ContextOptions& options) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.cells;
  params.n_batch = options.ubatch;
  params.n_ubatch = options.ubatch;
  params.n_seq_max = options.sequences;
  params.kv_unified = true;
  const int32_t cores = std::max(1U, std::thread::hardware_concurrency());
  params.n_threads = options.threads > 0 ? options.threads : cores;
  params.n_threads_batch = params.n_threads;
  params.flash_attn_type = options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = ToGgml(options.kv_type);
  params.type_v = ToGgml(options.kv_type);
  params.swa_full = false;
  params.no_perf = true;
  if (options.tap != nullptr) {
    params.cb_eval = &Tap::Callback;
    params.cb_eval_user_data = options.tap;
  }
  if (options.cancel != nullptr) {
    params.abort_callback = &IsCancelled;
    params.abort_callback_data = const_cast<std::atomic<bool>*>(options.cancel);
  }
  TakeLogError();
  Context context;
  context.options_ = options;
  context.vocab_size_ = model.vocab_size();
  context.context_.reset(llama_init_from_model(model.get(), params));
  if (context.context_ == nullptr) {
    const std::string reason = TakeLogError();
    return Unsupported("libllama cannot make a context of " + std::to_string(options.cells) + " tokens with a " +
                       std::string(DTypeName(options.kv_type)) + " cache, flash attention " +
                       (options.flash_attention ? "on" : "off") + (reason.empty() ? "" : ": " + reason));
  }
  return context;
}

Status Context::Decode(std::span<const Token> tokens, int32_t position, const std::function<void(int32_t)>& progress) {
  const auto total = static_cast<int32_t>(tokens.size());
  std::vector<BatchRow> rows;
  for (int32_t done = 0; done < total;) {
    const int32_t count = std::min(options_.ubatch, total - done);
    rows.clear();
    for (int32_t i = done; i < done + count; ++i) rows.push_back({0, tokens[i], position + i, i + 1 == total});
    DROPKV_RETURN_IF_ERROR(DecodeRows(rows));
    done += count;
    if (progress) progress(done);
  }
  return Status::Ok();
}

Status Context::DecodeRows(std::span<const BatchRow> rows) {
  const auto count = static_cast<int32_t>(rows.size());
  const std::unique_ptr<llama_batch, BatchDeleter> batch(new llama_batch(llama_batch_init(count, 0, 1)));
  batch->n_tokens = count;
  for (int32_t i = 0; i < count; ++i) {
    batch->token[i] = rows[i].token;
    batch->pos[i] = rows[i].position;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = rows[i].sequence;
    batch->logits[i] = rows[i].logits ? 1 : 0;
  }
  const int32_t code = llama_decode(get(), *batch);
  llama_synchronize(get());
  if (code == 2 || (options_.cancel != nullptr && options_.cancel->load()))
    return {Code::kCancelled, "stopped on request"};
  const std::string position = " at position " + std::to_string(rows.empty() ? 0 : rows.front().position);
  if (code == 1)
    return {Code::kFailedPrecondition, "the context of " + std::to_string(cells()) + " tokens is full" + position};
  if (code == 0) return Status::Ok();
  return {Code::kInternal, "libllama's decode failed with " + std::to_string(code) + position + ": " + TakeLogError()};
}

std::span<const float> Context::logits() const {
  return {llama_get_logits_ith(get(), -1), static_cast<size_t>(vocab_size_)};
}

std::span<const float> Context::logits(int32_t row) const {
  return {llama_get_logits_ith(get(), row), static_cast<size_t>(vocab_size_)};
}

Status Context::Remove(int32_t from, int32_t to, int32_t sequence) {
  if (llama_memory_seq_rm(llama_get_memory(get()), sequence, from, to)) return Status::Ok();
  return {Code::kInternal,
          "libllama refused to remove positions " + std::to_string(from) + " to " + std::to_string(to)};
}

void Context::Clear() { llama_memory_clear(llama_get_memory(get()), false); }

void Context::Share(int32_t from, int32_t to) { llama_memory_seq_cp(llama_get_memory(get()), from, to, -1, -1); }

Result<std::vector<uint8_t>> Context::State(int32_t from, int32_t end, bool window_only) {
  const llama_state_seq_flags flags = window_only ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0;
  // A second sequence over the same cells names the part that is wanted; the first one stays whole.
  const bool part = from > 0;
  llama_memory_t memory = llama_get_memory(get());
  if (part) llama_memory_seq_cp(memory, 0, 1, from, end);
  const llama_seq_id sequence = part ? 1 : 0;
  std::vector<uint8_t> state(llama_state_seq_get_size_ext(get(), sequence, flags));
  const size_t size = llama_state_seq_get_data_ext(get(), state.data(), state.size(), sequence, flags);
  if (part) llama_memory_seq_rm(memory, 1, -1, -1);
  if (size == 0) return Status(Code::kInternal, "libllama gave no sequence state: " + TakeLogError());
  state.resize(size);
  return state;
}

Status Context::SetState(std::span<const uint8_t> state, bool window_only, int32_t sequence) {
  const llama_state_seq_flags flags = window_only ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0;
  if (llama_state_seq_set_data_ext(get(), state.data(), state.size(), sequence, flags) == 0)
    return {Code::kInternal, "libllama refused the sequence state: " + TakeLogError()};
  return Status::Ok();
}

int32_t Context::cells() const { return static_cast<int32_t>(llama_n_ctx(get())); }

}  // namespace dropkv::llama
