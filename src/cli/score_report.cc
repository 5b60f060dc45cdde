#include "cli/score_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "dropkv/version.h"
#include "io/safetensors.h"

namespace dropkv::cli {
namespace {

std::string BudgetText(const ScoreOptions& options) {
  if (options.compression_ratio) return fmt::format("compression ratio {}", *options.compression_ratio);
  return options.budget_text;
}

double Mean(const std::vector<float>& values) {
  return values.empty() ? 0.0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::vector<int64_t> Lengths(const KeepList& keep) {
  std::vector<int64_t> lengths(keep.kv_heads());
  for (int32_t head = 0; head < keep.kv_heads(); ++head)
    lengths[head] = static_cast<int64_t>(keep.head(0, head).size());
  return lengths;
}

io::StringMap Metadata(const ScoreOptions& options, const ScoreInput& input, const ScoreResult& result) {
  const Policy& policy = options.recipe.policy;
  io::StringMap map{{"dropkv", std::string(Version())},
                    {"policy", policy.name},
                    {"window", std::to_string(policy.window)},
                    {"pool", PoolingText(policy.pool)},
                    {"sink", std::to_string(policy.sink)},
                    {"heads", options.recipe.flat_heads ? "flat" : std::string(HeadRuleName(policy.heads))},
                    {"n", std::to_string(input.tokens)},
                    {"hkv", std::to_string(input.kv_heads)},
                    {"parity", options.parity ? "true" : "false"},
                    {"certificate_rows", std::to_string(result.certificate_rows)}};
  if (options.compression_ratio) {
    map["compression_ratio"] = fmt::format("{}", *options.compression_ratio);
  } else {
    map["budget"] = options.budget_text;
  }
  return map;
}

// "mean 0.012, largest 0.034 in head 5".
std::string Spread(const std::vector<float>& values) {
  const auto largest = std::max_element(values.begin(), values.end());
  return fmt::format("mean {:.4g}, largest {:.4g} in query head {}", Mean(values), *largest, largest - values.begin());
}

}  // namespace

Status WriteScore(const ScoreOptions& options, const ScoreInput& input, const ScoreResult& result) {
  const KeepList& keep = result.keep;
  std::vector<int32_t> kept;
  std::vector<int64_t> offsets{0};
  std::vector<uint8_t> mask(static_cast<size_t>(input.kv_heads) * input.tokens, 0);
  for (int32_t head = 0; head < input.kv_heads; ++head) {
    for (const int32_t token : keep.head(0, head)) {
      kept.push_back(token);
      mask[static_cast<size_t>(head) * input.tokens + token] = 1;
    }
    offsets.push_back(static_cast<int64_t>(kept.size()));
  }
  std::vector<io::TensorSource> tensors{
      io::MakeTensorSource("score", "F32", {input.kv_heads, input.tokens}, result.score),
      io::MakeTensorSource("kept_mask", "U8", {input.kv_heads, input.tokens}, mask)};
  if (keep.uniform()) {
    tensors.push_back(io::MakeTensorSource("kept", "I32", {input.kv_heads, keep.max_length()}, kept));
  } else {
    tensors.push_back(io::MakeTensorSource("kept", "I32", {keep.total()}, kept));
    tensors.push_back(io::MakeTensorSource("kept_offsets", "I64", {input.kv_heads + 1}, offsets));
  }
  if (result.certificate_rows > 0) {
    tensors.push_back(io::MakeTensorSource("output_error", "F32", {input.query_heads}, result.output_error));
    tensors.push_back(io::MakeTensorSource("evicted_mass", "F32", {input.query_heads}, result.evicted_mass));
  }
  return io::WriteSafetensors(options.output, std::move(tensors), Metadata(options, input, result));
}

std::string ScoreText(const ScoreOptions& options, const ScoreInput& input, const ScoreResult& result) {
  const Policy& policy = options.recipe.policy;
  const KeepList& keep = result.keep;
  std::string text = fmt::format("policy       {}: window {}, pool {}, sink {}, heads {}\n", policy.name, policy.window,
                                 PoolingText(policy.pool), policy.sink,
                                 options.recipe.flat_heads ? "flat" : HeadRuleName(policy.heads));
  text += fmt::format("layer        {}: {} tokens, {} KV heads of {}", options.input, input.tokens, input.kv_heads,
                      input.key_dim);
  text += input.query_heads > 0 ? fmt::format(", {} query heads\n", input.query_heads) : "\n";
  const double share = 100.0 * keep.mean_length() / input.tokens;
  text += keep.uniform() ? fmt::format("kept         {} of {} tokens per KV head ({:.1f}%)", keep.max_length(),
                                       input.tokens, share)
                         : fmt::format("kept         {} to {} of {} tokens per KV head, {:.1f} on average ({:.1f}%)",
                                       keep.min_length(), keep.max_length(), input.tokens, keep.mean_length(), share);
  text += fmt::format(", asked for {}\n", BudgetText(options));
  if (result.certificate_rows > 0) {
    text +=
        fmt::format("output error {}, over the last {} rows\n", Spread(result.output_error), result.certificate_rows);
    text += fmt::format("evicted mass {}\n", Spread(result.evicted_mass));
  }
  for (const std::string& remark : result.remarks) text += fmt::format("note         {}\n", remark);
  return text + fmt::format("written      {}\n", options.output);
}

std::string ScoreJson(const ScoreOptions& options, const ScoreInput& input, const ScoreResult& result) {
  using Json = nlohmann::ordered_json;
  const Policy& policy = options.recipe.policy;
  const KeepList& keep = result.keep;
  Json json{{"input", options.input},
            {"output", options.output},
            {"policy", policy.name},
            {"window", policy.window},
            {"pool", PoolingText(policy.pool)},
            {"sink", policy.sink},
            {"heads", options.recipe.flat_heads ? "flat" : std::string(HeadRuleName(policy.heads))},
            {"parity", options.parity},
            {"n", input.tokens},
            {"query_heads", input.query_heads},
            {"kv_heads", input.kv_heads},
            {"key_dim", input.key_dim},
            {"value_dim", input.value_dim},
            {"scale", input.scale}};
  if (options.compression_ratio) {
    json["compression_ratio"] = *options.compression_ratio;
  } else {
    json["budget"] = options.budget_text;
  }
  json["kept"] = {{"min", keep.min_length()},
                  {"mean", keep.mean_length()},
                  {"max", keep.max_length()},
                  {"per_head", Lengths(keep)}};
  json["certificate_rows"] = result.certificate_rows;
  if (result.certificate_rows > 0) {
    json["output_error"] = {{"mean", Mean(result.output_error)}, {"per_head", result.output_error}};
    json["evicted_mass"] = {{"mean", Mean(result.evicted_mass)}, {"per_head", result.evicted_mass}};
  }
  json["nonfinite_tokens"] = result.nonfinite_tokens;
  json["remarks"] = result.remarks;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace dropkv::cli
