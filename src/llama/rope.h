// The rotary embedding of a query, read from the graph that computes it.
#pragma once

#include "baseline/input.h"
#include "dropkv/status.h"

struct ggml_tensor;

namespace dropkv::llama {

// What lies between a query, as an attention operation reads it, and the model's own projection.
struct QuerySource {
  const ggml_tensor* rope = nullptr;   // the GGML_OP_ROPE node; null: none was met
  const ggml_tensor* other = nullptr;  // the operation at which the walk ended instead
  bool rotated = false;  // by an orthonormal matrix, as libllama does before it quantises a cache: keys and values too
};

// Walks back from `q` through views, copies and a constant factor. Reads no data: right before the graph runs, too.
QuerySource FindQuerySource(const ggml_tensor* q);

// Frequencies and magnitude of a GGML_OP_ROPE node, frequency factors and YaRN included: with them pair i of a query at
// position p turns by p * frequencies[i], as in ggml. Errors (kUnsupported): positions of several sections (M-RoPE).
Result<baseline::Rope> ReadRope(const ggml_tensor* node);

}  // namespace dropkv::llama
