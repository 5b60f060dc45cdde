#include "llama/prefill.h"

#include <algorithm>
#include <string>

#include "core/clock.h"

namespace dropkv::llama {
namespace {

Status CheckLayer(const Model& model, int32_t number, LayerInfo* layer) {
  const std::string where = "model '" + model.name() + "', layer " + std::to_string(number) + ": ";
  if (layer->max_bias != 0) return Unsupported(where + "ALiBi takes its bias from a token's place in the cache");
  if (layer->query_heads == 0 || layer->value_dim == 0 || layer->v_root == nullptr)
    return Unsupported(where + "its attention was not found in the graph");
  // One token shows what is to be checked; a device's others stay where they are.
  const Result<KvView> view = layer->View(std::span(layer->cells).first(1));
  if (!view.ok()) return view.status();
  const Status status = CheckKvView(*view);
  return status.ok() ? status : Status(status.code(), where + status.message());
}

// Whether a layer shows what the policy reads of it; the message names the policy and the layer.
Status CheckNeeds(const Model& model, const baseline::Recipe& recipe, int32_t number, const LayerInfo& layer,
                  const OutputWeights* weights) {
  const baseline::Needs needs = baseline::NeedsOf(recipe);
  const std::string who = "policy " + recipe.name() + " needs ";
  const std::string where = ": model '" + model.name() + "', layer " + std::to_string(number) + ": ";
  const char* other_cache = layer.rotated ? "; --kv f16 or f32 does without" : "";
  if ((needs.pre_rope_queries || needs.pre_rope_keys) && layer.rope.dims == 0)
    return Unsupported(who + (needs.pre_rope_queries ? "queries" : "keys") + " before RoPE" + where + layer.rope_error +
                       other_cache);
  if (!needs.output_projection) return Status::Ok();
  if (layer.rotated)
    return Unsupported(who + "the output projection W_O" + where + "libllama rotates values before it quantises them" +
                       other_cache);
  const Result<baseline::OutputProjection> wo = weights->Layer(number, layer.query_heads * layer.value_dim);
  return wo.ok() ? Status::Ok() : Unsupported(who + "the output projection W_O" + where + wo.status().message());
}

Status CheckNeeds(const Model& model, const std::vector<baseline::Recipe>& recipes, int32_t number,
                  const LayerInfo& layer, const std::optional<OutputWeights>& weights) {
  for (const baseline::Recipe& recipe : recipes)
    DROPKV_RETURN_IF_ERROR(CheckNeeds(model, recipe, number, layer, weights ? &*weights : nullptr));
  return Status::Ok();
}

// Empty where no policy reads W_O.
Result<std::optional<OutputWeights>> OpenWeights(const Model& model, const std::vector<baseline::Recipe>& recipes) {
  const bool read = std::any_of(recipes.begin(), recipes.end(), [](const baseline::Recipe& recipe) {
    return baseline::NeedsOf(recipe).output_projection;
  });
  if (!read) return std::optional<OutputWeights>();
  Result<OutputWeights> weights = OutputWeights::Open(model.path());
  if (!weights.ok()) return weights.status();
  return std::optional(std::move(*weights));
}

int32_t Window(const PrefillOptions& options) {
  int32_t window = options.window;
  for (const baseline::Recipe& recipe : options.recipes) {
    if (recipe.scorer == baseline::Scorer::kFull) continue;
    window = std::max({window, recipe.policy.window, recipe.rows.draft_window, kCertificateRows});
  }
  return window;
}

// Cells for the tokens whose queries some policy asks.
int32_t GeneratedTokens(const PrefillOptions& options) {
  int32_t most = 0;
  for (const baseline::Recipe& recipe : options.recipes) most = std::max(most, recipe.rows.generated());
  return most;
}

// Decodes the whole prompt, the listeners in their places.
Status DecodePrompt(Prefilled* prefilled) {
  const PrefillOptions& options = prefilled->options;
  const int32_t n = prefilled->size();
  const std::span<const Token> all = prefilled->tokens;
  baseline::StatisticsPlan plan;
  for (const baseline::Recipe& recipe : options.recipes) plan.Add(recipe);
  if (plan.any())
    prefilled->statistics = std::make_unique<StatisticsCapture>(prefilled->tap.get(), plan, n, options.pool);
  StatisticsCapture* statistics = prefilled->statistics.get();
  // One row at least is watched: the visible counts of its mask tell sliding layers.
  const int32_t watched = std::max(1, prefilled->rows());
  prefilled->tap->set_listener(statistics);
  if (n > watched) {
    DROPKV_RETURN_IF_ERROR(prefilled->context->Decode(all.first(n - watched), 0, options.progress));
  }
  if (statistics != nullptr) {
    statistics->set_next(prefilled->capture.get());
  } else {
    prefilled->tap->set_listener(prefilled->capture.get());
  }
  DROPKV_RETURN_IF_ERROR(prefilled->context->Decode(all.last(watched), n - watched));
  prefilled->tap->set_listener(nullptr);
  prefilled->tap->set_recording(false);
  if (statistics != nullptr) {
    statistics->set_next(nullptr);
    prefilled->statistics_seconds = statistics->seconds();
  }
  return Status::Ok();
}

// Layers whose last row sees fewer cells than the prompt has tokens slide. With a prompt inside the window nothing
// tells them apart from the others: then all count as sliding and nothing is evicted.
Status SortLayers(Prefilled* prefilled) {
  const bool may_slide = prefilled->model->sliding_window() > 0;
  const bool inside = may_slide && prefilled->size() <= prefilled->model->sliding_window();
  const LayerInfo* first = nullptr;
  for (auto& [number, layer] : prefilled->tap->layers()) {
    DROPKV_RETURN_IF_ERROR(CheckLayer(*prefilled->model, number, &layer));
    if (inside || layer.last_row_sees < prefilled->size()) {
      if (!may_slide)
        return Unsupported("model '" + prefilled->model->name() + "', layer " + std::to_string(number) +
                           ": its last row sees " + std::to_string(layer.last_row_sees) + " of " +
                           std::to_string(prefilled->size()) + " tokens, but the model names no sliding window");
      prefilled->sliding.push_back(number);
      continue;
    }
    prefilled->layers.push_back(number);
    if (first == nullptr) first = &layer;
    DROPKV_RETURN_IF_ERROR(
        CheckNeeds(*prefilled->model, prefilled->options.recipes, number, layer, prefilled->weights));
    if (layer.kv_heads != first->kv_heads || layer.query_heads != first->query_heads ||
        layer.key_dim != first->key_dim || layer.value_dim != first->value_dim)
      return Unsupported("model '" + prefilled->model->name() + "': its layers differ in head counts or sizes");
  }
  return Status::Ok();
}

// Brings a device's cache to host memory, where it is going to be judged. What is there already is not copied again.
Status CopyCache(Prefilled* prefilled) {
  if (prefilled->rows() == 0) return Status::Ok();
  const auto start = Clock::now();
  for (const int32_t number : prefilled->layers) {
    LayerInfo& layer = prefilled->tap->layers().at(number);
    const Result<KvView> view = layer.View(layer.cells);
    if (!view.ok()) return view.status();
  }
  prefilled->copy_seconds = SecondsSince(start);
  return Status::Ok();
}

}  // namespace

int32_t Prefilled::rows() const { return std::min(options.window, size()); }

KeepList Prefilled::WithGenerated(const KeepList& keep) const {
  if (generated == 0 || keep.layers() == 0) return keep;
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> positions;
  for (int32_t list = 0; list < keep.layers() * keep.kv_heads(); ++list) {
    const std::span<const int32_t> kept = keep.head(list / keep.kv_heads(), list % keep.kv_heads());
    positions.insert(positions.end(), kept.begin(), kept.end());
    for (int32_t token = size(); token < end(); ++token) positions.push_back(token);
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  return {keep.layers(), keep.kv_heads(), std::move(offsets), std::move(positions)};
}

KeepList Prefilled::WithoutGenerated(const KeepList& keep) const {
  if (generated == 0) return keep;
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> positions;
  for (int32_t list = 0; list < keep.layers() * keep.kv_heads(); ++list) {
    const std::span<const int32_t> kept = keep.head(list / keep.kv_heads(), list % keep.kv_heads());
    positions.insert(positions.end(), kept.begin(), std::lower_bound(kept.begin(), kept.end(), size()));
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  return {keep.layers(), keep.kv_heads(), std::move(offsets), std::move(positions)};
}

int64_t Prefilled::KvBytes(int64_t kept) const {
  int64_t bytes = 0;
  if (!layers.empty()) {
    const LayerInfo& layer = tap->layers().at(layers.front());
    bytes += kept * DTypeBytes(options.kv_type, layer.key_dim + layer.value_dim);
  }
  for (const int32_t number : sliding) {
    const LayerInfo& layer = tap->layers().at(number);
    const int64_t cells = std::min(size(), std::max(1, layer.last_row_sees));
    bytes += cells * layer.kv_heads * DTypeBytes(options.kv_type, layer.key_dim + layer.value_dim);
  }
  return bytes;
}

int64_t Prefilled::KvBytesFull() const {
  if (layers.empty()) return KvBytes(0);
  const LayerInfo& layer = tap->layers().at(layers.front());
  return KvBytes(static_cast<int64_t>(layers.size()) * layer.kv_heads * size());
}

Result<Prefilled> Prefill(const Model& model, std::vector<Token> tokens, const PrefillOptions& options) {
  if (tokens.empty()) return InvalidArgument("prompt: expected at least one token, got none");
  Prefilled prefilled;
  prefilled.model = &model;
  prefilled.options = options;
  prefilled.options.window = Window(options);
  prefilled.tokens = std::move(tokens);
  prefilled.tap = std::make_unique<Tap>();
  prefilled.tap->set_always_copy(options.copy_cache);
  prefilled.capture = std::make_unique<WindowCapture>();
  Result<std::optional<OutputWeights>> weights = OpenWeights(model, options.recipes);
  if (!weights.ok()) return weights.status();
  prefilled.weights = std::move(*weights);
  const int32_t n = prefilled.size();
  ContextOptions context;
  // libllama takes no context smaller than its sequences.
  context.cells = std::max(256, n + std::max(options.reserve, GeneratedTokens(options)));
  context.ubatch = options.ubatch;
  context.threads = options.threads;
  context.flash_attention = options.flash_attention;
  context.kv_type = options.kv_type;
  context.sequences = 2;  // the second one names parts of the first
  context.tap = prefilled.tap.get();
  context.cancel = options.cancel;
  Result<Context> made = Context::Create(model, context);
  if (!made.ok()) return made.status();
  prefilled.context.emplace(std::move(*made));

  const auto start = Clock::now();
  DROPKV_RETURN_IF_ERROR(DecodePrompt(&prefilled));
  if (options.progress) options.progress(n);
  prefilled.seconds = SecondsSince(start) - prefilled.statistics_seconds;

  const std::span<const float> logits = prefilled.context->logits();
  prefilled.logits.assign(logits.begin(), logits.end());
  DROPKV_RETURN_IF_ERROR(SortLayers(&prefilled));
  DROPKV_RETURN_IF_ERROR(CopyCache(&prefilled));
  if (prefilled.statistics != nullptr) DROPKV_RETURN_IF_ERROR(prefilled.statistics->status());
  if (model.sliding_window() > 0) {
    Result<std::vector<uint8_t>> state = prefilled.context->State(0, n, true);
    if (!state.ok()) return state.status();
    prefilled.window_state = std::move(*state);
  }
  return prefilled;
}

double SelfTestLimit(bool flash_attention, DType kv_type) {
  if (kv_type == DType::kQ8_0) return 0.15;  // libllama then rounds the queries to 8 bits as well; 0.04 was seen
  if (kv_type == DType::kF32 && !flash_attention) return 5e-4;
  return flash_attention ? 3e-2 : 5e-3;
}

Result<SelfTest> RunSelfTest(const Model& model, std::span<const Token> tokens, const PrefillOptions& options) {
  constexpr int32_t kRecorded = 24;
  constexpr int32_t kShadowed = 8;
  // A short prompt is repeated: the test is about the graph, not about the text.
  std::vector<Token> text;
  while (text.size() < kRecorded + kShadowed) text.push_back(tokens[text.size() % tokens.size()]);
  Tap tap;
  tap.set_always_copy(options.copy_cache);
  ContextOptions small;
  small.cells = 256;
  small.ubatch = 64;
  small.threads = options.threads;
  small.flash_attention = options.flash_attention;
  small.kv_type = options.kv_type;
  small.tap = &tap;
  small.cancel = options.cancel;
  Result<Context> context = Context::Create(model, small);
  if (!context.ok()) return context.status();
  const std::span<const Token> all = text;
  DROPKV_RETURN_IF_ERROR(context->Decode(all.first(kRecorded), 0));
  if (tap.layers().empty())
    return Unsupported("model '" + model.name() + "': no attention over a KV cache was found in its graph");
  const Result<std::optional<OutputWeights>> weights = OpenWeights(model, options.recipes);
  if (!weights.ok()) return weights.status();
  for (auto& [number, layer] : tap.layers()) {
    DROPKV_RETURN_IF_ERROR(CheckLayer(model, number, &layer));
    DROPKV_RETURN_IF_ERROR(CheckNeeds(model, options.recipes, number, layer, *weights));
  }

  ShadowCheck shadow(&tap);
  DROPKV_RETURN_IF_ERROR(shadow.Fill());
  tap.set_listener(&shadow);
  for (int32_t i = kRecorded; i < kRecorded + kShadowed; ++i)
    DROPKV_RETURN_IF_ERROR(context->Decode(all.subspan(i, 1), i));
  DROPKV_RETURN_IF_ERROR(shadow.status());
  const SelfTest result{shadow.overall(), shadow.worst(), shadow.nodes()};
  if (result.nodes == 0 || !(result.worst <= SelfTestLimit(options.flash_attention, options.kv_type)))
    return Unsupported("model '" + model.name() + "': the start-up self-test failed: our attention differs from " +
                       "libllama's by " + std::to_string(result.worst) + " (relative, worst of " +
                       std::to_string(result.nodes) + " nodes), limit " +
                       std::to_string(SelfTestLimit(options.flash_attention, options.kv_type)));
  return result;
}

}  // namespace dropkv::llama
