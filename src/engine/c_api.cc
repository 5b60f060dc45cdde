#include "engine/c_api.h"

#include <span>
#include <string_view>
#include <utility>

#include "dropkv/policy.h"

static_assert(DROPKV_F32 == static_cast<int>(dropkv::DType::kF32));
static_assert(DROPKV_F16 == static_cast<int>(dropkv::DType::kF16));
static_assert(DROPKV_BF16 == static_cast<int>(dropkv::DType::kBF16));
static_assert(DROPKV_Q8_0 == static_cast<int>(dropkv::DType::kQ8_0));

namespace dropkv::c_api {
namespace {

template <typename Tensor>
auto ToTensor(const Tensor& tensor) {
  using View = std::conditional_t<std::is_same_v<Tensor, dropkv_tensor>, KvTensor, MutableKvTensor>;
  return View{tensor.data, static_cast<DType>(tensor.dtype), tensor.head_stride, tensor.token_stride,
              tensor.dim_stride};
}

ObservationRows ToRows(const dropkv_rows& rows, const float* weights) {
  return {rows.q, rows.head_stride, rows.row_stride, rows.query_heads, rows.rows, rows.visible, weights};
}

// The array's elements lie the first one's struct_size apart: its caller may have an older or a newer header.
Result<std::vector<LayerInput>> ToLayers(const dropkv_layer* layers, int32_t count) {
  if (Status status = CheckPointer(layers, "layers"); !status.ok()) return status;
  if (count < 1) return InvalidArgument("layer_count: expected at least 1, got " + std::to_string(count));
  if (layers->struct_size % alignof(dropkv_layer) != 0)
    return InvalidArgument("layers[0].struct_size: expected sizeof(dropkv_layer), got " +
                           std::to_string(layers->struct_size));
  std::vector<LayerInput> inputs;
  inputs.reserve(count);
  const auto* bytes = reinterpret_cast<const unsigned char*>(layers);
  for (int32_t i = 0; i < count; ++i) {
    const std::string name = "layers[" + std::to_string(i) + "]";
    const auto layer = ReadInput(reinterpret_cast<const dropkv_layer*>(bytes + i * layers->struct_size), name.c_str());
    if (!layer.ok()) return layer.status();
    if (layer->struct_size != layers->struct_size)
      return InvalidArgument(name + ".struct_size: expected " + std::to_string(layers->struct_size) +
                             " as in the first element, got " + std::to_string(layer->struct_size));
    inputs.push_back({ToView(layer->kv), ToRows(layer->rows, layer->row_weights), ToSpec(layer->attention), layer->out,
                      layer->lse, layer->layer_index});
  }
  return inputs;
}

Result<EvictShape> ToShape(const dropkv_shape* in) {
  const auto shape = ReadInput(in, "shape");
  if (!shape.ok()) return shape.status();
  return EvictShape{shape->layers,  shape->query_heads, shape->kv_heads,  shape->tokens,
                    shape->key_dim, shape->value_dim,   shape->generated, shape->rows};
}

dropkv_report ToReport(const EvictReport& in) {
  dropkv_report report = {};
  report.keep = in.budget.keep;
  report.raised = in.budget.raised ? 1 : 0;
  report.nonfinite_tokens = in.nonfinite_tokens;
  report.dominant_tokens = in.dominant_tokens;
  report.skipped_rows = in.skipped_rows;
  report.attend_s = in.attend_s;
  report.score_s = in.score_s;
  report.select_s = in.select_s;
  report.certificate_s = in.certificate_s;
  in.kernel.copy(report.kernel, sizeof report.kernel - 1);
  return report;
}

}  // namespace

KvView ToView(const dropkv_kv& kv) {
  return {kv.kv_heads, kv.tokens, kv.key_dim, kv.value_dim, ToTensor(kv.k), ToTensor(kv.v), kv.cells};
}

MutableKvView ToView(const dropkv_mutable_kv& kv) {
  return {kv.kv_heads, kv.tokens, kv.key_dim, kv.value_dim, ToTensor(kv.k), ToTensor(kv.v)};
}

AttentionSpec ToSpec(const dropkv_attention& attention) {
  return {attention.scale, attention.soft_cap, attention.sinks};
}

Status CheckLayer(int32_t layer, const KeepList& keep) {
  if (layer >= 0 && layer < keep.layers()) return Status::Ok();
  return InvalidArgument("layer: expected 0 to " + std::to_string(keep.layers() - 1) + ", got " +
                         std::to_string(layer));
}

}  // namespace dropkv::c_api

using namespace dropkv;         // NOLINT(google-build-using-namespace): the functions below are outside any namespace
using namespace dropkv::c_api;  // NOLINT(google-build-using-namespace)

