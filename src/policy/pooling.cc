#include <charconv>

#include "dropkv/policy.h"

namespace dropkv {
namespace {

Status PoolingError(std::string_view text, const char* reason) {
  return InvalidArgument(
      "pooling: expected an odd width K, or B,F (tokens kept before and after a hit), with max: in front for the "
      "maximum, "
      "such as 11, 5,31 or max:7; got \"" +
      std::string(text) + "\"" + reason);
}

// A whole number without a sign; false for anything else.
bool ReadNumber(std::string_view text, int32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return !text.empty() && error == std::errc() && end == text.data() + text.size() && text.front() != '-';
}

}  // namespace

std::string PoolingText(const Pooling& pool) {
  if (pool.before == 0 && pool.after == 0) return "none";
  std::string text = pool.kind == PoolKind::kMax ? "max " : "mean ";
  text += pool.before == pool.after ? std::to_string(2 * pool.before + 1)
                                    : std::to_string(pool.before) + "," + std::to_string(pool.after);
  return pool.past_only ? text + " of the past" : text;
}

Result<Pooling> ParsePooling(std::string_view text) {
  constexpr std::string_view kMaxPrefix = "max:";
  Pooling pool;
  std::string_view widths = text;
  if (widths.starts_with(kMaxPrefix)) {
    pool.kind = PoolKind::kMax;
    widths.remove_prefix(kMaxPrefix.size());
  }
  const size_t comma = widths.find(',');
  if (comma == std::string_view::npos) {
    int32_t width = 0;
    if (!ReadNumber(widths, width) || width < 1) return PoolingError(text, "");
    if (width % 2 == 0) return PoolingError(text, ": the width is even");
    pool.before = pool.after = (width - 1) / 2;
  } else if (!ReadNumber(widths.substr(0, comma), pool.before) || !ReadNumber(widths.substr(comma + 1), pool.after)) {
    return PoolingError(text, "");
  }
  if (pool.before > kMaxPoolingReach || pool.after > kMaxPoolingReach)
    return PoolingError(text, ": more than 1024 tokens to one side");
  return pool;
}

}  // namespace dropkv
