// What is run on every sample: policies under the names that tables group them by, each at every budget.
#pragma once

#include <string>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"
#include "dropkv/status.h"
#include "eval/row.h"

namespace dropkv::eval {

struct Setting {
  std::string name;
  baseline::Recipe recipe;
};

// The policy's name, and behind it what is not the preset's own: "snapkv w=8 k=11 ada".
std::string SettingName(const baseline::Recipe& recipe);

// "11", "3,20", "max:7"; "1" where nothing is pooled.
std::string PoolName(const baseline::Recipe& recipe);

// "uniform", "ada", "ada-o", "flat".
std::string HeadsName(const baseline::Recipe& recipe);

// Whether two recipes evict alike, whatever they are called.
bool SameEviction(const baseline::Recipe& a, const baseline::Recipe& b);

struct Job {
  const Setting* setting = nullptr;  // null: the full cache
  std::string text;                  // of the budget
  Budget budget;

  bool full() const { return setting == nullptr; }
  std::string name() const { return full() ? "full" : setting->name; }
};

// The full cache first, then every setting at every budget; they point into `settings`. Errors: ParseBudget's.
Result<std::vector<Job>> MakeJobs(const std::vector<Setting>& settings, const std::vector<std::string>& budgets);

// What the budget asks for, of n tokens per KV head, before anything is protected.
int32_t AskedTokens(const Budget& budget, int32_t n);

// An error where the budget asks for less than all of a prompt's n tokens, but the policy always keeps them all.
Status CheckRoom(const Job& job, int32_t n);

// An error unless the lists hold what `keep` per KV head says, and fewer than everything where the budget asks for
// less.
Status CheckKept(const Job& job, int32_t keep, int32_t n, const KeepList& list);

// Lengths of each layer's lists.
std::vector<KeptTokens> KeptOfLayers(const KeepList& list);

// Which row of the results: equal keys, equal rows.
std::string RowKey(const Row& row);

}  // namespace dropkv::eval
