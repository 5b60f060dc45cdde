// Scores of one layer against the same formula with dense matrices on OpenBLAS, in one process: time, scratch, share of
// the measured multiply-add peak, and the ratio to the attention-mass policy.
//
//   score_bench [n [threads [repeats [kernel]]]]
//
// Shape: 32 query heads, 8 KV heads, d = dv = 128, float32. Times are CPU times of the process over the number of
// threads, the least of the repeats, alternating between the competitors: other work on the machine then hardly moves
// them. On an idle machine they are the wall-clock times.
#include <cblas.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/random.h"
#include "cpu/kernels.h"
#include "cpu/score.h"
#include "dense_score.h"
#include "dropkv/engine.h"
#include "fma_peak.h"

namespace dropkv::bench {
namespace {

constexpr int32_t kQueryHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kDim = 128;

std::vector<float> Numbers(size_t count, uint64_t seed) {
  std::vector<float> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = 3.4641F * (RandomUniform(seed, i) - 0.5F);  // variance 1
  return numbers;
}

double CpuNow() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class F>
double CpuSeconds(F&& f) {
  const double start = CpuNow();
  f();
  return CpuNow() - start;
}

// One layer and its rows.
struct Layer {
  int32_t tokens;
  int32_t rows;
  std::vector<float> q, k, v, out, lse;
  std::vector<int32_t> visible;

  Layer(int32_t n, int32_t w)
      : tokens(n),
        rows(w),
        q(Numbers(size_t{kQueryHeads} * w * kDim, 1)),
        k(Numbers(size_t{kKvHeads} * n * kDim, 2)),
        v(Numbers(size_t{kKvHeads} * n * kDim, 3)),
        out(size_t{kQueryHeads} * w * kDim),
        lse(size_t{kQueryHeads} * w) {
    for (int32_t i = 0; i < w; ++i) visible.push_back(n - w + i + 1);
  }

  LayerInput Input(bool given) const {
    const int64_t head = int64_t{tokens} * kDim;
    return {{kKvHeads,
             tokens,
             kDim,
             kDim,
             {k.data(), DType::kF32, head, kDim, 1},
             {v.data(), DType::kF32, head, kDim, 1},
             nullptr},
            {q.data(), int64_t{rows} * kDim, kDim, kQueryHeads, rows, visible.data()},
            {1.0F / std::sqrt(static_cast<float>(kDim)), 0.0F, nullptr},
            given ? out.data() : nullptr,
            given ? lse.data() : nullptr,
            0};
  }

