// The pipeline: attend -> score -> pool -> budget -> select -> (certificate), planned once and run without allocation.
// Compact, CompactInPlace and RaggedCache::Assign apply the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/cache_view.h"
#include "dropkv/export.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"
#include "dropkv/status.h"

namespace dropkv {

class ThreadPool;

struct EngineOptions {
  int32_t threads = 0;  // 0: one per core
  // Instruction set by name as KernelNames() lists them ("AVX3", "AVX2", "SSE4", "reference", ...); empty: the best
  // one.
  std::string force_kernel;
};

// Shapes of a batch of layers that are evicted together; one sequence.
struct EvictShape {
  int32_t layers = 1;
  int32_t query_heads = 0;  // Hq
  int32_t kv_heads = 0;     // Hkv
  int32_t tokens = 0;       // n, of the prompt: the candidates
  int32_t key_dim = 0;      // d
  int32_t value_dim = 0;    // dv
  // Tokens n .. n+generated-1 of every view, decoded behind the prompt. Rows that see them count them in the softmax;
  // they are no candidates, lie outside the budget, and every list ends with them.
  int32_t generated = 0;
  int32_t rows = 0;  // observation rows of every layer; 0: the policy's window (min(window, n))
};

// One layer's input. `rows` holds exactly shape.rows rows, or where that is 0 policy.window (min(window, n) where the
// prompt is shorter); it is not read where the policy needs no queries.
struct LayerInput {
  KvView kv;
  ObservationRows rows;
  AttentionSpec attention;
  // The rows' attention outputs [Hq, w, dv] and log-sum-exps [Hq, w], where the engine's prefill has them: one pass
  // over K and V instead of two. Both or none.
  const float* out = nullptr;
  const float* lse = nullptr;
  int32_t layer_index = 0;  // in the model: part of the random policy's counter
};

// What a run did; arrays are the caller's, sizes by shape. Null: not wanted. Errors and masses weigh all rows alike.
struct EvictOutput {
  float* scores = nullptr;        // [layers, Hkv, n] pooled scores
  float* raw_scores = nullptr;    // [layers, Hkv, n] before pooling; non-finite ones as they are
  float* output_error = nullptr;  // [layers, Hq] sqrt(mean_i (|a_i - a'_i| / |a_i|)^2) over the rows
  float* evicted_mass = nullptr;  // [layers, Hq] mean over the rows of the evicted probability
};

struct EvictReport {
  KeepCount budget;              // after clamping, of the prompt's tokens
  int64_t nonfinite_tokens = 0;  // (layer, head, token) with NaN or Inf in key, value or score: kept
  int64_t dominant_tokens = 0;   // (layer, head, token) with p >= 1 - 1e-6 in some row: kept
  int64_t skipped_rows = 0;      // query rows with NaN or Inf: they judge nothing
  double attend_s = 0;           // wall-clock seconds; of plans that share a pass each has all of it
  double score_s = 0;            // the same
  double select_s = 0;
  double certificate_s = 0;
  std::string_view kernel;  // the instruction set that ran
};

// Host decisions for one shape, policy and budget: sizes and work list.
struct Plan {
  EvictShape shape;
  Policy policy;
  KeepCount budget;
  size_t workspace_bytes = 0;
  int64_t max_kept = 0;  // upper bound of KeepList::total()
};

class DROPKV_API Engine {
 public:
  static Result<Engine> Create(const EngineOptions& options = {});

  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  Result<Plan> MakePlan(const EvictShape& shape, const Policy& policy, const Budget& budget) const;

  // Scores and selects for plan.shape.layers layers. Allocates nothing but, on success, the returned lists.
  // workspace: plan.workspace_bytes bytes, any alignment.
  Result<KeepList> Run(const Plan& plan, std::span<const LayerInput> layers, std::span<std::byte> workspace,
                       const EvictOutput& output, EvictReport* report);

  // Run for several plans whose scores are the same, made once: plans of one shape whose policies agree in signal,
  // window, pool, sink and seed, and may differ in name, heads and alpha, as their budgets may. List i is what Run
  // returns for plans[i], bit for bit. workspace: the largest workspace_bytes of the plans. outputs, reports: one for
  // each plan, or none at all. A report's attend_s and score_s are the shared pass's, which the plan would cost alone:
  // over the plans they add up to more than was spent. Beside the lists it allocates one array of the plans' size.
  // Errors: Run's; no plan, plans that disagree, spans of another size.
  Result<std::vector<KeepList>> RunAll(std::span<const Plan> plans, std::span<const LayerInput> layers,
                                       std::span<std::byte> workspace, std::span<const EvictOutput> outputs,
                                       std::span<EvictReport> reports);

  // The certificate of any keep list, also one that no run made (docs/algorithm.md section 6), over the rows given:
  // shape.rows, or where that is 0 any number from 1 to 128, the same in every layer. Lists may differ in length over
  // heads and layers; keep.layers() and keep.kv_heads() are the shape's, positions lie below shape.tokens +
  // shape.generated. layers[i].out and lse: as in Run. output_error, evicted_mass [layers, Hq] as in EvictOutput; one
  // of them may be null. Allocates its workspace.
  Status Certify(const EvictShape& shape, std::span<const LayerInput> layers, const KeepList& keep, float* output_error,
                 float* evicted_mass);

  // Certify for several lists over one pass: outputs[i].output_error and evicted_mass, one of which may be null, are
  // those of *lists[i]; its scores are not written.
  Status CertifyAll(const EvictShape& shape, std::span<const LayerInput> layers, std::span<const KeepList* const> lists,
                    std::span<const EvictOutput> outputs);

  ThreadPool* pool() const;
  std::string_view kernel() const;

  // Names that force_kernel takes on this machine, best first.
  static std::vector<std::string_view> KernelNames();

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Copies the kept rows of list `layer` to the front of `destination` (out of place, other memory than the source's), or
// of `cache` itself (in place: the lists ascend, so no row is overwritten before it moved). Row i of head h becomes
// token i, in cell i; heads may differ in length. Bytes are copied, never converted: dtypes must agree, layouts need
// not. What lies behind a head's last row stays as it is. `cells` [tokens of the lists] as in KvView; in place they
// must ascend along every list (kUnsupported otherwise). On an error nothing has been changed.
DROPKV_API Status Compact(const KvView& source, const KeepList& keep, int32_t layer, const MutableKvView& destination);
DROPKV_API Status CompactInPlace(const MutableKvView& cache, const int32_t* cells, const KeepList& keep, int32_t layer);

}  // namespace dropkv
