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

bool WantsCertificate(std::span<const PlanRun> runs) {
  return std::any_of(runs.begin(), runs.end(), [](const PlanRun& run) { return WantsCertificate(run.output); });
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

size_t SelectionBytes(const Plan& plan) {
  return cpu::SelectWorkspaceBytes(plan.policy, plan.budget, plan.shape.kv_heads, plan.shape.tokens);
}

// Everything a run keeps in the caller's workspace; also counts its bytes. Selection takes place between scoring and
// certificate: its memory and the pooled scores lie where the scorer's passing memory is, so that a certificate
// overwrites them and the next plan pools once more.
struct RunMemory {
  cpu::WaveShape wave;
  float* raw;      // [wave layers, Hkv, n]
  uint8_t* flags;  // [wave layers, Hkv, n]
  int32_t* counts;
  std::span<const int32_t>* lists;  // [wave layers * Hkv]
  float* pooled;                    // [wave layers, Hkv, n]
  std::span<std::byte> select;
  std::optional<cpu::WaveScorer> scorer;

  // plan: of the pass; selection_bytes: the most that a plan of it selects in.
  RunMemory(const Plan& plan, size_t selection_bytes, const cpu::Kernels& kernels, ThreadPool* pool,
            Workspace& workspace)
      : wave(MakeWaveShape(plan, pool->threads())),
        raw(workspace.Take<float>(scores())),
        flags(workspace.Take<uint8_t>(scores())),
        counts(workspace.Take<int32_t>(wave.kv_heads)),
        lists(workspace.Take<std::span<const int32_t>>(wave.heads())) {
    Workspace lasting_size;
    Workspace passing_size;
    const cpu::WaveScorer counted(kernels, pool, wave, lasting_size, passing_size);
    Workspace selection_size;
    TakeSelection(selection_bytes, selection_size);
    const size_t shared = std::max(passing_size.bytes_needed(), selection_size.bytes_needed());
    auto* const memory = workspace.Take<std::byte>(shared);
    Workspace passing = memory != nullptr ? Workspace({memory, shared}) : Workspace();
    Workspace selection = memory != nullptr ? Workspace({memory, shared}) : Workspace();
    scorer.emplace(kernels, pool, wave, workspace, passing);
    TakeSelection(selection_bytes, selection);
  }

 private:
  size_t scores() const { return static_cast<size_t>(wave.heads()) * wave.candidates(); }

  void TakeSelection(size_t bytes, Workspace& workspace) {
    pooled = workspace.Take<float>(scores());
    select = {workspace.Take<std::byte>(bytes), bytes};
  }
};

// Plans that share a pass: waves of layers, one after the other.
class Pass {
 public:
  Pass(std::span<PlanRun> runs, ThreadPool* pool, RunMemory& memory)
      : shape_(runs.front().plan->shape),
        policy_(runs.front().plan->policy),
        runs_(runs),
        pool_(pool),
        memory_(memory) {
    for (PlanRun& run : runs_) {
      run.offsets.reserve(static_cast<size_t>(shape_.layers) * shape_.kv_heads + 1);
      run.offsets.push_back(0);
      run.positions.resize(run.plan->max_kept);
    }
  }

  Status RunWave(std::span<const LayerInput> layers, int32_t first_layer) {
    Score(layers);
    for (PlanRun& run : runs_) {
      {
        const Stopwatch watch(run.report.select_s);
        Pool(layers, run.report);
        WriteScores(layers, first_layer, run.output);
        DROPKV_RETURN_IF_ERROR(Select(layers, run));
      }
      if (!WantsCertificate(run.output)) continue;
      const Stopwatch watch(run.report.certificate_s);
      const int64_t first = int64_t{first_layer} * shape_.query_heads;
      memory_.scorer->Certify(layers, {memory_.lists, heads(layers)},
                              run.output.output_error != nullptr ? run.output.output_error + first : nullptr,
                              run.output.evicted_mass != nullptr ? run.output.evicted_mass + first : nullptr);
    }
    return Status::Ok();
  }

 private:
  size_t heads(std::span<const LayerInput> layers) const { return layers.size() * shape_.kv_heads; }

  // Every plan's report gets what its own run would have said, also where only others ask for a certificate.
  void Score(std::span<const LayerInput> layers) {
    const bool certificate = WantsCertificate(runs_);
    const bool score = policy_.needs_queries();
    double attend_s = 0;
    double score_s = 0;
    if (score || certificate) {
      const Stopwatch watch(attend_s);
      memory_.scorer->Attend(layers, certificate || policy_.signal == Signal::kDropKv, memory_.flags);
    }
    {
      const Stopwatch watch(score_s);
      if (score) {
        memory_.scorer->Score(layers, policy_.signal, memory_.raw, memory_.flags);
      } else {
        ScoreByPosition(layers);
      }
    }
    for (PlanRun& run : runs_) {
      run.report.score_s += score_s;
      if (!score && !WantsCertificate(run.output)) continue;
      run.report.attend_s += attend_s;
      run.report.skipped_rows += memory_.scorer->skipped_rows();
    }
  }

  // Signals that look at positions alone; no token is flagged.
  void ScoreByPosition(std::span<const LayerInput> layers) {
    const int32_t n = shape_.tokens;
    pool_->For(heads(layers), [&](int64_t index, int32_t) {
      const auto head = static_cast<int32_t>(index % shape_.kv_heads);
      const int32_t layer = layers[index / shape_.kv_heads].layer_index;
      std::fill_n(memory_.flags + index * n, n, uint8_t{0});
      for (int32_t j = 0; j < n; ++j)
        memory_.raw[index * n + j] =
            policy_.signal == Signal::kRandom ? RandomScore(policy_.seed, layer, head, j) : static_cast<float>(j);
    });
  }

  void Pool(std::span<const LayerInput> layers, EvictReport& report) {
    const int32_t n = shape_.tokens;
    pool_->For(heads(layers), [&](int64_t index, int32_t) {
      cpu::PoolScores(memory_.raw + index * n, n, policy_.pool, policy_.window, memory_.pooled + index * n);
    });
    const uint8_t* flags = memory_.flags;
    for (size_t i = 0; i < heads(layers) * n; ++i) {
      report.nonfinite_tokens += (flags[i] & reference::kNonFinite) != 0 ? 1 : 0;
      report.dominant_tokens += (flags[i] & reference::kDominant) != 0 ? 1 : 0;
    }
  }

  void WriteScores(std::span<const LayerInput> layers, int32_t first_layer, const EvictOutput& output) {
    const size_t count = heads(layers) * shape_.tokens;
    const int64_t first = int64_t{first_layer} * shape_.kv_heads * shape_.tokens;
    if (output.scores != nullptr) std::copy_n(memory_.pooled, count, output.scores + first);
    if (output.raw_scores != nullptr) std::copy_n(memory_.raw, count, output.raw_scores + first);
  }

  Status Select(std::span<const LayerInput> layers, PlanRun& run) {
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      const size_t first = layer * shape_.kv_heads * shape_.tokens;
      const cpu::SelectInput input{shape_.kv_heads,       shape_.tokens,       &run.plan->policy,
                                   run.plan->budget,      memory_.raw + first, memory_.pooled + first,
                                   memory_.flags + first, shape_.generated};
      int32_t* const positions = run.positions.data();
      DROPKV_RETURN_IF_ERROR(cpu::Select(input, memory_.select, memory_.counts, positions + run.offsets.back()));
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        const auto count = static_cast<size_t>(memory_.counts[head]);
        memory_.lists[layer * shape_.kv_heads + head] = {positions + run.offsets.back(), count};
        run.offsets.push_back(run.offsets.back() + memory_.counts[head]);
      }
    }
    return Status::Ok();
  }

  const EvictShape& shape_;
  const Policy& policy_;  // but for heads and alpha every plan's
  std::span<PlanRun> runs_;
  ThreadPool* pool_;
  RunMemory& memory_;
};

