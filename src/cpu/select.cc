#include "cpu/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>

#include "core/workspace.h"
#include "reference/reference.h"

namespace dropkv::cpu {
namespace {

// A token as one number: the smaller, the earlier it is kept. From the top: 2 bits class (0 non-finite, 1 dominant, 2
// others), 32 bits score, descending, 30 bits head * n + index. No two keys are equal, so a limit says exactly what is
// kept, whatever algorithm finds it; and no key is 0.
constexpr int kIndexBits = 30;
constexpr int64_t kMaxTokens = int64_t{1} << kIndexBits;

// Maps floats to integers of the opposite order; -0 and +0 to the same, NaN behind everything.
uint32_t DescendingBits(float value) {
  if (std::isnan(value)) return 0xFFFFFFFFU;
  const auto bits = std::bit_cast<uint32_t>(value + 0.0F);
  return (bits & 0x80000000U) != 0 ? bits : ~bits & 0x7FFFFFFFU;
}

uint64_t Key(uint64_t token_class, uint32_t descending, int64_t index) {
  return token_class << 62 | static_cast<uint64_t>(descending) << kIndexBits | static_cast<uint64_t>(index);
}

bool KeepsAll(const Policy& policy, const KeepCount& budget, int32_t n) {
  return policy.signal == Signal::kFull || n <= policy.window || budget.keep >= n ||
         int64_t{policy.window} + policy.sink >= n;
}

// The keys of one head's candidates that take part in a search: those above `above`.
struct KeyRange {
  const uint64_t* keys;
  int64_t size;
  uint64_t above;  // 0: all
};

constexpr int kDigitBits = 12;  // a histogram of 16 KiB stays in the first-level cache
constexpr int64_t kBins = int64_t{1} << kDigitBits;
constexpr int64_t kFewKeys = 1024;

// Finds the key of a rank by the digits of the keys from the top: a histogram of one digit tells the bin that holds the
// rank, the next digit looks at that bin only. Few keys left: their order decides. Reads the keys, moves none.
class RankSearch {
 public:
  RankSearch(uint32_t* histogram, uint64_t* few) : histogram_(histogram), few_(few) {}

  // The rank-th smallest key (from 1) of all ranges, which hold at least that many.
  uint64_t Find(std::span<const KeyRange> ranges, int64_t rank) const {
    int shift = 64;
    uint64_t prefix = 0;  // of the keys still in question: key >> shift
    int64_t left = 0;
    for (const KeyRange& range : ranges) left += range.size;
    while (left > kFewKeys) {
      const int next = std::max(0, shift - kDigitBits);
      std::fill_n(histogram_, kBins, 0U);
      ForEach(ranges, shift, prefix, [&](uint64_t key) { ++histogram_[(key >> next) & ((1U << (shift - next)) - 1)]; });
      uint64_t bin = 0;
      while (histogram_[bin] < rank) rank -= histogram_[bin++];
      left = histogram_[bin];
      prefix = prefix << (shift - next) | bin;
      shift = next;
    }
    int64_t count = 0;
    ForEach(ranges, shift, prefix, [&](uint64_t key) { few_[count++] = key; });
    std::nth_element(few_, few_ + rank - 1, few_ + count);
    return few_[rank - 1];
  }

 private:
  template <typename F>
  static void ForEach(std::span<const KeyRange> ranges, int shift, uint64_t prefix, F&& f) {
    for (const KeyRange& range : ranges)
      for (int64_t i = 0; i < range.size; ++i) {
        const uint64_t key = range.keys[i];
        if (key > range.above && (shift == 64 || key >> shift == prefix)) f(key);
      }
  }

  uint32_t* histogram_;
  uint64_t* few_;
};

struct Buffers {
  uint64_t* keys;       // [Hkv, n]
  uint32_t* histogram;  // [kBins]
  uint64_t* few;        // [kFewKeys]
  KeyRange* ranges;     // [Hkv]
  uint64_t* limits;     // [Hkv]

