#include "llama/batch_decoder.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "llama/prefill.h"

namespace dropkv::llama {
namespace {

// As with single sequences: turns of several tokens come in pieces that keep compute buffers small.
constexpr int32_t kSmallBatch = 64;

}  // namespace

// A further one keeps the prompt's sliding window, so that the others may begin again from it.
int32_t BatchDecoder::MaxSequences(const Model& model) {
  return Context::MaxSequences() - (model.sliding_window() > 0 ? 1 : 0);
}

Result<std::unique_ptr<BatchDecoder>> BatchDecoder::Create(Prefilled* prefilled, std::span<const KeepList* const> lists,
                                                           int32_t reserve) {
  const int32_t most = MaxSequences(*prefilled->model);
  if (lists.empty() || lists.size() > static_cast<size_t>(most))
    return InvalidArgument("lists: expected 1 to " + std::to_string(most) + ", got " + std::to_string(lists.size()));
  if (reserve < 1) return InvalidArgument("reserve: expected at least 1 token, got " + std::to_string(reserve));
  if (prefilled->layers.empty())
    return Status(Code::kFailedPrecondition, "batch decoder: the prompt of " + std::to_string(prefilled->size()) +
                                                 " tokens lies inside the model's sliding window of " +
                                                 std::to_string(prefilled->model->sliding_window()));
  std::unique_ptr<BatchDecoder> decoder(new BatchDecoder(prefilled->options.pool));
  decoder->vocab_size_ = prefilled->model->vocab_size();
  decoder->sliding_window_ = prefilled->model->sliding_window();
  decoder->end_ = prefilled->end();
  decoder->fed_.assign(lists.size(), 0);
  decoder->rows_ = std::max(kSmallBatch, decoder->sequences());
  decoder->tap_.set_always_copy(prefilled->options.copy_cache);
  for (const KeepList* keep : lists)
    DROPKV_RETURN_IF_ERROR(
        decoder->takeover_.AddSequence(prefilled, prefilled->WithGenerated(*keep), std::min(reserve, 2 * kSmallBatch)));
  DROPKV_RETURN_IF_ERROR(decoder->MakeContext(*prefilled, reserve));
  decoder->tap_.set_listener(&decoder->takeover_);
  if (prefilled->options.flash_attention) DROPKV_RETURN_IF_ERROR(decoder->ChooseWay(prefilled->tokens.back()));
  return decoder;
}

// libllama's own cells hold one piece and, for sliding layers, the prompt's window once for all and behind it what each
// sequence was fed, as far as its window goes.
Status BatchDecoder::MakeContext(const Prefilled& prefilled, int32_t reserve) {
  ContextOptions options;
  options.cells = 256;
  while (options.cells < rows_) options.cells += 256;
  options.sequences = sequences();
  if (sliding_window_ > 0) {
    options.cells = sliding_window_ + sequences() * std::min(sliding_window_ + 1, reserve) + rows_;
    ++options.sequences;
  }
  options.ubatch = std::max(rows_, options.sequences);  // libllama takes no fewer
  options.threads = prefilled.options.threads;
  options.flash_attention = prefilled.options.flash_attention;
  options.kv_type = prefilled.options.kv_type;
  options.tap = &tap_;
  options.cancel = prefilled.options.cancel;
  Result<Context> context = Context::Create(*prefilled.model, options);
  if (!context.ok()) return context.status();
  context_.emplace(std::move(*context));
  if (sliding_window_ == 0) return Status::Ok();
  DROPKV_RETURN_IF_ERROR(context_->SetState(prefilled.window_state, true, sequences()));
  for (int32_t sequence = 0; sequence < sequences(); ++sequence) context_->Share(sequences(), sequence);
  return Status::Ok();
}

// As RaggedDecoder's, with the first sequence alone: the node is the same whatever the number of its rows.
Status BatchDecoder::ChooseWay(Token token) {
  const Item item = {0, token, end_, true};
  DROPKV_RETURN_IF_ERROR(Step(std::span(&item, 1)));
  const std::vector<float> by_stop = logits_;
  DROPKV_RETURN_IF_ERROR(Rewind(0));
  if (!takeover_.any_on_host()) return Status::Ok();
  takeover_.set_replace(true);
  DROPKV_RETURN_IF_ERROR(Step(std::span(&item, 1)));
  takeover_.set_replace(std::memcmp(by_stop.data(), logits_.data(), by_stop.size() * sizeof(float)) == 0);
  return Rewind(0);
}

Status BatchDecoder::Check(std::span<const Item> items) const {
  if (items.empty()) return InvalidArgument("items: expected at least one, got none");
  std::vector<int32_t> next(fed_.size());
  for (size_t i = 0; i < fed_.size(); ++i) next[i] = end_ + fed_[i];
  for (size_t i = 0; i < items.size(); ++i) {
    const auto wrong = [&](const char* field, const std::string& expected, int32_t got) {
      std::string message = "items[" + std::to_string(i) + "]." + field;
      message += ": expected " + expected;
      message += ", got " + std::to_string(got);
      return InvalidArgument(message);
    };
    const auto below = [](int32_t limit) { return "0 to " + std::to_string(limit - 1); };
    const Item& item = items[i];
    if (item.sequence < 0 || item.sequence >= sequences()) return wrong("sequence", below(sequences()), item.sequence);
    if (item.token < 0 || item.token >= vocab_size_) return wrong("token", below(vocab_size_), item.token);
    const int32_t position = next[item.sequence]++;
    if (item.position != position) return wrong("position", std::to_string(position), item.position);
  }
  return Status::Ok();
}

Status BatchDecoder::Step(std::span<const Item> items) {
  if (!failed_.ok()) return {Code::kFailedPrecondition, "batch decoder: an earlier step failed: " + failed_.message()};
  DROPKV_RETURN_IF_ERROR(Check(items));
  logit_at_.assign(items.size(), -1);
  int32_t wanted = 0;
  for (size_t i = 0; i < items.size(); ++i)
    if (items[i].logits) logit_at_[i] = wanted++;
  logits_.resize(static_cast<size_t>(wanted) * vocab_size_);
  for (size_t first = 0; first < items.size() && failed_.ok(); first += rows_)
    failed_ = DecodePiece(items.subspan(first, std::min<size_t>(rows_, items.size() - first)), first);
  return failed_;
}

// first: the number of the piece's first item in its step.
Status BatchDecoder::DecodePiece(std::span<const Item> items, size_t first) {
  of_row_.clear();
  for (const Item& item : items) of_row_.push_back(item.sequence);
  takeover_.BeginCall(of_row_);
  tap_.ForgetTokens();
  DROPKV_RETURN_IF_ERROR(context_->DecodeRows(items));
  DROPKV_RETURN_IF_ERROR(takeover_.status());
  for (size_t i = 0; i < items.size(); ++i) {
    ++fed_[items[i].sequence];
    if (!items[i].logits) continue;
    const std::span<const float> logits = context_->logits(static_cast<int32_t>(i));
    std::copy(logits.begin(), logits.end(), logits_.begin() + int64_t{logit_at_[first + i]} * vocab_size_);
  }
  return DropOldCells();
}

// Sliding layers still attend to libllama's cells inside their window; without them none is needed.
Status BatchDecoder::DropOldCells() {
  if (sliding_window_ == 0) {
    context_->Clear();
    return Status::Ok();
  }
  for (const int32_t sequence : of_row_) {
    const int32_t keep_from = end_ + fed_[sequence] - sliding_window_;
    if (keep_from > 0) DROPKV_RETURN_IF_ERROR(context_->Remove(0, keep_from, sequence));
  }
  return Status::Ok();
}

std::span<const float> BatchDecoder::logits(size_t item) const {
  return std::span(logits_).subspan(static_cast<size_t>(logit_at_[item]) * vocab_size_, vocab_size_);
}

Status BatchDecoder::Rewind(int32_t sequence) {
  if (sequence < 0 || sequence >= sequences())
    return InvalidArgument("sequence: expected 0 to " + std::to_string(sequences() - 1) + ", got " +
                           std::to_string(sequence));
  DROPKV_RETURN_IF_ERROR(takeover_.Truncate(fed_[sequence], sequence));
  fed_[sequence] = 0;
  if (sliding_window_ == 0) return Status::Ok();
  DROPKV_RETURN_IF_ERROR(context_->Remove(0, -1, sequence));
  context_->Share(sequences(), sequence);
  return Status::Ok();
}

}  // namespace dropkv::llama
