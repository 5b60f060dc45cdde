#include "llama/decoder.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "dropkv/engine.h"
#include "llama/prefill.h"
#include "llama/takeover.h"

namespace dropkv::llama {
namespace {

// Small contexts decode single tokens and short turns: small pieces keep their compute buffers small.
constexpr int32_t kSmallBatch = 64;

ContextOptions SmallContext(const Prefilled& prefilled, int32_t cells, Tap* tap) {
  ContextOptions options;
  // The sliding-window cache needs the window and a piece beside it.
  const int32_t window = prefilled.model->sliding_window();
  options.cells = std::max(cells, window > 0 ? window + 256 : 256);
  options.ubatch = kSmallBatch;
  options.threads = prefilled.options.threads;
  options.flash_attention = prefilled.options.flash_attention;
  options.kv_type = prefilled.options.kv_type;
  options.tap = tap;
  options.cancel = prefilled.options.cancel;
  return options;
}

class FullDecoder : public Decoder {
 public:
  explicit FullDecoder(Prefilled* prefilled) : prefilled_(prefilled) {}

  Status Feed(std::span<const Token> tokens, int32_t position) override {
    return prefilled_->context->Decode(tokens, position);
  }
  std::span<const float> logits() const override { return prefilled_->context->logits(); }
  Status Rewind() override { return ForgetBehind(prefilled_); }
  std::string_view name() const override { return "full"; }

 private:
  Prefilled* prefilled_;
};

class NativeDecoder : public Decoder {
 public:
  Status Init(Prefilled* prefilled, const KeepList& keep, int32_t reserve);

  Status Feed(std::span<const Token> tokens, int32_t position) override { return context_->Decode(tokens, position); }
  std::span<const float> logits() const override { return context_->logits(); }
  Status Rewind() override {
    DROPKV_RETURN_IF_ERROR(context_->Remove(end_, -1));
    return window_state_.empty() ? Status::Ok() : context_->SetState(window_state_, true);
  }
  std::string_view name() const override { return "native"; }

 private:
  Status WriteKept(Prefilled* prefilled, const KeepList& keep);

  Tap tap_;
  std::optional<Context> context_;
  std::vector<uint8_t> window_state_;
  int32_t end_ = 0;
};

Status NativeDecoder::Init(Prefilled* prefilled, const KeepList& keep, int32_t reserve) {
  if (!keep.uniform())
    return InvalidArgument("--decode native: every head must keep the same number of tokens, got " +
                           std::to_string(keep.min_length()) + " to " + std::to_string(keep.max_length()) +
                           "; uniform heads (--heads uniform) or --decode ragged");
  tap_.set_always_copy(prefilled->options.copy_cache);
  end_ = prefilled->end();
  const int32_t kept = prefilled->layers.empty() ? end_ : keep.max_length();
  window_state_ = prefilled->window_state;
  Result<Context> context = Context::Create(*prefilled->model, SmallContext(*prefilled, kept + reserve, &tap_));
  if (!context.ok()) return context.status();
  context_.emplace(std::move(*context));
  // One token of a text that is thrown away shows where this context keeps its keys and values.
  DROPKV_RETURN_IF_ERROR(context_->Decode(std::span(prefilled->tokens).first(1), 0));
  tap_.set_recording(false);
  DROPKV_RETURN_IF_ERROR(context_->Remove(0, -1));
  // The state of the last `kept` positions makes as many cells, packed from cell 0, the last at position n-1. Which row
  // lies in which of them makes no difference to attention; their contents are then written per head.
  Result<std::vector<uint8_t>> state = prefilled->context->State(end_ - kept, end_, false);
  if (!state.ok()) return state.status();
  DROPKV_RETURN_IF_ERROR(context_->SetState(*state, false));
  if (!window_state_.empty()) DROPKV_RETURN_IF_ERROR(context_->SetState(window_state_, true));
  return WriteKept(prefilled, keep);
}

Status NativeDecoder::WriteKept(Prefilled* prefilled, const KeepList& keep) {
  if (keep.max_length() == end_) return Status::Ok();  // nothing evicted: the state brought every row
  for (size_t i = 0; i < prefilled->layers.size(); ++i) {
    LayerInfo& source = prefilled->tap->layers().at(prefilled->layers[i]);
    LayerInfo& target = tap_.layers().at(prefilled->layers[i]);
    std::vector<int32_t> cells(keep.max_length());
    std::iota(cells.begin(), cells.end(), 0);
    const Result<KvView> from = source.View(source.cells);
    if (!from.ok()) return from.status();
    const Result<KvView> to = target.View(cells);
    if (!to.ok()) return to.status();
    const auto writable = [](const KvTensor& t) {
      return MutableKvTensor{const_cast<void*>(t.data), t.dtype, t.head_stride, t.token_stride, t.dim_stride};
    };
    const MutableKvView destination{to->kv_heads,  to->tokens,      to->key_dim,
                                    to->value_dim, writable(to->k), writable(to->v)};
    DROPKV_RETURN_IF_ERROR(Compact(*from, keep, static_cast<int32_t>(i), destination));
    target.WriteBack(cells);
  }
  return Status::Ok();
}

class RaggedDecoder : public Decoder {
 public:
  explicit RaggedDecoder(ThreadPool* pool) : takeover_(&tap_, pool) {}
  Status Init(Prefilled* prefilled, const KeepList& keep, int32_t reserve);

  Status Feed(std::span<const Token> tokens, int32_t position) override;
  std::span<const float> logits() const override { return logits_; }
  Status Rewind() override;
  std::string_view name() const override { return takeover_.replace() ? "ragged replace" : "ragged stop"; }

