#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "core/random.h"
#include "cuda/device_memory.h"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

enum class View { kHeadMajor, kTokenMajor, kPacked, kPaged, kRagged };
constexpr const char* kViewNames[] = {"head-major", "token-major", "packed", "paged", "ragged"};

enum class Keep { kSome, kHalf, kAllButFirst, kAll, kUneven };
constexpr const char* kKeepNames[] = {"some", "half", "all but the first", "all", "uneven"};

struct CompactCase {
  View view = View::kHeadMajor;
  std::vector<int32_t> lengths{300, 170};
  int32_t kv_heads = 3;
  int32_t key_dim = 128;
  int32_t value_dim = 128;
  int32_t padding = 0;     // elements between rows
  int32_t misaligned = 0;  // elements before the first row
  Keep keep = Keep::kSome;
  DType dtype = DType::kBF16;

  int32_t sequences() const { return static_cast<int32_t>(lengths.size()); }
  int32_t lists() const { return sequences() * kv_heads; }
  int32_t max_tokens() const { return *std::max_element(lengths.begin(), lengths.end()); }
};

std::ostream& operator<<(std::ostream& os, const CompactCase& c) {
  os << kViewNames[static_cast<int>(c.view)] << " n";
  for (const int32_t n : c.lengths) os << " " << n;
  return os << " Hkv " << c.kv_heads << " d " << c.key_dim << " dv " << c.value_dim << " padding " << c.padding
            << " misaligned " << c.misaligned << " keeps " << kKeepNames[static_cast<int>(c.keep)];
}

// Kept positions of all lists.
struct Lists {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;

  Lists(const CompactCase& c, uint64_t seed) {
    for (int32_t list = 0; list < c.lists(); ++list) {
      for (int32_t j = 0; j < c.lengths[list / c.kv_heads]; ++j)
        if (Keeps(c, list, j, RandomUniform(seed, static_cast<uint64_t>(list) << 32 | j))) positions.push_back(j);
      offsets.push_back(static_cast<int64_t>(positions.size()));
    }
  }
  int64_t longest() const {
    int64_t length = 0;
    for (size_t i = 1; i < offsets.size(); ++i) length = std::max(length, offsets[i] - offsets[i - 1]);
    return length;
  }

 private:
  static bool Keeps(const CompactCase& c, int32_t list, int32_t token, float random) {
    switch (c.keep) {
      case Keep::kSome:
        return token < 2 || random < 0.06F;
      case Keep::kHalf:
        return random < 0.5F;
      case Keep::kAllButFirst:
        return token > 0;
      case Keep::kAll:
        return true;
      case Keep::kUneven:  // empty lists among full ones
        return list % 3 != 1 && random < static_cast<float>(list % 4) / 3.0F;
    }
    return false;
  }
};

// Keys or values on the host, where every element has its own bits, and the tensor's strides.
struct HostTensor {
  std::vector<uint16_t> data;
  Tensor tensor;

  HostTensor(const CompactCase& c, int32_t dim, int32_t block_size, int64_t pool_tokens, uint64_t seed) {
    const int64_t row = dim + c.padding;
    const int64_t heads = c.view == View::kRagged ? 1 : c.kv_heads;
    tensor.token_stride = row;
    tensor.head_stride = pool_tokens * row;
    switch (c.view) {
      case View::kHeadMajor:
        tensor.head_stride = c.max_tokens() * row;
        tensor.sequence_stride = heads * tensor.head_stride;
        break;
      case View::kTokenMajor:
        tensor.head_stride = row;
        tensor.token_stride = heads * row;
        tensor.sequence_stride = c.max_tokens() * tensor.token_stride;
        break;
      case View::kPaged:
        tensor.head_stride = block_size * row;
        tensor.sequence_stride = heads * tensor.head_stride;
        break;
      case View::kPacked:
      case View::kRagged:
        break;
    }
    data.resize(c.misaligned + heads * pool_tokens * row);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint16_t>(RandomBits(seed, i));
  }
};

