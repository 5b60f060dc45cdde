#include "dropkv/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "core/parallel.h"
#include "core/random.h"
#include "core/workspace.h"
#include "cpu/kernels.h"
#include "cpu/score.h"
#include "cpu/select.h"
#include "engine/engine_impl.h"
#include "engine/run_reference.h"
#include "reference/reference.h"

namespace dropkv {
namespace {

constexpr std::string_view kReferenceName = "reference";

// Adds the seconds of its life to `total`.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

bool KeepsAll(const Plan& plan) {
  return plan.policy.signal == Signal::kFull || plan.shape.tokens <= plan.policy.window;
}

bool WantsCertificate(const EvictOutput& output) {
  return output.output_error != nullptr || output.evicted_mass != nullptr;
}

// Observation rows of every layer.
int32_t RowsOf(const Plan& plan) {
  return plan.shape.rows > 0 ? plan.shape.rows : std::min(plan.policy.window, plan.shape.tokens);
}

cpu::WaveShape MakeWaveShape(const Plan& plan, int32_t threads) {
  const EvictShape& shape = plan.shape;
  return {cpu::LayersPerWave(shape, threads),
          shape.kv_heads,
          shape.query_heads / shape.kv_heads,
          RowsOf(plan),
          ViewTokens(shape),
          shape.key_dim,
          shape.value_dim,
          threads,
          shape.generated};
}

// Everything a run keeps in the caller's workspace; also counts its bytes. Selection takes place between scoring and
// certificate: its memory and the pooled scores lie where the scorer's passing memory is.
struct RunMemory {
  cpu::WaveShape wave;
  float* raw;      // [wave layers, Hkv, n]
  uint8_t* flags;  // [wave layers, Hkv, n]
  int32_t* counts;
  std::span<const int32_t>* lists;  // [wave layers * Hkv]
  float* pooled;                    // [wave layers, Hkv, n]
  std::span<std::byte> select;
  std::optional<cpu::WaveScorer> scorer;

  RunMemory(const Plan& plan, const cpu::Kernels& kernels, ThreadPool* pool, Workspace& workspace)
      : wave(MakeWaveShape(plan, pool->threads())),
        raw(workspace.Take<float>(scores())),
        flags(workspace.Take<uint8_t>(scores())),
        counts(workspace.Take<int32_t>(wave.kv_heads)),
        lists(workspace.Take<std::span<const int32_t>>(wave.heads())) {
    Workspace lasting_size;
    Workspace passing_size;
    const cpu::WaveScorer counted(kernels, pool, wave, lasting_size, passing_size);
    Workspace selection_size;
    TakeSelection(plan, selection_size);
    const size_t shared = std::max(passing_size.bytes_needed(), selection_size.bytes_needed());
    auto* const memory = workspace.Take<std::byte>(shared);
    Workspace passing = memory != nullptr ? Workspace({memory, shared}) : Workspace();
    Workspace selection = memory != nullptr ? Workspace({memory, shared}) : Workspace();
    scorer.emplace(kernels, pool, wave, workspace, passing);
    TakeSelection(plan, selection);
  }

 private:
  size_t scores() const { return static_cast<size_t>(wave.heads()) * wave.candidates(); }

  void TakeSelection(const Plan& plan, Workspace& workspace) {
    pooled = workspace.Take<float>(scores());
    const size_t bytes = cpu::SelectWorkspaceBytes(plan.policy, plan.budget, wave.kv_heads, wave.candidates());
    select = {workspace.Take<std::byte>(bytes), bytes};
  }
};

// One call of Run: waves of layers, one after the other.
class RunState {
 public:
  RunState(const Plan& plan, ThreadPool* pool, RunMemory& memory, const EvictOutput& output, EvictReport& report)
      : plan_(plan), pool_(pool), memory_(memory), output_(output), report_(report) {
    offsets_.reserve(static_cast<size_t>(plan.shape.layers) * plan.shape.kv_heads + 1);
    offsets_.push_back(0);
    positions_.resize(plan.max_kept);
  }