  DenseLayer Dense() {
    return {kKvHeads, kQueryHeads / kKvHeads, rows, tokens, kDim, q.data(), k.data(), v.data(), out.data(), lse.data()};
  }
};

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Times {
  double attend = kNever;
  double score = kNever;
  double total = kNever;
};

// The engine's scoring without selection, kept where it is the fastest so far.
void RunScorer(const cpu::Kernels& kernels, ThreadPool& pool, const Layer& layer, Signal signal, bool given,
               std::span<float> raw, Times& times) {
  const cpu::WaveShape shape{1, kKvHeads, kQueryHeads / kKvHeads, layer.rows, layer.tokens, kDim, kDim, pool.threads()};
  Workspace lasting_size;
  Workspace passing_size;
  const cpu::WaveScorer counted(kernels, &pool, shape, lasting_size, passing_size);
  std::vector<std::byte> lasting_memory(lasting_size.bytes_needed());
  std::vector<std::byte> passing_memory(passing_size.bytes_needed());
  std::vector<uint8_t> flags(raw.size());
  Workspace lasting(lasting_memory);
  Workspace passing(passing_memory);
  cpu::WaveScorer scorer(kernels, &pool, shape, lasting, passing);
  const LayerInput input = layer.Input(given);
  const double attend = CpuSeconds([&] {
                          scorer.Attend({&input, 1}, signal == Signal::kDropKv, flags.data());
                        }) /
                        pool.threads();
  const double score = CpuSeconds([&] {
                         scorer.Score({&input, 1}, signal, raw.data(), flags.data());
                       }) /
                       pool.threads();
  times.attend = std::min(times.attend, attend);
  times.score = std::min(times.score, score);
  times.total = std::min(times.total, attend + score);
}

// All that Engine::Run takes from the caller: scores, flags and selection too.
size_t WorkspaceBytes(const Engine& engine, const Layer& layer) {
  Policy policy;
  policy.window = layer.rows;
  return engine.MakePlan({1, kQueryHeads, kKvHeads, layer.tokens, kDim, kDim}, policy, Budget::Fraction(0.05))
      ->workspace_bytes;
}

double LargestDifference(std::span<const float> a, std::span<const float> b) {
  double largest = 0.0;
  for (size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(double{a[i]} - b[i]) / std::max(1e-12, double{b[i]}));
  return largest;
}

void Compare(const Engine& engine, const cpu::Kernels& kernels, int32_t n, int32_t w, int32_t repeats, double peak) {
  ThreadPool& pool = *engine.pool();
  Layer layer(n, w);
  std::vector<float> raw(size_t{kKvHeads} * n);
  std::vector<float> dense_raw(raw.size());
  DenseScratch scratch(layer.Dense(), pool.threads());
  Times ours, given, mass;
  double dense = kNever, dense_given = kNever, tuned = kNever, tuned_given = kNever;
  for (int32_t repeat = 0; repeat < repeats; ++repeat) {
    const auto time_dense = [&](bool handed_in, bool vector_exp, double& best) {
      const double seconds =
          CpuSeconds([&] { DenseScore(layer.Dense(), handed_in, vector_exp, pool, scratch, dense_raw.data()); });
      best = std::min(best, seconds / pool.threads());
    };
    time_dense(false, false, dense);
    time_dense(true, false, dense_given);
    time_dense(false, true, tuned);
    time_dense(true, true, tuned_given);
    RunScorer(kernels, pool, layer, Signal::kDropKv, false, raw, ours);
    RunScorer(kernels, pool, layer, Signal::kDropKv, true, raw, given);
    const double difference = LargestDifference(raw, dense_raw);
    if (difference > 1e-3) std::printf("scores differ: %.2e relative\n", difference);
    RunScorer(kernels, pool, layer, Signal::kAttention, false, raw, mass);
  }
  const double products = 4.0 * kQueryHeads * w * static_cast<double>(n) * kDim;  // FLOP of two products
  const double per_pass = peak * pool.threads();
  std::printf("\nn %d, w %d, %d threads                      ms   GFLOP/s   of peak\n", n, w, pool.threads());
  const auto line = [&](const char* name, double seconds, double flop) {
    std::printf("%-36s %9.2f %9.1f %8.0f%%\n", name, seconds * 1e3, flop / seconds * 1e-9,
                100.0 * flop / seconds / per_pass);
  };
  line("dense, o and lse computed", dense, 1.5 * products);
  line("dense, handed in", dense_given, products);
  line("dense, vector exp, computed", tuned, 1.5 * products);
  line("dense, vector exp, handed in", tuned_given, products);
  line("dropkv attend", ours.attend, products);
  line("dropkv score", ours.score, products);
  line("dropkv, computed", ours.total, 2.0 * products);
  line("dropkv, handed in", given.total, products);
  line("snapkv, computed", mass.total, products);
  const auto workspace = static_cast<double>(WorkspaceBytes(engine, layer));
  const double layer_scratch = 3.0 * 4.0 * kQueryHeads * w * static_cast<double>(n);
  std::printf("ratio to dense:             computed %.2f, handed in %.2f\n", dense / ours.total,
              dense_given / given.total);
  std::printf("ratio to dense, vector exp: computed %.2f, handed in %.2f\n", tuned / ours.total,
              tuned_given / given.total);
  std::printf("dropkv / snapkv %.2f\n", ours.total / mass.total);
  std::printf("scratch: %.2f MB, dense (three matrices of all heads) %.1f MB: 1/%.0f\n", workspace * 1e-6,
              layer_scratch * 1e-6, layer_scratch / workspace);
}

int Main(int argc, char** argv) {
  // OpenBLAS reads these before main: they would pick another kernel than its own choice for this machine.
  if (std::getenv("OPENBLAS_CORETYPE") != nullptr || std::getenv("OPENBLAS_L2_SIZE") != nullptr) {
    unsetenv("OPENBLAS_CORETYPE");
    unsetenv("OPENBLAS_L2_SIZE");
    execv("/proc/self/exe", argv);
  }
  const int32_t n = argc > 1 ? std::atoi(argv[1]) : 8192;
  const int32_t threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int32_t repeats = argc > 3 ? std::atoi(argv[3]) : 7;
  openblas_set_num_threads(1);  // heads run side by side instead
  const Result<Engine> engine = Engine::Create({threads, argc > 4 ? argv[4] : ""});
  if (!engine.ok()) {
    std::fprintf(stderr, "%s\n", engine.status().message().c_str());
    return 1;
  }
  const auto table = cpu::KernelTable();
  const auto kernels =
      std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.name == engine->kernel(); });
  if (kernels == table.end()) return 1;
  const double peak = FmaPeak();
  std::printf("kernel %s, OpenBLAS %s, multiply-add peak of one core %.1f GFLOP/s\n",
              std::string(engine->kernel()).c_str(), openblas_get_corename(), peak * 1e-9);
  for (const int32_t w : {32, 8}) Compare(*engine, *kernels, n, w, repeats, peak);
  return 0;
}

}  // namespace
}  // namespace dropkv::bench

int main(int argc, char** argv) { return dropkv::bench::Main(argc, argv); }