// A cache on the host and, beside it, on the device.
class Cache {
 public:
  explicit Cache(const CompactCase& c)
      : case_(c), keys_(MakeTensor(c.key_dim, 1)), values_(MakeTensor(c.value_dim, 2)) {
    const int64_t pool = PoolTokens();
    for (int64_t start = 0, list = 0; list < c.lists(); ++list) {
      offsets_.push_back(start);
      start += c.lengths[list / c.kv_heads];
      if (list + 1 == c.lists()) offsets_.push_back(start);
    }
    for (int64_t start = 0, b = 0; b < c.sequences(); start += c.lengths[b++]) starts_.push_back(start);
    const int32_t blocks_of_sequence = (c.max_tokens() + kBlockSize - 1) / kBlockSize;
    const auto blocks = static_cast<int32_t>(pool / kBlockSize);
    for (int32_t i = 0; i < c.sequences() * blocks_of_sequence; ++i) blocks_.push_back((i * 7 + 3) % blocks);
    device_lengths_ = DeviceArray<int32_t>(c.lengths);
    device_offsets_ = DeviceArray<int64_t>(offsets_);
    device_starts_ = DeviceArray<int64_t>(starts_);
    device_blocks_ = DeviceArray<int32_t>(blocks_);
    device_keys_ = DeviceArray<uint16_t>(keys_.data);
    device_values_ = DeviceArray<uint16_t>(values_.data);
  }

  CacheParams params() const {
    CacheParams p;
    p.dtype = case_.dtype;
    p.sequences = case_.sequences();
    p.kv_heads = case_.kv_heads;
    p.key_dim = case_.key_dim;
    p.value_dim = case_.value_dim;
    p.max_tokens = case_.max_tokens();
    p.k = keys_.tensor;
    p.v = values_.tensor;
    p.k.data = device_keys_.get() + case_.misaligned;
    p.v.data = device_values_.get() + case_.misaligned;
    if (case_.view == View::kRagged) {
      p.offsets = device_offsets_.get();
    } else {
      p.lengths = device_lengths_.get();
    }
    if (case_.view == View::kPacked) p.starts = device_starts_.get();
    if (case_.view == View::kPaged) {
      p.blocks = device_blocks_.get();
      p.blocks_stride = (case_.max_tokens() + kBlockSize - 1) / kBlockSize;
      p.block_size = kBlockSize;
    }
    return p;
  }

  // Element of HostTensor::data where a token's row begins.
  int64_t RowAt(const HostTensor& host, int32_t list, int32_t token) const {
    const int32_t b = list / case_.kv_heads;
    const Tensor& t = host.tensor;
    const int64_t head = case_.misaligned + list % case_.kv_heads * t.head_stride;
    switch (case_.view) {
      case View::kHeadMajor:
      case View::kTokenMajor:
        return head + b * t.sequence_stride + token * t.token_stride;
      case View::kPacked:
        return head + (starts_[b] + token) * t.token_stride;
      case View::kPaged: {
        const int32_t block = blocks_[b * ((case_.max_tokens() + kBlockSize - 1) / kBlockSize) + token / kBlockSize];
        return head + block * t.sequence_stride + token % kBlockSize * t.token_stride;
      }
      case View::kRagged:
        return case_.misaligned + (offsets_[list] + token) * t.token_stride;
    }
    return 0;
  }

  const HostTensor& keys() const { return keys_; }
  const HostTensor& values() const { return values_; }
  std::vector<uint16_t> DeviceKeys() const { return device_keys_.Download(); }
  std::vector<uint16_t> DeviceValues() const { return device_values_.Download(); }
  void Restore() {
    device_keys_.Upload(keys_.data);
    device_values_.Upload(values_.data);
  }

 private:
  static constexpr int32_t kBlockSize = 16;