  Status RunWave(std::span<const LayerInput> layers, int32_t first_layer) {
    const bool certificate = WantsCertificate(output_);
    const bool score = plan_.policy.needs_queries();
    if (score || certificate) {
      const Stopwatch watch(report_.attend_s);
      memory_.scorer->Attend(layers, certificate || plan_.policy.signal == Signal::kDropKv, memory_.flags);
      report_.skipped_rows += memory_.scorer->skipped_rows();
    }
    {
      const Stopwatch watch(report_.score_s);
      if (score) {
        memory_.scorer->Score(layers, plan_.policy.signal, memory_.raw, memory_.flags);
      } else {
        ScoreByPosition(layers);
      }
    }
    {
      const Stopwatch watch(report_.select_s);
      Pool(layers);
      WriteScores(layers, first_layer);
      DROPKV_RETURN_IF_ERROR(Select(layers));
    }
    if (!certificate) return Status::Ok();
    const Stopwatch watch(report_.certificate_s);
    const int64_t first = int64_t{first_layer} * plan_.shape.query_heads;
    memory_.scorer->Certify(layers, {memory_.lists, heads(layers)},
                            output_.output_error != nullptr ? output_.output_error + first : nullptr,
                            output_.evicted_mass != nullptr ? output_.evicted_mass + first : nullptr);
    return Status::Ok();
  }

  KeepList Finish() {
    positions_.resize(offsets_.back());
    return {plan_.shape.layers, plan_.shape.kv_heads, std::move(offsets_), std::move(positions_)};
  }

 private:
  size_t heads(std::span<const LayerInput> layers) const { return layers.size() * plan_.shape.kv_heads; }

  // Signals that look at positions alone; no token is flagged.
  void ScoreByPosition(std::span<const LayerInput> layers) {
    const int32_t n = plan_.shape.tokens;
    pool_->For(heads(layers), [&](int64_t index, int32_t) {
      const auto head = static_cast<int32_t>(index % plan_.shape.kv_heads);
      const int32_t layer = layers[index / plan_.shape.kv_heads].layer_index;
      std::fill_n(memory_.flags + index * n, n, uint8_t{0});
      for (int32_t j = 0; j < n; ++j)
        memory_.raw[index * n + j] = plan_.policy.signal == Signal::kRandom
                                         ? RandomScore(plan_.policy.seed, layer, head, j)
                                         : static_cast<float>(j);
    });
  }

  void Pool(std::span<const LayerInput> layers) {
    const int32_t n = plan_.shape.tokens;
    pool_->For(heads(layers), [&](int64_t index, int32_t) {
      cpu::PoolScores(memory_.raw + index * n, n, plan_.policy.pool, plan_.policy.window, memory_.pooled + index * n);
    });
    const uint8_t* flags = memory_.flags;
    for (size_t i = 0; i < heads(layers) * n; ++i) {
      report_.nonfinite_tokens += (flags[i] & reference::kNonFinite) != 0 ? 1 : 0;
      report_.dominant_tokens += (flags[i] & reference::kDominant) != 0 ? 1 : 0;
    }
  }

  void WriteScores(std::span<const LayerInput> layers, int32_t first_layer) {
    const size_t count = heads(layers) * plan_.shape.tokens;
    const int64_t first = int64_t{first_layer} * plan_.shape.kv_heads * plan_.shape.tokens;
    if (output_.scores != nullptr) std::copy_n(memory_.pooled, count, output_.scores + first);
    if (output_.raw_scores != nullptr) std::copy_n(memory_.raw, count, output_.raw_scores + first);
  }

  Status Select(std::span<const LayerInput> layers) {
    const EvictShape& shape = plan_.shape;
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      const size_t first = layer * shape.kv_heads * shape.tokens;
      const cpu::SelectInput input{shape.kv_heads,      shape.tokens,           &plan_.policy,         plan_.budget,
                                   memory_.raw + first, memory_.pooled + first, memory_.flags + first, shape.generated};
      DROPKV_RETURN_IF_ERROR(cpu::Select(input, memory_.select, memory_.counts, positions_.data() + offsets_.back()));
      for (int32_t head = 0; head < shape.kv_heads; ++head) {
        const auto count = static_cast<size_t>(memory_.counts[head]);
        memory_.lists[layer * shape.kv_heads + head] = {positions_.data() + offsets_.back(), count};
        offsets_.push_back(offsets_.back() + memory_.counts[head]);
      }
    }
    return Status::Ok();
  }

  const Plan& plan_;
  ThreadPool* pool_;
  RunMemory& memory_;
  const EvictOutput& output_;
  EvictReport& report_;
  std::vector<int64_t> offsets_;
  std::vector<int32_t> positions_;
};

// Nothing is evicted and nothing is read.
KeepList KeepEverything(const Plan& plan, const EvictOutput& output) {
  const EvictShape& shape = plan.shape;
  const int64_t scores = int64_t{shape.layers} * shape.kv_heads * shape.tokens;
  const int64_t query_heads = int64_t{shape.layers} * shape.query_heads;
  if (output.scores != nullptr) std::fill_n(output.scores, scores, 0.0F);
  if (output.raw_scores != nullptr) std::fill_n(output.raw_scores, scores, 0.0F);
  if (output.output_error != nullptr) std::fill_n(output.output_error, query_heads, 0.0F);
  if (output.evicted_mass != nullptr) std::fill_n(output.evicted_mass, query_heads, 0.0F);
  return KeepList::All(shape.layers, shape.kv_heads, ViewTokens(shape));
}

}  // namespace

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