// Nothing is evicted and nothing is read.
void KeepEverything(PlanRun& run) {
  const EvictShape& shape = run.plan->shape;
  const EvictOutput& output = run.output;
  const int64_t scores = int64_t{shape.layers} * shape.kv_heads * shape.tokens;
  const int64_t query_heads = int64_t{shape.layers} * shape.query_heads;
  if (output.scores != nullptr) std::fill_n(output.scores, scores, 0.0F);
  if (output.raw_scores != nullptr) std::fill_n(output.raw_scores, scores, 0.0F);
  if (output.output_error != nullptr) std::fill_n(output.output_error, query_heads, 0.0F);
  if (output.evicted_mass != nullptr) std::fill_n(output.evicted_mass, query_heads, 0.0F);
  run.keep = KeepList::All(shape.layers, shape.kv_heads, ViewTokens(shape));
}

Status CheckLayers(std::span<const LayerInput> layers, std::span<const PlanRun> runs) {
  const Plan& plan = *runs.front().plan;
  if (layers.size() != static_cast<size_t>(plan.shape.layers))
    return InvalidArgument("layers: expected the plan's " + std::to_string(plan.shape.layers) +
                           Got(static_cast<int64_t>(layers.size())));
  const bool needs_rows = !KeepsAll(plan) && (plan.policy.needs_queries() || WantsCertificate(runs));
  const std::string_view asking = plan.shape.rows > 0 ? "the shape's rows" : "the policy's window";
  for (const LayerInput& layer : layers) {
    DROPKV_RETURN_IF_ERROR(CheckLayer(plan.shape, layer));
    if (needs_rows) DROPKV_RETURN_IF_ERROR(CheckLayerRows(plan.shape, RowsOf(plan), asking, layer));
  }
  return Status::Ok();
}

