// Compiles when nvcc takes every public C++ header; the C ABI's too. Views must also be plain data for kernels.
#include <cstdio>
#include <type_traits>

#include "dropkv/cache_view.h"
#include "dropkv/cuda.h"
#include "dropkv/dropkv.h"
#include "dropkv/dropkv_cuda.h"
#include "dropkv/dtype.h"
#include "dropkv/engine.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"
#include "dropkv/ragged_cache.h"
#include "dropkv/status.h"
#include "dropkv/version.h"

static_assert(std::is_trivially_copyable_v<dropkv::KvView> && std::is_trivially_copyable_v<dropkv::ObservationRows> &&
              std::is_trivially_copyable_v<dropkv::AttentionSpec>);

// A view as a kernel parameter: bytes of one token's key.
__global__ void KeyBytes(dropkv::KvView view, int64_t* bytes) { *bytes = view.key_dim * int64_t{sizeof(float)}; }

int main() {
  const dropkv::Status status = dropkv::CheckKvView(dropkv::KvView{});
  std::printf("dropkv %s: %s\n", dropkv_version(), status.message().c_str());
  return status.code() == dropkv::Code::kInvalidArgument && dropkv::FindPreset("dropkv").ok() ? 0 : 1;
}
