#include "eval/runner/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <tuple>

#include "llama/evict.h"

namespace dropkv::eval {

using baseline::Recipe;

namespace {

std::string PoolText(const Pooling& pool) {
  const std::string kind = pool.kind == PoolKind::kMax ? "max:" : "";
  if (pool.before == pool.after) return kind + std::to_string(2 * pool.before + 1);
  return fmt::format("{}{},{}", kind, pool.before, pool.after);
}

auto PolicyFields(const Recipe& r) {
  const Pooling& pool = r.policy.pool;
  return std::make_tuple(r.policy.window, baseline::RowsText(r.rows, r.policy.window), pool.kind, pool.before,
                         pool.after, pool.past_only, r.policy.sink, r.policy.heads, r.policy.alpha, r.policy.seed);
}

auto ScoreFields(const Recipe& r) {
  return std::make_tuple(r.scorer, r.base, r.group, r.group_before_pool, r.critical, r.first_stage, r.epsilon, r.chunk,
                         r.block, r.future, r.covariance, r.value_norm, r.cross, r.exact_bias, r.gamma, r.sketch, r.cur,
                         r.obcache);
}

auto BudgetFields(const Recipe& r) {
  return std::make_tuple(r.protect_window, r.recent, r.recent_share, r.layers, r.flat_heads, r.pyramid_beta,
                         r.cake_tau1, r.cake_tau2);
}

Status Wrong(const Job& job, const std::string& what) {
  return {Code::kInternal, fmt::format("{} at {}: {}", job.name(), job.text, what)};
}

}  // namespace

std::string PoolName(const Recipe& recipe) {
  return baseline::NeedsOf(recipe).window_queries ? PoolText(recipe.policy.pool) : "1";
}

std::string HeadsName(const Recipe& recipe) {
  return recipe.flat_heads ? "flat" : std::string(HeadRuleName(recipe.policy.heads));
}

std::string SettingName(const Recipe& recipe) {
  std::string name = recipe.name();
  const Result<Recipe> found = baseline::FindRecipe(name);
  if (!found.ok()) return name;
  const Policy& own = found->policy;
  const Policy& policy = recipe.policy;
  if (policy.window != own.window) name += fmt::format(" w={}", policy.window);
  const auto rows = [](const Recipe& r) { return baseline::RowsText(r.rows, r.policy.window); };
  if (recipe.rows.generated() > 0 && rows(recipe) != rows(*found)) name += fmt::format(" {}", rows(recipe));
  if (!(policy.pool == own.pool)) name += " k=" + PoolText(policy.pool);
  if (policy.sink != own.sink) name += fmt::format(" sink={}", policy.sink);
  if (policy.heads != own.heads) name += fmt::format(" {}", HeadRuleName(policy.heads));
  const bool shares = policy.heads != HeadRule::kUniform && !recipe.flat_heads;
  if (shares && policy.alpha != own.alpha) name += fmt::format(" alpha={}", policy.alpha);
  return name;
}

bool SameEviction(const Recipe& a, const Recipe& b) {
  return PolicyFields(a) == PolicyFields(b) && ScoreFields(a) == ScoreFields(b) && BudgetFields(a) == BudgetFields(b);
}

Result<std::vector<Job>> MakeJobs(const std::vector<Setting>& settings, const std::vector<std::string>& budgets) {
  std::vector<Job> jobs = {{nullptr, "100%", Budget::Fraction(1)}};
  for (const Setting& setting : settings) {
    for (const std::string& text : budgets) {
      const Result<Budget> budget = ParseBudget(text);
      if (!budget.ok()) return budget.status();
      jobs.push_back({&setting, text, *budget});
    }
  }
  return jobs;
}

int32_t AskedTokens(const Budget& budget, int32_t n) {
  // As ResolveBudget rounds.
  if (budget.fraction) return static_cast<int32_t>(std::floor(*budget.fraction * n + 1e-6));
  return static_cast<int32_t>(std::min<int64_t>(budget.tokens, n));
}

Status CheckRoom(const Job& job, int32_t n) {
  if (job.full() || AskedTokens(job.budget, n) >= n) return Status::Ok();
  const Recipe& recipe = job.setting->recipe;
  const Result<KeepCount> count = llama::ResolveBudget(job.budget, recipe, llama::ProtectedTokens(recipe), n);
  if (!count.ok()) return {count.status().code(), "--budgets: " + count.status().message()};
  if (count->keep < n) return Status::Ok();
  return InvalidArgument(fmt::format("{} at {}: the budget asks for {} of {} tokens, but the policy always keeps {}",
                                     job.name(), job.text, AskedTokens(job.budget, n), n,
                                     llama::ProtectedTokens(recipe)));
}

Status CheckKept(const Job& job, int32_t keep, int32_t n, const KeepList& list) {
  const Recipe& recipe = job.setting->recipe;
  const int64_t lists = static_cast<int64_t>(list.layers()) * list.kv_heads();
  if (AskedTokens(job.budget, n) < n && list.total() >= lists * n)
    return Wrong(job, fmt::format("the budget asks for {} of {} tokens per KV head, but nothing was evicted",
                                  AskedTokens(job.budget, n), n));
  // What else there is was checked against its own budgets, layer by layer, where it was selected.
  if (!baseline::RunsOnEngine(recipe)) return Status::Ok();
  const bool rounds_itself = recipe.policy.heads == HeadRule::kAdaO;
  for (int32_t layer = 0; layer < list.layers(); ++layer) {
    int64_t total = 0;
    for (int32_t head = 0; head < list.kv_heads(); ++head) {
      const auto kept = static_cast<int64_t>(list.head(layer, head).size());
      total += kept;
      if (recipe.policy.heads == HeadRule::kUniform && kept != keep)
        return Wrong(job, fmt::format("layer {}, head {}: expected {} kept tokens, got {}", layer, head, keep, kept));
    }
    const int64_t expected = static_cast<int64_t>(keep) * list.kv_heads();
    const int64_t slack = rounds_itself ? list.kv_heads() : 0;
    if (std::abs(total - expected) > slack)
      return Wrong(job, fmt::format("layer {}: expected {} kept tokens in all, got {}", layer, expected, total));
  }
  return Status::Ok();
}

std::vector<KeptTokens> KeptOfLayers(const KeepList& list) {
  std::vector<KeptTokens> layers(list.layers());
  for (int32_t layer = 0; layer < list.layers(); ++layer) {
    KeptTokens& kept = layers[layer];
    int64_t total = 0;
    for (int32_t head = 0; head < list.kv_heads(); ++head) {
      const auto count = static_cast<int32_t>(list.head(layer, head).size());
      kept.min = head == 0 ? count : std::min(kept.min, count);
      kept.max = std::max(kept.max, count);
      total += count;
    }
    kept.mean = static_cast<double>(total) / list.kv_heads();
  }
  return layers;
}

std::string RowKey(const Row& row) {
  return fmt::format("{}\x1f{}\x1f{}\x1f{}", row.sample_key(), row.setting, row.budget, row.hidden ? "hidden" : "seen");
}

}  // namespace dropkv::eval