  Buffers(Workspace& workspace, int32_t kv_heads, int32_t n)
      : keys(workspace.Take<uint64_t>(static_cast<size_t>(kv_heads) * n)),
        histogram(workspace.Take<uint32_t>(kBins)),
        few(workspace.Take<uint64_t>(kFewKeys)),
        ranges(workspace.Take<KeyRange>(kv_heads)),
        limits(workspace.Take<uint64_t>(kv_heads)) {}
};

struct Layer {
  const SelectInput& in;
  int32_t begin;  // candidates of every head: tokens begin .. end-1
  int32_t end;
  int64_t others;  // candidates kept per head, on average
  Buffers memory;

  int32_t candidates() const { return end - begin; }
  std::span<KeyRange> ranges() const { return {memory.ranges, static_cast<size_t>(in.kv_heads)}; }
  RankSearch search() const { return {memory.histogram, memory.few}; }

  // Key of candidate begin + i of a head: keys[i].
  uint64_t* keys(int32_t head) const { return memory.keys + int64_t{head} * candidates(); }

  void MakeKeys() const {
    for (int32_t head = 0; head < in.kv_heads; ++head) {
      const int64_t base = int64_t{head} * in.n;
      uint64_t* out = keys(head) - begin;
      memory.ranges[head] = {keys(head), candidates(), 0};
      for (int32_t j = begin; j < end; ++j) out[j] = Key(2, DescendingBits(in.pooled[base + j]), base + j);
      for (int32_t j = begin; in.flags != nullptr && j < end; ++j) {
        const uint8_t flags = in.flags[base + j];
        if ((flags & reference::kNonFinite) != 0) {
          out[j] = Key(0, 1, base + j);
        } else if ((flags & reference::kDominant) != 0) {
          out[j] = Key(1, DescendingBits(in.raw[base + j]), base + j);
        }
      }
    }
  }

  // Limit of one head: its `count` best candidates lie at or below it.
  void LimitHead(int32_t head, int64_t count) const {
    memory.limits[head] = count > 0 ? search().Find(ranges().subspan(head, 1), count) : 0;
  }

  void LimitUniform() const {
    for (int32_t head = 0; head < in.kv_heads; ++head) LimitHead(head, others);
  }

  // Rule K: `safe` tokens a head, the rest by the order of the layer.
  void LimitAda() const {
    const Policy& policy = *in.policy;
    const auto share = static_cast<int64_t>(std::floor(policy.alpha * in.budget.keep + 1e-6));
    const int64_t safe = std::clamp<int64_t>(share - policy.window - policy.sink, 0, others);
    for (int32_t head = 0; head < in.kv_heads; ++head) {
      LimitHead(head, safe);
      memory.ranges[head].above = memory.limits[head];
    }
    const int64_t rest = in.kv_heads * (others - safe);
    if (rest == 0) return;
    const uint64_t limit = search().Find(ranges(), rest);
    for (int32_t head = 0; head < in.kv_heads; ++head) memory.limits[head] = std::max(memory.limits[head], limit);
  }

  // Rule O: the heads' counts in the order of the layer, drawn towards the uniform share.
  void LimitAdaO() const {
    if (others == 0) return LimitUniform();
    const uint64_t limit = search().Find(ranges(), in.kv_heads * others);
    const double alpha = in.policy->alpha;
    const double uniform = std::floor(static_cast<double>(others) * alpha + 1e-6);
    for (int32_t head = 0; head < in.kv_heads; ++head) {
      const uint64_t* from = keys(head);
      const auto flat = std::count_if(from, from + candidates(), [&](uint64_t key) { return key <= limit; });
      const auto share = static_cast<int64_t>(std::nearbyint(static_cast<double>(flat) * (1.0 - alpha) + uniform));
      LimitHead(head, std::clamp<int64_t>(share, 0, candidates()));
    }
  }

