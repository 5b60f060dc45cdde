#include "cli/score_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "cli/flags.h"
#include "cli/run_settings.h"

namespace dropkv::cli {
namespace {

// Flags as typed, before they are understood.
struct Raw {
  std::string policy;
  std::optional<std::string> budget;
  std::string pool;
  std::string heads;
  std::optional<uint32_t> seed;
  PolicyFlags flags;
};

Status ChoosePolicy(Raw* raw, ScoreOptions* options) {
  if (raw->policy.empty())
    return InvalidArgument("--policy: expected a policy, got none; `dropkv policies` lists them");
  const Result<baseline::Recipe> recipe = baseline::FindRecipe(raw->policy);
  if (!recipe.ok()) return FlagStatus("--policy", recipe.status());
  if (recipe->rows.generated() > 0)
    return InvalidArgument("--policy: expected a policy that the file's rows judge for, got " + recipe->name() +
                           ", which decodes some of its own (dropkv run, dropkv eval)");
  if (!raw->pool.empty()) {
    const Result<Pooling> pool = ParsePooling(raw->pool);
    if (!pool.ok()) return FlagStatus("--pool", pool.status());
    raw->flags.pool = *pool;
  }
  if (!raw->heads.empty()) {
    HeadRule rule = HeadRule::kUniform;
    DROPKV_RETURN_IF_ERROR(Choose<HeadRule>(
        "--heads", raw->heads, {{"uniform", HeadRule::kUniform}, {"ada", HeadRule::kAda}, {"ada-o", HeadRule::kAdaO}},
        &rule));
    raw->flags.heads = rule;
  }
  std::vector<baseline::Recipe> recipes{*recipe};
  const baseline::Scorer scorer = recipe->scorer;
  if (raw->seed && scorer != baseline::Scorer::kRandom && scorer != baseline::Scorer::kCompactor)
    return InvalidArgument("--seed: expected a policy that draws numbers (random, compactor), got " + recipe->name());
  if (raw->seed) recipes.front().policy.seed = *raw->seed;
  const Status settled = Settle(raw->flags, &recipes);
  if (!settled.ok()) return FlagStatus("", settled);
  options->recipe = std::move(recipes.front());
  return Status::Ok();
}

Status ChooseBudget(const Raw& raw, ScoreOptions* options) {
  if (options->compression_ratio) {
    const double ratio = *options->compression_ratio;
    if (raw.budget)
      return InvalidArgument("--budget, --compression-ratio: expected one of them (the share KEPT, or the share " +
                             std::string("REMOVED), got both"));
    if (!(ratio >= 0 && ratio < 1))
      return InvalidArgument("--compression-ratio: expected the share to REMOVE, 0 up to below 1, got " +
                             std::to_string(ratio));
    return Status::Ok();
  }
  if (raw.budget) options->budget_text = *raw.budget;
  const Result<Budget> budget = ParseBudget(options->budget_text);
  if (!budget.ok()) return FlagStatus("--budget", budget.status());
  options->budget = *budget;
  return Status::Ok();
}

Status CheckFiles(const ScoreOptions& options) {
  if (options.input.empty())
    return InvalidArgument("expected a safetensors file with q, k and v, got none; dropkv score --help");
  if (options.output.empty())
    return InvalidArgument("--out: expected the name of the safetensors file to write, got none");
  std::error_code error;
  if (std::filesystem::equivalent(options.input, options.output, error))
    return InvalidArgument("--out: expected another file than the input, got " + options.output);
  return Status::Ok();
}

Status CheckNumbers(const ScoreOptions& options) {
  const auto positive = [](const char* flag, const std::optional<double>& value) {
    if (!value || (std::isfinite(*value) && *value > 0)) return Status::Ok();
    return InvalidArgument(std::string(flag) + ": expected a number above 0, got " + std::to_string(*value));
  };
  DROPKV_RETURN_IF_ERROR(positive("--scale", options.scale));
  DROPKV_RETURN_IF_ERROR(positive("--rope-theta", options.rope_theta));
  if (options.soft_cap && !(std::isfinite(*options.soft_cap) && *options.soft_cap >= 0))
    return InvalidArgument("--soft-cap: expected a number of at least 0 (0: none), got " +
                           std::to_string(*options.soft_cap));
  if (options.layer && *options.layer < 0)
    return InvalidArgument("--layer: expected at least 0, got " + std::to_string(*options.layer));
  if (options.layers && *options.layers < 1)
    return InvalidArgument("--layers: expected at least 1, got " + std::to_string(*options.layers));
  if (options.threads < 0)
    return InvalidArgument("--threads: expected 0 or more, got " + std::to_string(options.threads));
  return Status::Ok();
}

}  // namespace

Result<std::optional<ScoreOptions>> ParseScore(std::vector<std::string> arguments) {
  ScoreOptions options;
  Raw raw;
  CLI::App app("dropkv score");
  app.set_help_flag();
  app.allow_windows_style_options(false);
  bool help = false;
  app.add_flag("-h,--help", help);
  app.add_option("input", options.input);
  app.add_option("-o,--out", options.output);
  app.add_option("--policy", raw.policy);
  app.add_option("--window", raw.flags.window);
  app.add_option("--pool", raw.pool);
  app.add_option("--sink", raw.flags.sink);
  app.add_option("--heads", raw.heads);
  app.add_option("--alpha", raw.flags.alpha);
  app.add_option("--seed", raw.seed);
  app.add_option("--budget", raw.budget);
  app.add_option("--compression-ratio", options.compression_ratio);
  app.add_flag("--parity", options.parity);
  app.add_option("--scale", options.scale);
  app.add_option("--rope-theta", options.rope_theta);
  app.add_option("--soft-cap", options.soft_cap);
  app.add_option("--layer", options.layer);
  app.add_option("--layers", options.layers);
  app.add_option("--threads", options.threads);
  app.add_flag("--json", options.json);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return InvalidArgument(std::string(error.what()) + " (dropkv score --help lists the flags)");
  }
  if (help) return std::optional<ScoreOptions>();
  DROPKV_RETURN_IF_ERROR(CheckFiles(options));
  DROPKV_RETURN_IF_ERROR(ChoosePolicy(&raw, &options));
  DROPKV_RETURN_IF_ERROR(ChooseBudget(raw, &options));
  DROPKV_RETURN_IF_ERROR(CheckNumbers(options));
  return std::optional(std::move(options));
}