  // Tokens of the whole pool: rows of a head, or those of all heads' lists; whole blocks.
  int64_t PoolTokens() const {
    int64_t tokens = 0;
    for (const int32_t n : case_.lengths) tokens += n;
    if (case_.view == View::kRagged) return tokens * case_.kv_heads;
    if (case_.view == View::kPacked) return tokens;
    int64_t blocks = int64_t{case_.sequences()} * ((case_.max_tokens() + kBlockSize - 1) / kBlockSize);
    while (blocks % 7 == 0) ++blocks;  // so that a step of 7 meets every block
    return blocks * kBlockSize;
  }
  HostTensor MakeTensor(int32_t dim, uint64_t seed) const { return {case_, dim, kBlockSize, PoolTokens(), seed}; }

  CompactCase case_;
  HostTensor keys_, values_;
  std::vector<int64_t> offsets_, starts_;
  std::vector<int32_t> blocks_;
  DeviceArray<int32_t> device_lengths_, device_blocks_;
  DeviceArray<int64_t> device_offsets_, device_starts_;
  DeviceArray<uint16_t> device_keys_, device_values_;
};

// Kept rows one behind the other, and 100 elements more that nobody writes.
std::vector<uint16_t> Gathered(const Cache& cache, const HostTensor& host, int32_t dim, const Lists& lists) {
  std::vector<uint16_t> rows(lists.positions.size() * dim + 100, 0xFFFF);
  auto out = rows.begin();
  for (size_t list = 0; list + 1 < lists.offsets.size(); ++list)
    for (int64_t i = lists.offsets[list]; i < lists.offsets[list + 1]; ++i) {
      const auto from = host.data.begin() + cache.RowAt(host, static_cast<int32_t>(list), lists.positions[i]);
      out = std::copy(from, from + dim, out);
    }
  return rows;
}

// The cache after its kept rows moved to the front of their lists.
std::vector<uint16_t> Moved(const Cache& cache, const HostTensor& host, int32_t dim, const Lists& lists) {
  std::vector<uint16_t> data = host.data;
  for (size_t list = 0; list + 1 < lists.offsets.size(); ++list)
    for (int64_t i = lists.offsets[list]; i < lists.offsets[list + 1]; ++i) {
      const auto token = static_cast<int32_t>(i - lists.offsets[list]);
      const auto from = host.data.begin() + cache.RowAt(host, static_cast<int32_t>(list), lists.positions[i]);
      std::copy(from, from + dim, data.begin() + cache.RowAt(host, static_cast<int32_t>(list), token));
    }
  return data;
}

// EXPECT_EQ of long vectors prints them whole.
void ExpectSame(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  const auto [at, unused] = std::mismatch(got.begin(), got.end(), want.begin());
  EXPECT_TRUE(at == got.end()) << what << ": first difference at element " << at - got.begin();
}

// Memory that a launch needs besides the cache.
struct Launch {
  DeviceArray<int64_t> offsets;
  DeviceArray<int32_t> positions;
  DeviceArray<int32_t> workspace;
  CompactParams params;

  Launch(const CacheParams& cache, const Lists& lists) : offsets(lists.offsets), positions(lists.positions) {
    params.source = cache;
    params.offsets = offsets.get();
    params.positions = positions.get();
    params.max_list = lists.longest() + 17;  // an upper bound will do
    workspace = DeviceArray<int32_t>((CompactWorkspaceBytes(params) + 3) / 4);
    params.workspace = workspace.get();
  }
};

void CompareOutOfPlace(const CompactCase& c, uint64_t seed) {
  SCOPED_TRACE(testing::PrintToString(c) + " seed " + std::to_string(seed));
  const Cache cache(c);
  const Lists lists(c, seed);
  Launch launch(cache.params(), lists);
  const DeviceArray<uint16_t> k(lists.positions.size() * c.key_dim + 100);
  const DeviceArray<uint16_t> v(lists.positions.size() * c.value_dim + 100);
  launch.params.k = k.get();
  launch.params.v = v.get();
  ASSERT_EQ(LaunchCompact(launch.params, nullptr), cudaSuccess);
  ExpectSame(k.Download(), Gathered(cache, cache.keys(), c.key_dim, lists), "keys");
  ExpectSame(v.Download(), Gathered(cache, cache.values(), c.value_dim, lists), "values");
  ExpectSame(cache.DeviceKeys(), cache.keys().data, "source keys");
  ExpectSame(cache.DeviceValues(), cache.values().data, "source values");
}

