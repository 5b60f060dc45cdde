#include "dropkv/policy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

namespace dropkv {
namespace {

Policy Preset(std::string_view name) {
  Result<Policy> policy = FindPreset(name);
  EXPECT_TRUE(policy.ok()) << policy.status().message();
  return policy.ok() ? *policy : Policy{};
}

KeepCount Resolve(const Budget& budget, const Policy& policy, int32_t n) {
  Result<KeepCount> count = ResolveBudget(budget, policy, n);
  EXPECT_TRUE(count.ok()) << count.status().message();
  return count.ok() ? *count : KeepCount{-1, false};
}

bool Contains(const Status& status, std::string_view part) { return status.message().find(part) != std::string::npos; }

TEST(Presets, AreThoseOfTheContract) {
  struct Expected {
    const char* name;
    Signal signal;
    int32_t window;
    const char* pooling;
    int32_t sink;
    HeadRule heads;
  };
  const Expected table[] = {
      {"full", Signal::kFull, 1, "none", 0, HeadRule::kUniform},
      {"dropkv", Signal::kDropKv, 8, "mean 11", 0, HeadRule::kUniform},
      {"dropkv-w32", Signal::kDropKv, 32, "mean 7", 0, HeadRule::kUniform},
      {"adadropkv", Signal::kDropKv, 8, "mean 11", 0, HeadRule::kAda},
      {"dropkv-fwd", Signal::kDropKv, 8, "mean 5,31", 0, HeadRule::kAda},
      {"snapkv", Signal::kAttention, 64, "mean 5 of the past", 0, HeadRule::kUniform},
      {"streaming", Signal::kRecency, 1, "none", 4, HeadRule::kUniform},
      {"random", Signal::kRandom, 8, "none", 0, HeadRule::kUniform},
  };
  ASSERT_EQ(Presets().size(), std::size(table));
  for (size_t i = 0; i < std::size(table); ++i) {
    const Policy& preset = Presets()[i];
    SCOPED_TRACE(table[i].name);
    EXPECT_EQ(preset.name, table[i].name);
    EXPECT_EQ(preset.signal, table[i].signal);
    EXPECT_EQ(preset.window, table[i].window);
    EXPECT_EQ(PoolingText(preset.pool), table[i].pooling);
    EXPECT_EQ(preset.sink, table[i].sink);
    EXPECT_EQ(preset.heads, table[i].heads);
    EXPECT_EQ(preset.alpha, 0.2);
    EXPECT_TRUE(CheckPolicy(preset).ok());
    EXPECT_EQ(Preset(table[i].name).window, table[i].window);
    EXPECT_EQ(preset.needs_queries(), preset.signal == Signal::kDropKv || preset.signal == Signal::kAttention);
  }
}

TEST(Presets, UnknownNameListsTheKnownOnes) {
  const Result<Policy> policy = FindPreset("dropkv2");
  ASSERT_FALSE(policy.ok());
  EXPECT_EQ(policy.status().code(), Code::kNotFound);
  EXPECT_TRUE(Contains(policy.status(), "\"dropkv2\""));
  EXPECT_TRUE(Contains(policy.status(), "full, dropkv, dropkv-w32, adadropkv, dropkv-fwd, snapkv, streaming, random"));
  EXPECT_FALSE(FindPreset("").ok());
  EXPECT_FALSE(FindPreset("DropKV").ok());
}

TEST(CheckPolicy, NamesTheFieldThatIsWrong) {
  const auto expect_error = [](const char* field, auto change) {
    Policy policy;
    change(policy);
    const Status status = CheckPolicy(policy);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << field;
    EXPECT_TRUE(Contains(status, field)) << status.message();
  };
  expect_error("policy.window", [](Policy& p) { p.window = 0; });
  expect_error("policy.window", [](Policy& p) { p.window = 129; });
  expect_error("policy.pool.before", [](Policy& p) { p.pool.before = -1; });
  expect_error("policy.pool.after", [](Policy& p) { p.pool.after = kMaxPoolingReach + 1; });
  expect_error("policy.pool.kind", [](Policy& p) { p.pool.kind = static_cast<PoolKind>(2); });
  expect_error("policy.sink", [](Policy& p) { p.sink = -1; });
  expect_error("policy.alpha", [](Policy& p) { p.alpha = -0.1; });
  expect_error("policy.alpha", [](Policy& p) { p.alpha = 1.1; });
  expect_error("policy.alpha", [](Policy& p) { p.alpha = std::numeric_limits<double>::quiet_NaN(); });
  expect_error("policy.signal", [](Policy& p) { p.signal = static_cast<Signal>(9); });
  expect_error("policy.heads", [](Policy& p) { p.heads = static_cast<HeadRule>(-1); });
  Policy edge;
  edge.window = 128;
  edge.alpha = 0.0;
  EXPECT_TRUE(CheckPolicy(edge).ok());
  edge.window = 1;
  edge.alpha = 1.0;
  EXPECT_TRUE(CheckPolicy(edge).ok());
}

TEST(ParseBudget, ReadsPercentagesAndCounts) {
  const auto fraction = [](std::string_view text) {
    const Result<Budget> budget = ParseBudget(text);
    EXPECT_TRUE(budget.ok()) << text << ": " << budget.status().message();
    return budget.ok() ? budget->fraction.value_or(-1.0) : -2.0;
  };
  EXPECT_EQ(fraction("10%"), 0.1);
  EXPECT_EQ(fraction("2.5%"), 0.025);
  EXPECT_EQ(fraction("100%"), 1.0);
  EXPECT_EQ(fraction("100.0%"), 1.0);
  EXPECT_EQ(fraction("0.05%"), 0.0005);
  const Result<Budget> tokens = ParseBudget("512");
  ASSERT_TRUE(tokens.ok());
  EXPECT_FALSE(tokens->fraction.has_value());
  EXPECT_EQ(tokens->tokens, 512);
  EXPECT_EQ(ParseBudget("1")->tokens, 1);
  EXPECT_EQ(ParseBudget("9000000000")->tokens, 9000000000);
}

TEST(ParseBudget, RefusesEverythingElse) {
  for (const char* text : {"0",
                           "0%",
                           "-5%",
                           "-5",
                           "150%",
                           "100.1%",
                           "0.05",
                           "nan",
                           "nan%",
                           "inf",
                           "inf%",
                           "1e2",
                           "1e1%",
                           "",
                           " ",
                           "%",
                           "%%",
                           "10%%",
                           "10 %",
                           " 10%",
                           "10% ",
                           "+5",
                           "+5%",
                           ".5%",
                           "1.2.3%",
                           "5 tokens",
                           "0x10",
                           "10.5",
                           "99999999999999999999",
                           "0.0",
                           "00%",
                           "1,5%"}) {
    const Result<Budget> budget = ParseBudget(text);
    ASSERT_FALSE(budget.ok()) << "\"" << text << "\"";
    EXPECT_EQ(budget.status().code(), Code::kInvalidArgument);
    EXPECT_TRUE(Contains(budget.status(), "got \"" + std::string(text) + "\"")) << budget.status().message();
    EXPECT_TRUE(Contains(budget.status(), "budget: expected")) << budget.status().message();
  }
}

TEST(ParseBudget, SuggestsThePercentageForAFraction) {
  EXPECT_TRUE(Contains(ParseBudget("0.05").status(), "did you mean 5%?"));
  EXPECT_TRUE(Contains(ParseBudget("0.1").status(), "did you mean 10%?"));
  EXPECT_TRUE(Contains(ParseBudget("0.125").status(), "did you mean 12.5%?"));
  EXPECT_TRUE(Contains(ParseBudget("1.0").status(), "did you mean 100%?"));
  EXPECT_TRUE(Contains(ParseBudget("2.5").status(), "did you mean 2.5%?"));
  for (const char* text : {"0.0", "150.5", "nan", "1e2", "-0.05", "0"})
    EXPECT_FALSE(Contains(ParseBudget(text).status(), "did you mean")) << text;
}

TEST(ResolveBudget, FollowsTheFormula) {
  Policy policy;
  policy.window = 1;
  EXPECT_EQ(Resolve(Budget::Fraction(0.1), policy, 10).keep, 1);  // 0.1 * 10 must not become 0
  EXPECT_EQ(Resolve(Budget::Fraction(0.1), policy, 1000).keep, 100);
  EXPECT_EQ(Resolve(Budget::Fraction(0.2), policy, 16000).keep, 3200);
  EXPECT_EQ(Resolve(Budget::Fraction(0.05), policy, 4096).keep, 204);
  EXPECT_EQ(Resolve(Budget::Fraction(0.05), policy, 131072).keep, 6553);
  EXPECT_EQ(Resolve(Budget::Fraction(0.3), policy, 131072).keep, 39321);
  EXPECT_EQ(Resolve(Budget::Fraction(1.0), policy, 777).keep, 777);
  for (int32_t n = 1; n <= 3000; ++n)
    for (const int32_t percent : {1, 5, 10, 20, 29, 30, 57, 70, 95}) {
      const KeepCount count = Resolve(Budget::Fraction(percent / 100.0), policy, n);
      const auto exact = static_cast<int32_t>(static_cast<int64_t>(percent) * n / 100);
      ASSERT_EQ(count.keep, std::max(exact, 1)) << percent << "% of " << n;
      ASSERT_EQ(count.raised, exact < 1) << percent << "% of " << n;
    }
}

TEST(ResolveBudget, RaisesAPercentageToWindowAndSink) {
  Policy policy = Preset("dropkv");
  policy.sink = 4;
  const KeepCount raised = Resolve(Budget::Fraction(0.05), policy, 100);
  EXPECT_EQ(raised.keep, 12);
  EXPECT_TRUE(raised.raised);
  const KeepCount exact = Resolve(Budget::Fraction(0.12), policy, 100);
  EXPECT_EQ(exact.keep, 12);
  EXPECT_FALSE(exact.raised);
  const KeepCount whole = Resolve(Budget::Fraction(0.5), policy, 12);
  EXPECT_EQ(whole.keep, 12);
  EXPECT_TRUE(whole.raised);
}

TEST(ResolveBudget, ShortPromptsKeepEverything) {
  const Policy policy = Preset("dropkv");
  for (int32_t n = 0; n <= 8; ++n) {
    EXPECT_EQ(Resolve(Budget::Fraction(0.1), policy, n).keep, n);
    EXPECT_EQ(Resolve(Budget::Tokens(8), policy, n).keep, n);
  }
  EXPECT_FALSE(Resolve(Budget::Fraction(0.1), policy, 7).raised);
}

TEST(ResolveBudget, CountsAreTakenLiterally) {
  const Policy policy = Preset("dropkv");
  EXPECT_EQ(Resolve(Budget::Tokens(8), policy, 100).keep, 8);
  EXPECT_EQ(Resolve(Budget::Tokens(64), policy, 100).keep, 64);
  EXPECT_EQ(Resolve(Budget::Tokens(9000000000), policy, 100).keep, 100);
  EXPECT_FALSE(Resolve(Budget::Tokens(9000000000), policy, 100).raised);
  EXPECT_EQ(Resolve(Budget::Tokens(5), Preset("streaming"), 100).keep, 5);
}

TEST(ResolveBudget, ACountBelowTheProtectedTokensIsAnError) {
  const Result<KeepCount> five = ResolveBudget(Budget::Tokens(5), Preset("dropkv"), 1000);
  ASSERT_FALSE(five.ok());
  EXPECT_EQ(five.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Contains(five.status(), "at least 8")) << five.status().message();
  EXPECT_TRUE(Contains(five.status(), "5%")) << five.status().message();
  EXPECT_FALSE(ResolveBudget(Budget::Tokens(5), Preset("dropkv"), 3).ok()) << "an error for every prompt, or for none";
  Policy wide = Preset("snapkv");
  wide.sink = 100;
  const Result<KeepCount> large = ResolveBudget(Budget::Tokens(101), wide, 1000);
  ASSERT_FALSE(large.ok());
  EXPECT_TRUE(Contains(large.status(), "at least 164")) << large.status().message();
  EXPECT_FALSE(Contains(large.status(), "%")) << large.status().message();
  EXPECT_FALSE(ResolveBudget(Budget::Tokens(4), Preset("streaming"), 100).ok());
}

TEST(ResolveBudget, RefusesWhatParseBudgetWould) {
  const Policy policy;
  for (const double fraction : {0.0, -0.1, 1.0001, static_cast<double>(NAN), static_cast<double>(INFINITY)})
    EXPECT_FALSE(ResolveBudget(Budget::Fraction(fraction), policy, 100).ok()) << fraction;
  EXPECT_FALSE(ResolveBudget(Budget::Tokens(0), policy, 100).ok());
  EXPECT_FALSE(ResolveBudget(Budget::Tokens(-3), policy, 100).ok());
  EXPECT_FALSE(ResolveBudget(Budget::Fraction(0.5), policy, -1).ok());
}

TEST(ResolveBudget, FullKeepsEverything) {
  EXPECT_EQ(Resolve(Budget::Fraction(0.05), Preset("full"), 1000).keep, 1000);
  EXPECT_EQ(Resolve(Budget::Tokens(1), Preset("full"), 1000).keep, 1000);
  EXPECT_FALSE(Resolve(Budget::Tokens(1), Preset("full"), 1000).raised);
}

TEST(ParsePooling, ReadsWhatPoolingTextWrites) {
  struct Case {
    const char* text;
    Pooling pool;
    const char* shown;
  };
  const Case cases[] = {
      {"1", {PoolKind::kMean, 0, 0, false}, "none"},
      {"max:1", {PoolKind::kMax, 0, 0, false}, "none"},
      {"11", {PoolKind::kMean, 5, 5, false}, "mean 11"},
      {"5,31", {PoolKind::kMean, 5, 31, false}, "mean 5,31"},
      {"max:7", {PoolKind::kMax, 3, 3, false}, "max 7"},
      {"max:0,4", {PoolKind::kMax, 0, 4, false}, "max 0,4"},
      {"3,0", {PoolKind::kMean, 3, 0, false}, "mean 3,0"},
      {"2,2", {PoolKind::kMean, 2, 2, false}, "mean 5"},
      {"2049", {PoolKind::kMean, 1024, 1024, false}, "mean 2049"},
  };
  for (const Case& c : cases) {
    const Result<Pooling> pool = ParsePooling(c.text);
    ASSERT_TRUE(pool.ok()) << c.text << ": " << pool.status().message();
    EXPECT_EQ(*pool, c.pool) << c.text;
    EXPECT_EQ(PoolingText(*pool), c.shown);
  }
}

TEST(ParsePooling, RefusesEverythingElse) {
  for (const char* text :
       {"",     "0",   "-1",   "+3",    "2",    "10",  "max:4", "5,",     ",5",     "5,-1",        "5,3,1",
        "5 ,3", "max", "max:", "min:3", "none", "3.0", "2051",  "1025,0", "0,1025", "99999999999", "MAX:3"}) {
    const Result<Pooling> pool = ParsePooling(text);
    ASSERT_FALSE(pool.ok()) << "\"" << text << "\"";
    EXPECT_TRUE(Contains(pool.status(), "got \"" + std::string(text) + "\"")) << pool.status().message();
  }
  EXPECT_TRUE(Contains(ParsePooling("10").status(), "even"));
}

TEST(HeadRule, Names) {
  EXPECT_EQ(HeadRuleName(HeadRule::kUniform), "uniform");
  EXPECT_EQ(HeadRuleName(HeadRule::kAda), "ada");
  EXPECT_EQ(HeadRuleName(HeadRule::kAdaO), "ada-o");
}

}  // namespace
}  // namespace dropkv
