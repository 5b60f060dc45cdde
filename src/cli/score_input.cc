#include "cli/score_input.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "baseline/recipe.h"

namespace dropkv::cli {
namespace {

using baseline::Recipe;
using io::Safetensors;

constexpr int32_t kStatisticsRows = 256;  // queries that are turned token by token at a time

int32_t PaddedDim(int32_t dim) { return (dim + 7) / 8 * 8; }

class Loader {
 public:
  Loader(const Safetensors& file, const ScoreOptions& options)
      : file_(file), options_(options), needs_(baseline::NeedsOf(options.recipe)) {
    baseline::StatisticsPlan plan;
    plan.Add(options.recipe);
    all_rows_ = plan.any();
  }

  Result<ScoreInput> Load() {
    DROPKV_RETURN_IF_ERROR(ReadShapes());
    DROPKV_RETURN_IF_ERROR(ReadSettings());
    DROPKV_RETURN_IF_ERROR(CheckNeeds());
    DROPKV_RETURN_IF_ERROR(ReadTensors());
    return std::move(input_);
  }

 private:
  bool Has(const char* name) const { return file_.Find(name) != nullptr; }

  Status Wrong(const std::string& name, const std::string& text) const {
    return InvalidArgument(file_.path() + ": tensor '" + name + "': " + text);
  }

  // The extents, after a batch axis of 1; every one from 1 to what an int32 holds.
  Result<std::vector<int32_t>> Extents(const char* name, const std::string& expected, size_t rank) const {
    const Safetensors::Tensor& tensor = *file_.Find(name);
    std::vector<int64_t> shape = tensor.shape;
    if (shape.size() == rank + 1 && rank > 1 && shape.front() == 1) shape.erase(shape.begin());
    const bool fits = std::all_of(shape.begin(), shape.end(), [](int64_t extent) {
      return extent >= 1 && extent <= std::numeric_limits<int32_t>::max() / 2;
    });
    if (shape.size() != rank || !fits)
      return Wrong(name, "expected " + expected + ", got " + io::ShapeText(tensor.shape));
    const std::string& dtype = tensor.dtype;
    if (dtype != "F32" && dtype != "F16" && dtype != "BF16" && dtype != "F64")
      return Wrong(name, "expected f32, f16 or bf16, got " + dtype);
    return std::vector<int32_t>(shape.begin(), shape.end());
  }

  // One of the tensors whose first extent counts heads: the others must be those of k. rows 0: any number up to n.
  Status CheckQueries(const char* name, const std::string& expected, int32_t rows) {
    if (!Has(name)) return Status::Ok();
    const Result<std::vector<int32_t>> extents = Extents(name, expected, 3);
    if (!extents.ok()) return extents.status();
    const std::vector<int32_t>& e = *extents;
    const bool rows_fit = rows == 0 ? e[1] <= input_.tokens : e[1] == rows;
    if (!rows_fit || e[2] != input_.key_dim)
      return Wrong(name, "expected " + expected + " with n " + std::to_string(input_.tokens) + " and d " +
                             std::to_string(input_.key_dim) + " as in 'k', got " + Shape(name));
    return SetQueryHeads(name, e[0]);
  }

  Status SetQueryHeads(const char* name, int32_t heads) {
    if (heads % input_.kv_heads != 0)
      return Wrong(name, "expected a multiple of the " + std::to_string(input_.kv_heads) + " KV heads of 'k', got " +
                             std::to_string(heads) + " query heads");
    if (input_.query_heads != 0 && heads != input_.query_heads)
      return Wrong(name, "expected " + std::to_string(input_.query_heads) + " query heads as in '" + heads_from_ +
                             "', got " + std::to_string(heads));
    input_.query_heads = heads;
    heads_from_ = name;
    return Status::Ok();
  }

  std::string Shape(const char* name) const { return io::ShapeText(file_.Find(name)->shape); }

