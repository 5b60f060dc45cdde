// Decode attention over a ragged cache, layer after layer of a model: time a layer and bytes of keys and values a
// second. The layers together exceed the caches of the processor where the full prompt is kept, as they do in a model's
// decode. MemoryRead is the roof: the same bytes, only summed. Arguments: tokens kept per KV head, threads.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/element.h"
#include "core/parallel.h"
#include "core/random.h"
#include "dropkv/ragged_cache.h"

namespace dropkv {
namespace {

struct Model {
  int32_t layers;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t dim;
};

constexpr Model kSmolLm2{30, 9, 3, 64};
constexpr Model kQwen{28, 12, 2, 128};

std::vector<RaggedCache> MakeCaches(const Model& model, DType dtype, int32_t tokens) {
  const int64_t elements = int64_t{model.kv_heads} * tokens * model.dim;
  std::vector<uint8_t> bytes(DTypeBytes(dtype, elements));
  for (int64_t i = 0; i < elements; ++i) {
    const float x = RandomUniform(1, i) - 0.5F;
    const uint16_t half = FloatToHalf(x);
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[i * 4], &x, 4);
    } else if (dtype == DType::kF16) {
      std::memcpy(&bytes[i * 2], &half, 2);
    } else {
      bytes[i / 32 * 34 + 2 + i % 32] = static_cast<uint8_t>(RandomBits(2, i));
      std::memcpy(&bytes[i / 32 * 34], "\x00\x20", 2);
    }
  }
  const KvTensor tensor{bytes.data(), dtype, int64_t{tokens} * model.dim, model.dim, 1};
  const KvView view{model.kv_heads, tokens, model.dim, model.dim, tensor, tensor, nullptr};
  const KeepList all = KeepList::All(1, model.kv_heads, tokens);
  std::vector<RaggedCache> caches;
  for (int32_t layer = 0; layer < model.layers; ++layer) {
    caches.push_back(RaggedCache::Create(dtype, model.kv_heads, model.dim, model.dim).value());
    if (!caches.back().Assign(view, all, 0, 0).ok()) return {};
  }
  return caches;
}

// An iteration is one layer.
void Report(benchmark::State& state, int64_t layer_bytes) {
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(iterations * layer_bytes * 1e-9, benchmark::Counter::kIsRate);
}

void Decode(benchmark::State& state, const Model& model, DType dtype) {
  const auto tokens = static_cast<int32_t>(state.range(0));
  const std::vector<RaggedCache> caches = MakeCaches(model, dtype, tokens);
  RaggedDecode decode =
      RaggedDecode::Create(model.kv_heads, model.query_heads / model.kv_heads, model.dim, model.dim).value();
  ThreadPool pool(static_cast<int32_t>(state.range(1)));
  std::vector<float> q(model.query_heads * model.dim);
  for (size_t i = 0; i < q.size(); ++i) q[i] = RandomUniform(3, i) - 0.5F;
  std::vector<float> out(q.size());
  const AttentionSpec attention{0.125F, 0.0F, nullptr};
  int32_t layer = 0;
  for (auto _ : state) {
    if (!decode.Run(caches[layer], attention, q.data(), out.data(), state.range(1) > 1 ? &pool : nullptr).ok())
      state.SkipWithError("decode failed");
    benchmark::DoNotOptimize(out.data());
    layer = (layer + 1) % model.layers;
  }
  Report(state, caches[0].used_bytes());
}

void MemoryRead(benchmark::State& state, const Model& model) {
  const int64_t layer_bytes = 4LL * model.kv_heads * state.range(0) * model.dim;
  const auto threads = static_cast<int32_t>(state.range(1));
  std::vector<std::vector<uint64_t>> layers(model.layers, std::vector<uint64_t>(layer_bytes / 8, 1));
  ThreadPool pool(threads);
  std::vector<uint64_t> sums(threads * 8);
  const auto share = static_cast<int64_t>(layers[0].size()) / threads;
  int32_t layer = 0;
  for (auto _ : state) {
    pool.For(threads, [&](int64_t item, int32_t) {
      const uint64_t* data = layers[layer].data() + item * share;
      uint64_t sum[8] = {};
      for (int64_t i = 0; i + 8 <= share; i += 8)
        for (int lane = 0; lane < 8; ++lane) sum[lane] += data[i + lane];
      for (const uint64_t lane : sum) sums[item * 8] += lane;
    });
    layer = (layer + 1) % model.layers;
  }
  benchmark::DoNotOptimize(sums.data());
  Report(state, layer_bytes);
}

void Shapes(benchmark::internal::Benchmark* bench, std::vector<int64_t> tokens) {
  bench->ArgNames({"tokens", "threads"})->ArgsProduct({tokens, {1, 2}})->UseRealTime()->Unit(benchmark::kMicrosecond);
}

void SmolShapes(benchmark::internal::Benchmark* bench) { Shapes(bench, {4096, 205}); }
void QwenShapes(benchmark::internal::Benchmark* bench) { Shapes(bench, {8192, 410}); }

BENCHMARK_CAPTURE(MemoryRead, smollm2, kSmolLm2)->Apply(SmolShapes);
BENCHMARK_CAPTURE(Decode, smollm2_f16, kSmolLm2, DType::kF16)->Apply(SmolShapes);
BENCHMARK_CAPTURE(Decode, smollm2_f32, kSmolLm2, DType::kF32)->Apply(SmolShapes);
BENCHMARK_CAPTURE(Decode, smollm2_q8_0, kSmolLm2, DType::kQ8_0)->Apply(SmolShapes);
BENCHMARK_CAPTURE(MemoryRead, qwen1_5b, kQwen)->Apply(QwenShapes);
BENCHMARK_CAPTURE(Decode, qwen1_5b_f16, kQwen, DType::kF16)->Apply(QwenShapes);
BENCHMARK_CAPTURE(Decode, qwen1_5b_q8_0, kQwen, DType::kQ8_0)->Apply(QwenShapes);

}  // namespace
}  // namespace dropkv
