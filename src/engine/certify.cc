// The certificate of any keep list: docs/algorithm.md section 6.
#include <algorithm>
#include <vector>

#include "core/workspace.h"
#include "cpu/score.h"
#include "engine/engine_impl.h"
#include "reference/reference.h"

namespace dropkv {
namespace {

int32_t RowsOf(const EvictShape& shape, std::span<const LayerInput> layers) {
  return shape.rows > 0 ? shape.rows : layers.front().rows.rows;
}

Status CheckLayers(const EvictShape& shape, std::span<const LayerInput> layers) {
  if (layers.size() != static_cast<size_t>(shape.layers))
    return InvalidArgument("layers: expected the shape's " + std::to_string(shape.layers) +
                           Got(static_cast<int64_t>(layers.size())));
  const std::string_view asking = shape.rows > 0 ? "the shape's rows" : "as in the first layer";
  for (const LayerInput& layer : layers) {
    DROPKV_RETURN_IF_ERROR(CheckLayer(shape, layer));
    DROPKV_RETURN_IF_ERROR(CheckLayerRows(shape, RowsOf(shape, layers), asking, layer));
  }
  return Status::Ok();
}

Status CheckLists(const EvictShape& shape, const KeepList& keep) {
  if (keep.layers() != shape.layers || keep.kv_heads() != shape.kv_heads)
    return InvalidArgument("keep: expected lists of " + std::to_string(shape.layers) + " layers and " +
                           std::to_string(shape.kv_heads) + " KV heads, got " + std::to_string(keep.layers()) +
                           " and " + std::to_string(keep.kv_heads()));
  for (int32_t layer = 0; layer < shape.layers; ++layer)
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      int32_t last = -1;
      for (const int32_t position : keep.head(layer, head)) {
        if (position <= last || position >= ViewTokens(shape))
          return InvalidArgument("keep: expected ascending positions below " + std::to_string(ViewTokens(shape)) +
                                 Got(position) + " after " + std::to_string(last) + " in layer " +
                                 std::to_string(layer) + ", head " + std::to_string(head));
        last = position;
      }
    }
  return Status::Ok();
}

void CertifyByReference(std::span<const LayerInput> layers, const KeepList& keep, const EvictOutput& output) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerInput& in = layers[i];
    const reference::Certificate measured =
        reference::Certify(in.kv, in.rows, in.attention, keep, static_cast<int32_t>(i));
    const auto copy = [&](const std::vector<double>& from, float* to) {
      if (to == nullptr) return;
      std::transform(from.begin(), from.end(), to + i * from.size(), [](double x) { return static_cast<float>(x); });
    };
    copy(measured.output_error, output.output_error);
    copy(measured.evicted_mass, output.evicted_mass);
  }
}

std::vector<std::byte> MemoryOf(const Workspace& counted) { return std::vector<std::byte>(counted.bytes_needed()); }

// Every wave of layers is attended to once.
void CertifyByKernels(const cpu::Kernels& kernels, ThreadPool* pool, const EvictShape& shape,
                      std::span<const LayerInput> layers, std::span<const KeepList* const> lists,
                      std::span<const EvictOutput> outputs) {
  const cpu::WaveShape wave{cpu::LayersPerWave(shape, pool->threads()),
                            shape.kv_heads,
                            shape.query_heads / shape.kv_heads,
                            RowsOf(shape, layers),
                            ViewTokens(shape),
                            shape.key_dim,
                            shape.value_dim,
                            pool->threads(),
                            shape.generated};
  Workspace lasting_size;
  Workspace passing_size;
  const cpu::WaveScorer counted(kernels, pool, wave, lasting_size, passing_size);
  std::vector<std::byte> lasting_memory = MemoryOf(lasting_size);
  std::vector<std::byte> passing_memory = MemoryOf(passing_size);
  Workspace lasting(lasting_memory);
  Workspace passing(passing_memory);
  cpu::WaveScorer scorer(kernels, pool, wave, lasting, passing);
  std::vector<uint8_t> flags(static_cast<size_t>(wave.heads()) * wave.candidates());
  std::vector<std::span<const int32_t>> heads(wave.heads());
  for (int32_t first = 0; first < shape.layers; first += wave.layers) {
    const int32_t count = std::min(wave.layers, shape.layers - first);
    const std::span<const LayerInput> part = layers.subspan(first, count);
    scorer.Attend(part, true, flags.data());
    const int64_t at = int64_t{first} * shape.query_heads;
    for (size_t list = 0; list < lists.size(); ++list) {
      for (int32_t i = 0; i < count * shape.kv_heads; ++i)
        heads[i] = lists[list]->head(first + i / shape.kv_heads, i % shape.kv_heads);
      const EvictOutput& output = outputs[list];
      scorer.Certify(part, {heads.data(), static_cast<size_t>(count) * shape.kv_heads},
                     output.output_error != nullptr ? output.output_error + at : nullptr,
                     output.evicted_mass != nullptr ? output.evicted_mass + at : nullptr);
    }
  }
}

}  // namespace

Status Engine::Certify(const EvictShape& shape, std::span<const LayerInput> layers, const KeepList& keep,
                       float* output_error, float* evicted_mass) {
  const KeepList* const list = &keep;
  const EvictOutput output{.output_error = output_error, .evicted_mass = evicted_mass};
  return CertifyAll(shape, layers, {&list, 1}, {&output, 1});
}

Status Engine::CertifyAll(const EvictShape& shape, std::span<const LayerInput> layers,
                          std::span<const KeepList* const> lists, std::span<const EvictOutput> outputs) {
  DROPKV_RETURN_IF_ERROR(CheckShape(shape));
  DROPKV_RETURN_IF_ERROR(CheckLayers(shape, layers));
  if (outputs.size() != lists.size())
    return InvalidArgument("outputs: expected one for each of the " + std::to_string(lists.size()) + " lists" +
                           Got(static_cast<int64_t>(outputs.size())));
  for (size_t i = 0; i < lists.size(); ++i) {
    DROPKV_RETURN_IF_ERROR(CheckLists(shape, *lists[i]));
    if (!WantsCertificate(outputs[i]))
      return InvalidArgument("output_error, evicted_mass: expected at least one of them, got null");
  }
  if (lists.empty()) return Status::Ok();
  if (impl_->kernels != nullptr) {
    CertifyByKernels(*impl_->kernels, &impl_->pool, shape, layers, lists, outputs);
  } else {
    for (size_t i = 0; i < lists.size(); ++i) CertifyByReference(layers, *lists[i], outputs[i]);
  }
  return Status::Ok();
}

}  // namespace dropkv
