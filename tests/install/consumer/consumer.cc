// A C++ program that knows the installed package only.
#include <cstdio>

#include "dropkv/engine.h"
#include "dropkv/policy.h"
#include "dropkv/version.h"

int main() {
  const auto engine = dropkv::Engine::Create();
  const auto policy = dropkv::FindPreset("dropkv");
  if (!engine.ok() || !policy.ok()) return 1;
  const dropkv::EvictShape shape{
      .layers = 2, .query_heads = 4, .kv_heads = 2, .tokens = 1000, .key_dim = 64, .value_dim = 64};
  const auto plan = engine->MakePlan(shape, *policy, dropkv::Budget::Fraction(0.1));
  if (!plan.ok()) {
    std::fprintf(stderr, "%s\n", plan.status().message().c_str());
    return 1;
  }
  std::printf("dropkv %s plans to keep %d of %d tokens\n", dropkv::Version().data(), plan->budget.keep, shape.tokens);
  return plan->budget.keep == 100 ? 0 : 1;
}