std::string ScoreHelp() {
  return R"(usage: dropkv score IN.safetensors --policy NAME --out OUT.safetensors [flags]
Scores the cache of one attention layer by any policy and selects the tokens to keep; no model is needed.
  dropkv score layer.safetensors --policy snapkv --budget 10% --out kept.safetensors

IN holds, as f32, f16 or bf16, for Hq query heads, Hkv KV heads and n tokens (a batch axis of 1 may come first):
  k [Hkv, n, d], v [Hkv, n, dv]    the cache, keys after RoPE
  q [Hq, n, d]                     queries after RoPE; or q_window [Hq, w, d]: those of the last w tokens alone
  q_pre, k_pre, wo, sinks [Hq]     where a policy needs them: before RoPE, output projection [hidden, Hq*dv]
and, as metadata or by the flags of the same names, scale (1/sqrt(d)), rope_theta, soft_cap, layer, layers.

OUT gets score [Hkv, n]; kept [Hkv, kept], or one list with kept_offsets [Hkv + 1] where heads differ; kept_mask
[Hkv, n]; and what the eviction does to the last rows: output_error and evicted_mass [Hq].

      --policy NAME          `dropkv policies` lists them; also ada-NAME, critical-NAME, chunk-NAME, NAME.w32.k5
  -o, --out FILE             nothing is written where anything fails
      --budget P%|N          share of the tokens KEPT, or tokens per KV head (10%)
      --compression-ratio R  share REMOVED instead, counted as the references do: trunc(n (1 - R)), never raised
      --parity               score: the reference's own values, protected tokens padded as it pads them
      --window W  --pool K|B,F|max:K  --sink S  --heads uniform|ada|ada-o  --alpha A  --seed N
                             instead of the policy's own settings
      --scale X  --rope-theta T  --soft-cap C  --layer I  --layers L
                             instead of the metadata; layer I of L matters to policies that share among layers
      --threads N            (one per core);   --json  one object on standard output, nothing else
)";
}

}  // namespace dropkv::cli