  Status ReadShapes() {
    for (const char* name : {"k", "v"})
      if (!Has(name)) return Wrong(name, "missing; the cache is k [Hkv, n, d] and v [Hkv, n, dv]");
    const Result<std::vector<int32_t>> k = Extents("k", "[Hkv, n, d]", 3);
    if (!k.ok()) return k.status();
    const Result<std::vector<int32_t>> v = Extents("v", "[Hkv, n, dv]", 3);
    if (!v.ok()) return v.status();
    input_.kv_heads = (*k)[0];
    input_.tokens = (*k)[1];
    input_.key_dim = (*k)[2];
    input_.value_dim = (*v)[2];
    if ((*v)[0] != input_.kv_heads || (*v)[1] != input_.tokens)
      return Wrong("v", "expected [Hkv, n, dv] with Hkv " + std::to_string(input_.kv_heads) + " and n " +
                            std::to_string(input_.tokens) + " as in 'k', got " + Shape("v"));
    input_.padded_key_dim = PaddedDim(input_.key_dim);
    input_.padded_value_dim = PaddedDim(input_.value_dim);
    DROPKV_RETURN_IF_ERROR(CheckQueries("q", "[Hq, n, d]", input_.tokens));
    DROPKV_RETURN_IF_ERROR(CheckQueries("q_window", "[Hq, w, d]", 0));
    DROPKV_RETURN_IF_ERROR(CheckQueries("q_pre", "[Hq, n, d]", input_.tokens));
    if (Has("k_pre")) {
      const Result<std::vector<int32_t>> k_pre = Extents("k_pre", "[Hkv, n, d]", 3);
      if (!k_pre.ok()) return k_pre.status();
      if (*k_pre != *k) return Wrong("k_pre", "expected the shape of 'k', " + Shape("k") + ", got " + Shape("k_pre"));
    }
    return ReadOtherShapes();
  }

  Status ReadOtherShapes() {
    if (Has("wo")) {
      const Result<std::vector<int32_t>> wo = Extents("wo", "[hidden, Hq * dv]", 2);
      if (!wo.ok()) return wo.status();
      if ((*wo)[1] % input_.value_dim != 0)
        return Wrong("wo", "expected [hidden, Hq * dv] with dv " + std::to_string(input_.value_dim) +
                               " as in 'v', got " + Shape("wo"));
      input_.hidden = (*wo)[0];
      DROPKV_RETURN_IF_ERROR(SetQueryHeads("wo", (*wo)[1] / input_.value_dim));
    }
    if (!Has("sinks")) return Status::Ok();
    const Result<std::vector<int32_t>> sinks = Extents("sinks", "[Hq]", 1);
    if (!sinks.ok()) return sinks.status();
    return SetQueryHeads("sinks", (*sinks)[0]);
  }

  // A flag, else the metadata; range: what is asked for.
  template <typename Accept>
  Status Setting(const char* key, const std::optional<double>& flag, const std::string& range, Accept&& accept,
                 std::optional<double>* value) const {
    *value = flag;
    if (flag || !file_.metadata().contains(key)) return Status::Ok();
    const Result<double> number = file_.Number(key);
    if (!number.ok()) return number.status();
    if (!accept(*number))
      return InvalidArgument(file_.path() + ": metadata '" + key + "': expected " + range + ", got '" +
                             file_.metadata().find(key)->second + "'");
    *value = *number;
    return Status::Ok();
  }

  Status ReadSettings() {
    const auto positive = [](double x) { return x > 0 && x <= std::numeric_limits<float>::max(); };
    const auto count = [](double x) { return x >= 0 && x <= 1e6 && x == std::floor(x); };
    std::optional<double> value;
    DROPKV_RETURN_IF_ERROR(Setting("scale", options_.scale, "a number above 0", positive, &value));
    if (!value) input_.notes.emplace_back("no scale in the metadata and no --scale: 1/sqrt(d) is taken");
    input_.scale = static_cast<float>(value.value_or(1.0 / std::sqrt(static_cast<double>(input_.key_dim))));
    const auto cap = [&](double x) { return x == 0 || positive(x); };
    DROPKV_RETURN_IF_ERROR(Setting("soft_cap", options_.soft_cap, "a number of at least 0", cap, &value));
    input_.soft_cap = static_cast<float>(value.value_or(0.0));
    DROPKV_RETURN_IF_ERROR(Setting("rope_theta", options_.rope_theta, "a number above 0", positive, &value));
    if (value && input_.key_dim % 2 == 0) input_.rope = baseline::Rope::Standard(input_.key_dim, *value);
    DROPKV_RETURN_IF_ERROR(Setting(
        "layers", options_.layers, "a whole number of at least 1", [&](double x) { return x >= 1 && count(x); },
        &value));
    input_.layers = static_cast<int32_t>(value.value_or(0));
    DROPKV_RETURN_IF_ERROR(Setting("layer", options_.layer, "a whole number of at least 0", count, &value));
    input_.layer = static_cast<int32_t>(value.value_or(0));
    const bool is_known = value.has_value() && input_.layers > 0;
    if (is_known && input_.layer >= input_.layers)
      return InvalidArgument("--layer: expected a layer of the " + std::to_string(input_.layers) + ", 0 to " +
                             std::to_string(input_.layers - 1) + ", got " + std::to_string(input_.layer));
    const baseline::LayerRule rule = options_.recipe.layers;
    if ((rule == baseline::LayerRule::kPyramid || rule == baseline::LayerRule::kPyramidOriginal) && !is_known)
      return Lacks("layer and layers (metadata, or --layer and --layers): its layers get different shares");
    return Status::Ok();
  }