std::vector<std::string_view> Engine::KernelNames() {
  std::vector<std::string_view> names;
  for (const cpu::Kernels& kernels : cpu::KernelTable()) names.push_back(kernels.name);
  names.push_back(kReferenceName);
  return names;
}

Result<Engine> Engine::Create(const EngineOptions& options) {
  if (options.threads < 0)
    return InvalidArgument("options.threads: expected 0 (one per core) or more" + Got(options.threads));
  if (options.force_kernel == kReferenceName) return Engine(std::make_unique<Impl>(nullptr, options.threads));
  for (const cpu::Kernels& kernels : cpu::KernelTable())
    if (options.force_kernel.empty() || options.force_kernel == kernels.name)
      return Engine(std::make_unique<Impl>(&kernels, options.threads));
  std::string known;
  for (const std::string_view name : KernelNames()) known += (known.empty() ? "" : ", ") + std::string(name);
  return Status(Code::kNotFound,
                "options.force_kernel: expected one of " + known + ", got \"" + options.force_kernel + "\"");
}

ThreadPool* Engine::pool() const { return &impl_->pool; }

std::string_view Engine::kernel() const { return impl_->kernels != nullptr ? impl_->kernels->name : kReferenceName; }

Result<Plan> Engine::MakePlan(const EvictShape& shape, const Policy& policy, const Budget& budget) const {
  DROPKV_RETURN_IF_ERROR(CheckShape(shape));
  DROPKV_RETURN_IF_ERROR(CheckPolicy(policy));
  const Result<KeepCount> keep = ResolveBudget(budget, policy, shape.tokens);
  if (!keep.ok()) return keep.status();
  Plan plan{shape, policy, *keep, 0, 0};
  plan.max_kept = shape.layers * cpu::MaxSelected(policy, *keep, shape.kv_heads, shape.tokens, shape.generated);
  if (KeepsAll(plan) || impl_->kernels == nullptr) return plan;
  Workspace counting;
  const RunMemory memory(plan, *impl_->kernels, &impl_->pool, counting);
  plan.workspace_bytes = counting.bytes_needed();
  return plan;
}

Result<KeepList> Engine::Run(const Plan& plan, std::span<const LayerInput> layers, std::span<std::byte> workspace,
                             const EvictOutput& output, EvictReport* report) {
  EvictReport unused;
  EvictReport& filled = report != nullptr ? *report : unused;
  filled = EvictReport{};
  filled.budget = plan.budget;
  filled.kernel = kernel();
  if (layers.size() != static_cast<size_t>(plan.shape.layers))
    return InvalidArgument("layers: expected the plan's " + std::to_string(plan.shape.layers) +
                           Got(static_cast<int64_t>(layers.size())));
  const bool needs_rows = !KeepsAll(plan) && (plan.policy.needs_queries() || WantsCertificate(output));
  const std::string_view asking = plan.shape.rows > 0 ? "the shape's rows" : "the policy's window";
  for (const LayerInput& layer : layers) {
    DROPKV_RETURN_IF_ERROR(CheckLayer(plan.shape, layer));
    if (needs_rows) DROPKV_RETURN_IF_ERROR(CheckLayerRows(plan.shape, RowsOf(plan), asking, layer));
  }
  if (KeepsAll(plan)) return KeepEverything(plan, output);
  if (impl_->kernels == nullptr) return RunReference(plan, layers, output, filled);
  if (workspace.size() < plan.workspace_bytes)
    return Status(Code::kWorkspaceTooSmall, "workspace: expected " + std::to_string(plan.workspace_bytes) +
                                                " bytes (Plan::workspace_bytes)" +
                                                Got(static_cast<int64_t>(workspace.size())));
  Workspace memory_of_run(workspace);
  RunMemory memory(plan, *impl_->kernels, &impl_->pool, memory_of_run);
  if (memory_of_run.overflow())
    return Status(Code::kFailedPrecondition, "plan: made by an engine with fewer threads or another kernel");
  RunState state(plan, &impl_->pool, memory, output, filled);
  for (int32_t first = 0; first < plan.shape.layers; first += memory.wave.layers) {
    const int32_t count = std::min(memory.wave.layers, plan.shape.layers - first);
    DROPKV_RETURN_IF_ERROR(state.RunWave(layers.subspan(first, count), first));
  }
  return state.Finish();
}

}  // namespace dropkv