 private:
  Status DecodePiece(std::span<const Token> tokens, int32_t position);
  Status ChooseWay(Token token);

  Tap tap_;
  Takeover takeover_;
  std::optional<Context> context_;
  std::vector<uint8_t> window_state_;
  std::vector<float> logits_;
  int32_t sliding_window_ = 0;
  int32_t end_ = 0;
  int32_t fed_ = 0;
};

Status RaggedDecoder::Init(Prefilled* prefilled, const KeepList& keep, int32_t reserve) {
  tap_.set_always_copy(prefilled->options.copy_cache);
  end_ = prefilled->end();
  window_state_ = prefilled->window_state;
  sliding_window_ = prefilled->model->sliding_window();
  // The caches grow as they need to: a long answer that may come takes no memory before it does.
  DROPKV_RETURN_IF_ERROR(takeover_.AddSequence(prefilled, keep, std::min(reserve, 2 * kSmallBatch)));
  // libllama's own cells are not read: they only have to hold one piece.
  Result<Context> context = Context::Create(*prefilled->model, SmallContext(*prefilled, 256, &tap_));
  if (!context.ok()) return context.status();
  context_.emplace(std::move(*context));
  if (!window_state_.empty()) DROPKV_RETURN_IF_ERROR(context_->SetState(window_state_, true));
  tap_.set_listener(&takeover_);
  return prefilled->options.flash_attention ? ChooseWay(prefilled->tokens.back()) : Status::Ok();
}

Status RaggedDecoder::DecodePiece(std::span<const Token> tokens, int32_t position) {
  takeover_.BeginCall();
  tap_.ForgetTokens();
  DROPKV_RETURN_IF_ERROR(context_->Decode(tokens, position));
  DROPKV_RETURN_IF_ERROR(takeover_.status());
  const std::span<const float> logits = context_->logits();
  logits_.assign(logits.begin(), logits.end());
  fed_ += static_cast<int32_t>(tokens.size());
  // Sliding layers still attend to libllama's cells inside their window; without them the newest cell alone is kept, so
  // that the next position follows it.
  const int32_t last = position + static_cast<int32_t>(tokens.size()) - 1;
  const int32_t keep_from = sliding_window_ > 0 ? last + 1 - sliding_window_ : last;
  return keep_from > 0 ? context_->Remove(0, keep_from) : Status::Ok();
}

// A token that is thrown away is decoded both ways; the quick way stays if it gave the same bits.
Status RaggedDecoder::ChooseWay(Token token) {
  DROPKV_RETURN_IF_ERROR(DecodePiece(std::span(&token, 1), end_));
  const std::vector<float> by_stop = logits_;
  DROPKV_RETURN_IF_ERROR(Rewind());
  if (!takeover_.any_on_host()) return Status::Ok();
  takeover_.set_replace(true);
  DROPKV_RETURN_IF_ERROR(DecodePiece(std::span(&token, 1), end_));
  takeover_.set_replace(std::memcmp(by_stop.data(), logits_.data(), by_stop.size() * sizeof(float)) == 0);
  return Rewind();
}

Status RaggedDecoder::Feed(std::span<const Token> tokens, int32_t position) {
  const auto count = static_cast<int32_t>(tokens.size());
  for (int32_t done = 0; done < count; done += kSmallBatch)
    DROPKV_RETURN_IF_ERROR(DecodePiece(tokens.subspan(done, std::min(kSmallBatch, count - done)), position + done));
  return Status::Ok();
}

Status RaggedDecoder::Rewind() {
  DROPKV_RETURN_IF_ERROR(takeover_.Truncate(fed_));
  fed_ = 0;
  DROPKV_RETURN_IF_ERROR(context_->Remove(0, -1));
  return window_state_.empty() ? Status::Ok() : context_->SetState(window_state_, true);
}

}  // namespace

Status ForgetBehind(Prefilled* prefilled) {
  DROPKV_RETURN_IF_ERROR(prefilled->context->Remove(prefilled->end(), -1));
  // libllama may have given up cells that the prompt's sliding windows need.
  if (prefilled->window_state.empty()) return Status::Ok();
  return prefilled->context->SetState(prefilled->window_state, true);
}

Result<std::unique_ptr<Decoder>> MakeFullDecoder(Prefilled* prefilled) {
  return std::unique_ptr<Decoder>(std::make_unique<FullDecoder>(prefilled));
}

Result<std::unique_ptr<Decoder>> MakeNativeDecoder(Prefilled* prefilled, const KeepList& keep, int32_t reserve) {
  auto decoder = std::make_unique<NativeDecoder>();
  DROPKV_RETURN_IF_ERROR(decoder->Init(prefilled, prefilled->WithGenerated(keep), reserve));
  return std::unique_ptr<Decoder>(std::move(decoder));
}

Result<std::unique_ptr<Decoder>> MakeRaggedDecoder(Prefilled* prefilled, const KeepList& keep, int32_t reserve) {
  auto decoder = std::make_unique<RaggedDecoder>(prefilled->options.pool);
  DROPKV_RETURN_IF_ERROR(decoder->Init(prefilled, prefilled->WithGenerated(keep), reserve));
  return std::unique_ptr<Decoder>(std::move(decoder));
}

Result<std::unique_ptr<Decoder>> MakeCompactedDecoder(Prefilled* prefilled, const KeepList& keep, int32_t reserve) {
  const bool native = prefilled->layers.empty() || keep.uniform();
  return native ? MakeNativeDecoder(prefilled, keep, reserve) : MakeRaggedDecoder(prefilled, keep, reserve);
}

}  // namespace dropkv::llama