  Status Lacks(const std::string& what) const {
    return InvalidArgument(file_.path() + ": policy " + options_.recipe.name() + " needs " + what);
  }

  int32_t CountRows() const {
    if (Has("q")) return input_.tokens;
    return Has("q_window") ? (*Extents("q_window", "", 3))[1] : 0;
  }

  Status CheckNeeds() const {
    const Recipe& recipe = options_.recipe;
    const int32_t window = std::min(recipe.policy.window, input_.tokens);
    const int32_t rows = CountRows();
    if (needs_.window_queries && rows == 0)
      return Lacks("the queries of the last " + std::to_string(window) +
                   " rows, as q [Hq, n, d] or q_window [Hq, w, d]; the file has neither");
    if (needs_.window_queries && rows < window)
      return Lacks("the queries of the last " + std::to_string(window) + " rows; q_window has " + std::to_string(rows) +
                   " (--window takes fewer)");
    if (all_rows_ && rows < input_.tokens)
      return Lacks("the queries of all " + std::to_string(input_.tokens) + " rows, q [Hq, n, d]; the file has " +
                   (rows == 0 ? "none" : "q_window alone"));
    const bool rope = input_.rope.dims > 0;
    if (needs_.pre_rope_queries && !rope)
      return Lacks("rope_theta (metadata, or --rope-theta) and an even d, to turn queries to positions to come" +
                   std::string(Has("q_pre") ? "" : ", and q_pre [Hq, n, d] unless that undoes q's rotation"));
    if (needs_.pre_rope_keys && !rope && !Has("k_pre"))
      return Lacks("k_pre [Hkv, n, d], or rope_theta (metadata, or --rope-theta) to undo the rotation of k");
    if (needs_.output_projection && !Has("wo")) return Lacks("wo [hidden, Hq * dv]; the file has none");
    if (input_.padded() && recipe.scorer == baseline::Scorer::kLag)
      return Unsupported(file_.path() + ": policy " + recipe.name() + ": expected head sizes that are multiples of 8" +
                         ", got " + std::to_string(input_.key_dim) + " and " + std::to_string(input_.value_dim));
    return Status::Ok();
  }

  // rows last rows of each of `heads` heads, with zeros behind every row.
  Status ReadHeads(const char* name, int32_t heads, int32_t file_rows, int32_t rows, int32_t dim, int32_t padded,
                   std::vector<float>* target) const {
    const int64_t head_size = int64_t{rows} * dim;
    target->assign(static_cast<size_t>(heads) * rows * padded, 0.0F);
    std::vector<float> head(dim == padded ? 0 : head_size);
    for (int32_t h = 0; h < heads; ++h) {
      const int64_t first = (int64_t{h} * file_rows + file_rows - rows) * dim;
      float* const to = target->data() + static_cast<size_t>(h) * rows * padded;
      const std::span<float> part = dim == padded ? std::span(to, head_size) : std::span(head);
      DROPKV_RETURN_IF_ERROR(file_.ReadFloats(name, first, part));
      for (int32_t i = 0; i < rows && dim != padded; ++i)
        std::copy_n(head.data() + int64_t{i} * dim, dim, to + int64_t{i} * padded);
    }
    return Status::Ok();
  }

  Status ReadTensors() {
    ScoreInput& in = input_;
    DROPKV_RETURN_IF_ERROR(ReadHeads("k", in.kv_heads, in.tokens, in.tokens, in.key_dim, in.padded_key_dim, &in.k));
    DROPKV_RETURN_IF_ERROR(ReadHeads("v", in.kv_heads, in.tokens, in.tokens, in.value_dim, in.padded_value_dim, &in.v));
    const int32_t rows = CountRows();
    const int32_t wanted = std::max(options_.recipe.policy.window, kCertificateRows);
    in.query_rows = all_rows_ ? rows : std::min(rows, wanted);
    const char* const queries = Has("q") ? "q" : "q_window";
    DROPKV_RETURN_IF_ERROR(
        ReadHeads(queries, rows > 0 ? in.query_heads : 0, rows, in.query_rows, in.key_dim, in.padded_key_dim, &in.q));
    if (needs_.pre_rope_queries && Has("q_pre"))
      DROPKV_RETURN_IF_ERROR(
          ReadHeads("q_pre", in.query_heads, in.tokens, in.tokens, in.key_dim, in.padded_key_dim, &in.q_pre));
    if (needs_.pre_rope_keys && Has("k_pre"))
      DROPKV_RETURN_IF_ERROR(
          ReadHeads("k_pre", in.kv_heads, in.tokens, in.tokens, in.key_dim, in.padded_key_dim, &in.k_pre));
    if (needs_.output_projection) {
      Result<std::vector<float>> wo = file_.ReadFloats("wo");
      if (!wo.ok()) return wo.status();
      in.wo = std::move(*wo);
    }
    if (!Has("sinks")) return Status::Ok();
    Result<std::vector<float>> sinks = file_.ReadFloats("sinks");
    if (!sinks.ok()) return sinks.status();
    in.sinks = std::move(*sinks);
    const auto bad = std::find_if(in.sinks.begin(), in.sinks.end(), [](float x) { return !std::isfinite(x); });
    if (bad == in.sinks.end()) return Status::Ok();
    return Wrong("sinks", "expected finite numbers, got " + std::to_string(*bad));
  }