dropkv_status dropkv_engine_create(const dropkv_engine_options* options, dropkv_engine** engine) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(engine, "engine"));
    EngineOptions wanted;
    if (options != nullptr) {
      DROPKV_RETURN_IF_ERROR(CheckInput(options, "options"));
      wanted.threads = options->threads;
      if (options->force_kernel != nullptr) wanted.force_kernel = options->force_kernel;
    }
    auto created = Engine::Create(wanted);
    if (!created.ok()) return created.status();
    std::string kernel(created->kernel());
    *engine = new dropkv_engine{std::move(created).value(), std::move(kernel)};
    return Status::Ok();
  });
}

void dropkv_engine_free(dropkv_engine* engine) { delete engine; }

dropkv_status dropkv_engine_kernel(const dropkv_engine* engine, const char** name) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(engine, "engine"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(name, "name"));
    *name = engine->kernel.c_str();
    return Status::Ok();
  });
}

dropkv_status dropkv_kernel_name(int32_t index, const char** name) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(name, "name"));
    // Copied once, for the zeros at their ends.
    static const std::vector<std::string> names = [] {
      const auto views = Engine::KernelNames();
      return std::vector<std::string>(views.begin(), views.end());
    }();
    if (index < 0 || index >= static_cast<int32_t>(names.size()))
      return {Code::kNotFound,
              "index: expected 0 to " + std::to_string(names.size() - 1) + ", got " + std::to_string(index)};
    *name = names[index].c_str();
    return Status::Ok();
  });
}

dropkv_status dropkv_plan_create(const dropkv_engine* engine, const dropkv_shape* shape, const dropkv_policy* policy,
                                 const dropkv_budget* budget, dropkv_plan** plan) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(engine, "engine"));
    const auto sizes = ToShape(shape);
    if (!sizes.ok()) return sizes.status();
    const auto wanted = ToPolicy(policy);
    if (!wanted.ok()) return wanted.status();
    const auto kept = ToBudget(budget);
    if (!kept.ok()) return kept.status();
    DROPKV_RETURN_IF_ERROR(CheckPointer(plan, "plan"));
    auto made = engine->engine.MakePlan(*sizes, *wanted, *kept);
    if (!made.ok()) return made.status();
    *plan = new dropkv_plan{std::move(made).value()};
    return Status::Ok();
  });
}

dropkv_status dropkv_plan_get(const dropkv_plan* plan, dropkv_plan_info* info) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(plan, "plan"));
    DROPKV_RETURN_IF_ERROR(CheckOutput(info, "info"));
    Store(info, {0, plan->plan.workspace_bytes, plan->plan.max_kept, plan->plan.budget.keep,
                 plan->plan.budget.raised ? 1 : 0});
    return Status::Ok();
  });
}

void dropkv_plan_free(dropkv_plan* plan) { delete plan; }

dropkv_status dropkv_run(dropkv_engine* engine, const dropkv_plan* plan, const dropkv_layer* layers,
                         int32_t layer_count, void* workspace, size_t workspace_bytes, const dropkv_outputs* outputs,
                         dropkv_report* report, dropkv_keep_list** keep) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(engine, "engine"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(plan, "plan"));
    const auto inputs = ToLayers(layers, layer_count);
    if (!inputs.ok()) return inputs.status();
    if (workspace_bytes > 0) DROPKV_RETURN_IF_ERROR(CheckPointer(workspace, "workspace"));
    EvictOutput wanted;
    if (outputs != nullptr) {
      DROPKV_RETURN_IF_ERROR(CheckInput(outputs, "outputs"));
      wanted = {outputs->scores, outputs->raw_scores, outputs->output_error, outputs->evicted_mass};
    }
    if (report != nullptr) DROPKV_RETURN_IF_ERROR(CheckOutput(report, "report"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(keep, "keep"));
    EvictReport did;
    auto kept =
        engine->engine.Run(plan->plan, *inputs, {static_cast<std::byte*>(workspace), workspace_bytes}, wanted, &did);
    if (!kept.ok()) return kept.status();
    *keep = new dropkv_keep_list(std::move(kept).value());
    if (report != nullptr) Store(report, ToReport(did));
    return Status::Ok();
  });
}

dropkv_status dropkv_certify(dropkv_engine* engine, const dropkv_shape* shape, const dropkv_layer* layers,
                             int32_t layer_count, const dropkv_keep_list* keep, float* output_error,
                             float* evicted_mass) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(engine, "engine"));
    const auto sizes = ToShape(shape);
    if (!sizes.ok()) return sizes.status();
    const auto inputs = ToLayers(layers, layer_count);
    if (!inputs.ok()) return inputs.status();
    DROPKV_RETURN_IF_ERROR(CheckPointer(keep, "keep"));
    return engine->engine.Certify(*sizes, *inputs, keep->list, output_error, evicted_mass);
  });
}