Status RunWaves(const cpu::Kernels& kernels, ThreadPool* pool, std::span<const LayerInput> layers,
                std::span<std::byte> workspace, std::span<PlanRun> runs) {
  const Plan& plan = *runs.front().plan;
  size_t needed = 0;
  size_t selection_bytes = 0;
  for (const PlanRun& run : runs) {
    needed = std::max(needed, run.plan->workspace_bytes);
    selection_bytes = std::max(selection_bytes, SelectionBytes(*run.plan));
  }
  if (workspace.size() < needed)
    return Status(Code::kWorkspaceTooSmall, "workspace: expected " + std::to_string(needed) +
                                                " bytes (Plan::workspace_bytes)" +
                                                Got(static_cast<int64_t>(workspace.size())));
  Workspace memory_of_run(workspace);
  RunMemory memory(plan, selection_bytes, kernels, pool, memory_of_run);
  if (memory_of_run.overflow())
    return Status(Code::kFailedPrecondition, "plan: made by an engine with fewer threads or another kernel");
  Pass pass(runs, pool, memory);
  for (int32_t first = 0; first < plan.shape.layers; first += memory.wave.layers) {
    const int32_t count = std::min(memory.wave.layers, plan.shape.layers - first);
    DROPKV_RETURN_IF_ERROR(pass.RunWave(layers.subspan(first, count), first));
  }
  for (PlanRun& run : runs) run.Finish();
  return Status::Ok();
}

// Runs that share a pass. kernels null: the reference.
Status RunPlans(const cpu::Kernels* kernels, ThreadPool* pool, std::span<const LayerInput> layers,
                std::span<std::byte> workspace, std::span<PlanRun> runs) {
  for (PlanRun& run : runs) {
    run.report.budget = run.plan->budget;
    run.report.kernel = kernels != nullptr ? kernels->name : kReferenceName;
  }
  DROPKV_RETURN_IF_ERROR(CheckLayers(layers, runs));
  if (KeepsAll(*runs.front().plan)) {
    for (PlanRun& run : runs) KeepEverything(run);
    return Status::Ok();
  }
  if (kernels != nullptr) return RunWaves(*kernels, pool, layers, workspace, runs);
  RunReference(layers, runs);
  return Status::Ok();
}

// Of outputs or reports: one for every plan, or none.
Status CheckCount(const char* name, size_t plans, size_t count) {
  if (count == 0 || count == plans) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected none or one for each of the " + std::to_string(plans) +
                         " plans" + Got(static_cast<int64_t>(count)));
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
  const RunMemory memory(plan, SelectionBytes(plan), *impl_->kernels, &impl_->pool, counting);
  plan.workspace_bytes = counting.bytes_needed();
  return plan;
}

Result<KeepList> Engine::Run(const Plan& plan, std::span<const LayerInput> layers, std::span<std::byte> workspace,
                             const EvictOutput& output, EvictReport* report) {
  PlanRun run{&plan, output};
  const Status status = RunPlans(impl_->kernels, &impl_->pool, layers, workspace, {&run, 1});
  if (report != nullptr) *report = run.report;
  if (!status.ok()) return status;
  return std::move(run.keep);
}

Result<std::vector<KeepList>> Engine::RunAll(std::span<const Plan> plans, std::span<const LayerInput> layers,
                                             std::span<std::byte> workspace, std::span<const EvictOutput> outputs,
                                             std::span<EvictReport> reports) {
  DROPKV_RETURN_IF_ERROR(CheckOnePass(plans));
  DROPKV_RETURN_IF_ERROR(CheckCount("outputs", plans.size(), outputs.size()));
  DROPKV_RETURN_IF_ERROR(CheckCount("reports", plans.size(), reports.size()));
  std::vector<PlanRun> runs;
  runs.reserve(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) runs.push_back({&plans[i], outputs.empty() ? EvictOutput{} : outputs[i]});
  const Status status = RunPlans(impl_->kernels, &impl_->pool, layers, workspace, runs);
  for (size_t i = 0; i < reports.size(); ++i) reports[i] = runs[i].report;
  if (!status.ok()) return status;
  std::vector<KeepList> lists;
  lists.reserve(plans.size());
  for (PlanRun& run : runs) lists.push_back(std::move(run.keep));
  return lists;
}

}  // namespace dropkv