  const Safetensors& file_;
  const ScoreOptions& options_;
  baseline::Needs needs_;
  bool all_rows_ = false;
  std::string heads_from_;
  ScoreInput input_;
};

}  // namespace

KvView ScoreInput::View() const {
  const auto tensor = [&](const std::vector<float>& values, int32_t dim) {
    return KvTensor{values.data(), DType::kF32, static_cast<int64_t>(tokens) * dim, dim, 1};
  };
  return {kv_heads, tokens, padded_key_dim, padded_value_dim, tensor(k, padded_key_dim), tensor(v, padded_value_dim),
          nullptr};
}

AttentionSpec ScoreInput::Attention() const { return {scale, soft_cap, sinks.empty() ? nullptr : sinks.data()}; }

ObservationRows ScoreInput::LastRows(int32_t count, std::vector<int32_t>* visible) const {
  count = std::min(count, query_rows);
  if (count == 0) return {};
  visible->resize(count);
  std::iota(visible->begin(), visible->end(), tokens - count + 1);
  const float* first = q.data() + static_cast<size_t>(query_rows - count) * padded_key_dim;
  return {first,          static_cast<int64_t>(query_rows) * padded_key_dim, padded_key_dim, query_heads, count,
          visible->data()};
}

baseline::OutputProjection ScoreInput::Projection() const {
  if (wo.empty()) return {};
  const int32_t columns = query_heads * value_dim;
  return {hidden, query_heads * padded_value_dim, [this, columns](int32_t row, float* out) {
            const float* from = wo.data() + static_cast<size_t>(row) * columns;
            std::fill_n(out, static_cast<size_t>(query_heads) * padded_value_dim, 0.0F);
            for (int32_t h = 0; h < query_heads; ++h)
              std::copy_n(from + int64_t{h} * value_dim, value_dim, out + int64_t{h} * padded_value_dim);
          }};
}

Result<ScoreInput> LoadScoreInput(const ScoreOptions& options) {
  const Result<Safetensors> file = Safetensors::Open(options.input);
  if (!file.ok()) return file.status();
  return Loader(*file, options).Load();
}

Result<baseline::PromptStatistics> GatherStatistics(const Recipe& recipe, const ScoreInput& input, ThreadPool* pool) {
  baseline::StatisticsPlan plan;
  plan.Add(recipe);
  if (!plan.any()) return baseline::PromptStatistics();
  const int32_t d = input.padded_key_dim;
  baseline::PromptStatistics statistics(plan, input.query_heads, input.kv_heads, input.tokens, d);
  // From [Hq, n, d] to [rows, Hq, d].
  const auto turn = [&](const std::vector<float>& from, int32_t first, int32_t count, std::vector<float>* to) {
    to->resize(static_cast<size_t>(count) * input.query_heads * d);
    for (int32_t h = 0; h < input.query_heads; ++h)
      for (int32_t i = 0; i < count; ++i)
        std::copy_n(from.data() + (int64_t{h} * input.tokens + first + i) * d, d,
                    to->data() + (int64_t{i} * input.query_heads + h) * d);
  };
  std::vector<float> q;
  std::vector<float> q_pre;
  for (int32_t first = 0; first < input.tokens; first += kStatisticsRows) {
    const int32_t count = std::min(kStatisticsRows, input.tokens - first);
    turn(input.q, first, count, &q);
    if (!input.q_pre.empty()) turn(input.q_pre, first, count, &q_pre);
    DROPKV_RETURN_IF_ERROR(statistics.Add(input.View(), input.Attention(), input.rope, q.data(),
                                          input.q_pre.empty() ? nullptr : q_pre.data(), first, count, pool));
  }
  return statistics;
}

}  // namespace dropkv::cli