  void Write(int32_t* counts, int32_t* positions) const {
    for (int32_t head = 0; head < in.kv_heads; ++head) {
      const uint64_t limit = memory.limits[head];
      const uint64_t* from = keys(head) - begin;
      int32_t* out = positions;
      for (int32_t j = 0; j < begin; ++j) *out++ = j;
      for (int32_t j = begin; j < end; ++j)
        if (from[j] <= limit) *out++ = j;
      for (int32_t j = end; j < in.n + in.generated; ++j) *out++ = j;
      counts[head] = static_cast<int32_t>(out - positions);
      positions = out;
    }
  }
};

Status Check(const SelectInput& input, const int32_t* counts, const int32_t* positions) {
  if (input.policy == nullptr) return InvalidArgument("input.policy: expected a policy, got null");
  if (input.kv_heads < 1)
    return InvalidArgument("input.kv_heads: expected at least 1, got " + std::to_string(input.kv_heads));
  if (input.n < 1) return InvalidArgument("input.n: expected at least 1, got " + std::to_string(input.n));
  if (input.generated < 0)
    return InvalidArgument("input.generated: expected 0 or more, got " + std::to_string(input.generated));
  if (counts == nullptr || positions == nullptr)
    return InvalidArgument("counts, positions: expected pointers, got null");
  return Status::Ok();
}

Status CheckScores(const SelectInput& input) {
  if (int64_t{input.kv_heads} * input.n > kMaxTokens)
    return Unsupported("select: expected at most 2^30 tokens in the heads of a layer, got " +
                       std::to_string(input.kv_heads) + " heads of " + std::to_string(input.n));
  if (input.pooled == nullptr) return InvalidArgument("input.pooled: expected a pointer, got null");
  if (input.flags != nullptr && input.raw == nullptr)
    return InvalidArgument("input.raw: expected a pointer beside input.flags, got null");
  return Status::Ok();
}

}  // namespace

size_t SelectWorkspaceBytes(const Policy& policy, const KeepCount& budget, int32_t kv_heads, int32_t n) {
  if (KeepsAll(policy, budget, n)) return 0;
  Workspace workspace;
  const Buffers buffers(workspace, kv_heads, n);
  return workspace.bytes_needed();
}

int64_t MaxSelected(const Policy& policy, const KeepCount& budget, int32_t kv_heads, int32_t n, int32_t generated) {
  if (KeepsAll(policy, budget, n)) return kv_heads * (int64_t{n} + generated);
  const int64_t keep = std::max(budget.keep, policy.window + policy.sink);
  const int64_t most = std::min<int64_t>(n, keep + (policy.heads == HeadRule::kAdaO ? 1 : 0));
  return kv_heads * (most + generated);
}

Status Select(const SelectInput& input, std::span<std::byte> workspace, int32_t* counts, int32_t* positions) {
  DROPKV_RETURN_IF_ERROR(Check(input, counts, positions));
  const Policy& policy = *input.policy;
  if (KeepsAll(policy, input.budget, input.n)) {
    const int64_t all = int64_t{input.n} + input.generated;
    std::fill_n(counts, input.kv_heads, static_cast<int32_t>(all));
    for (int32_t head = 0; head < input.kv_heads; ++head)
      std::iota(positions + head * all, positions + (head + 1) * all, 0);
    return Status::Ok();
  }
  DROPKV_RETURN_IF_ERROR(CheckScores(input));
  Workspace memory(workspace);
  const Buffers buffers(memory, input.kv_heads, input.n);
  if (buffers.limits == nullptr)
    return {Code::kWorkspaceTooSmall,
            "workspace: expected " +
                std::to_string(SelectWorkspaceBytes(policy, input.budget, input.kv_heads, input.n)) + " bytes, got " +
                std::to_string(workspace.size())};
  const int64_t others = std::max(0, input.budget.keep - policy.window - policy.sink);
  const Layer layer{input, policy.sink, input.n - policy.window, others, buffers};
  layer.MakeKeys();
  switch (policy.heads) {
    case HeadRule::kUniform:
      layer.LimitUniform();
      break;
    case HeadRule::kAda:
      layer.LimitAda();
      break;
    case HeadRule::kAdaO:
      layer.LimitAdaO();
      break;
  }
  layer.Write(counts, positions);
  return Status::Ok();
}

}  // namespace dropkv::cpu