void CompareInPlace(const CompactCase& c, uint64_t seed, int repeats) {
  SCOPED_TRACE(testing::PrintToString(c) + " seed " + std::to_string(seed));
  Cache cache(c);
  const Lists lists(c, seed);
  const Launch launch(cache.params(), lists);
  const std::vector<uint16_t> keys = Moved(cache, cache.keys(), c.key_dim, lists);
  const std::vector<uint16_t> values = Moved(cache, cache.values(), c.value_dim, lists);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    cache.Restore();
    ASSERT_EQ(LaunchCompact(launch.params, nullptr), cudaSuccess);
    ExpectSame(cache.DeviceKeys(), keys, "keys");
    ExpectSame(cache.DeviceValues(), values, "values");
  }
}

void CompareBoth(const CompactCase& c, uint64_t seed) {
  CompareOutOfPlace(c, seed);
  CompareInPlace(c, seed, 1);
}

constexpr View kViews[] = {View::kHeadMajor, View::kTokenMajor, View::kPacked, View::kPaged, View::kRagged};
constexpr Keep kKeeps[] = {Keep::kSome, Keep::kHalf, Keep::kAllButFirst, Keep::kAll, Keep::kUneven};

TEST(CudaCompact, EveryViewAndKeep) {
  uint64_t seed = 1;
  for (const View view : kViews)
    for (const Keep keep : kKeeps) CompareBoth({.view = view, .keep = keep}, ++seed);
}

// Rows and addresses that allow 16, 8, 4 and 2 bytes at once.
TEST(CudaCompact, EverySizeAndAlignment) {
  uint64_t seed = 100;
  for (const auto& [d, dv] :
       {std::pair{8, 8}, {64, 64}, {80, 80}, {96, 128}, {256, 256}, {128, 64}, {24, 40}, {12, 20}, {6, 10}, {5, 7}})
    for (const int32_t misaligned : {0, 1, 2, 4}) {
      ++seed;
      CompareBoth({.view = kViews[seed % 5],
                   .key_dim = d,
                   .value_dim = dv,
                   .padding = static_cast<int32_t>(seed % 4) * 8,
                   .misaligned = misaligned,
                   .keep = kKeeps[seed % 4],
                   .dtype = DType::kF16},
                  seed);
    }
}

TEST(CudaCompact, EmptyAndSingleTokenSequences) {
  uint64_t seed = 200;
  for (const View view : kViews)
    for (const Keep keep : {Keep::kAll, Keep::kHalf, Keep::kUneven})
      CompareBoth({.view = view, .lengths = {0, 1, 0, 40, 2, 0}, .kv_heads = 2, .keep = keep}, ++seed);
}

TEST(CudaCompact, NothingKept) {
  CompareBoth({.lengths = {0}}, 1);
  CompareBoth({.lengths = {1, 1}, .keep = Keep::kAllButFirst}, 1);
}

// Lists of many chunks, whose rows move a little or a lot: a chunk that is written too early shows.
TEST(CudaCompact, LongListsInPlace) {
  uint64_t seed = 300;
  for (const View view : {View::kHeadMajor, View::kTokenMajor, View::kPaged})
    for (const Keep keep : kKeeps)
      CompareInPlace({.view = view, .lengths = {20000, 7000}, .kv_heads = 4, .keep = keep}, ++seed, 5);
}

TEST(CudaCompact, RefusesWhatItCannotMove) {
  const CompactCase c{.lengths = {10}};
  const Cache cache(c);
  Launch launch(cache.params(), Lists(c, 1));
  launch.params.source.dtype = DType::kQ8_0;
  EXPECT_EQ(LaunchCompact(launch.params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dropkv::cuda
