#include <algorithm>
#include <charconv>
#include <cmath>

#include "dropkv/policy.h"

namespace dropkv {
namespace {

constexpr double kRoundingSlack = 1e-6;  // keeps 0.1 * 10 from becoming 0

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// Digits with at most one point between or behind digits: no sign, exponent, space or name such as nan.
bool IsPlainNumber(std::string_view text) {
  return !text.empty() && IsDigit(text.front()) && std::count(text.begin(), text.end(), '.') <= 1 &&
         std::all_of(text.begin(), text.end(), [](char c) { return IsDigit(c) || c == '.'; });
}

// The value of a plain number; 0 where a double cannot hold it, which no caller accepts.
double PlainNumber(std::string_view text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? value : 0.0;
}

// Shortest text that reads back as `value` to 6 digits: 5, 2.5, 12.5.
std::string ShortNumber(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::general, 6);
  return {buffer, end};
}

Status BudgetError(std::string_view text, const std::string& suggestion) {
  return InvalidArgument(
      "budget: expected the share to keep as a percentage above 0% up to 100%, such as 10%, or the tokens to keep per "
      "KV "
      "head as a whole number of at least 1, such as 512; got \"" +
      std::string(text) + "\"" + suggestion);
}

// "0.05" most likely means 5%, "2.5" most likely 2.5%.
std::string FractionSuggestion(std::string_view text) {
  if (!IsPlainNumber(text) || text.find('.') == std::string_view::npos) return {};
  const double value = PlainNumber(text);
  const double percent = value <= 1.0 ? value * 100.0 : value;
  if (!(percent > 0.0 && percent <= 100.0)) return {};
  return "; did you mean " + ShortNumber(percent) + "%?";
}

}  // namespace

Result<Budget> ParseBudget(std::string_view text) {
  if (text.ends_with('%')) {
    const std::string_view number = text.substr(0, text.size() - 1);
    const double percent = IsPlainNumber(number) ? PlainNumber(number) : 0.0;
    if (!(percent > 0.0 && percent <= 100.0)) return BudgetError(text, {});
    return Budget::Fraction(percent / 100.0);
  }
  int64_t tokens = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || tokens < 1)
    return BudgetError(text, FractionSuggestion(text));
  return Budget::Tokens(tokens);
}

Result<KeepCount> ResolveBudget(const Budget& budget, const Policy& policy, int32_t n) {
  if (n < 0) return InvalidArgument("n: expected at least 0 tokens, got " + std::to_string(n));
  if (budget.fraction.has_value()) {
    const double fraction = *budget.fraction;
    if (!(fraction > 0.0 && fraction <= 1.0))
      return InvalidArgument("budget.fraction: expected above 0 up to 1 (the share kept), got " +
                             std::to_string(fraction));
  } else if (budget.tokens < 1) {
    return InvalidArgument("budget.tokens: expected at least 1 token per KV head, got " +
                           std::to_string(budget.tokens));
  }
  if (policy.signal == Signal::kFull) return KeepCount{n, false};

  const int64_t smallest = static_cast<int64_t>(policy.window) + policy.sink;
  if (budget.fraction.has_value()) {
    const auto wanted = static_cast<int64_t>(std::floor(*budget.fraction * n + kRoundingSlack));
    const int64_t keep = std::min<int64_t>(std::max(wanted, smallest), n);
    return KeepCount{static_cast<int32_t>(keep), wanted < smallest && smallest <= n};
  }
  if (budget.tokens < smallest) {
    const std::string number = std::to_string(budget.tokens);
    return InvalidArgument("budget: expected at least " + std::to_string(smallest) + " tokens per KV head for policy " +
                           policy.name + " (window " + std::to_string(policy.window) + " + sink " +
                           std::to_string(policy.sink) + "), got " + number +
                           (budget.tokens <= 100 ? "; to keep " + number + " percent write " + number + "%" : ""));
  }
  return KeepCount{static_cast<int32_t>(std::min<int64_t>(budget.tokens, n)), false};
}

}  // namespace dropkv
