// The instructions that the toolkit's headers do not offer in the form needed here: memory barriers with a transaction
// count, tensor copies with an L2 hint, warpgroup registers (PTX ISA 8.x; sm_90a where it says so).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dropkv::cuda {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void BarrierInit(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count));
}

// Makes initialised barriers visible to the copy engine.
__device__ inline void FenceBarrierInit() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Ordinary writes to shared memory before it are seen by the tensor cores and the copy engine after it.
__device__ inline void FenceProxyAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void BarrierExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Waits until the phase with this parity has completed.
__device__ inline void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Words of shared memory between threads of a block that meet at no barrier.
__device__ inline void StoreRelease(int32_t* word, int32_t value) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(SharedAddress(word)), "r"(value) : "memory");
}
__device__ inline int32_t LoadAcquire(const int32_t* word) {
  int32_t value;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(SharedAddress(word)) : "memory");
  return value;
}

// Named barriers: warps that wait for each other without the rest of the block.
__device__ inline void NamedSync(int32_t id, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether the predicate held in any thread.
__device__ inline bool NamedAny(int32_t id, int32_t threads, bool predicate) {
  int32_t any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.s32 in, %3, 0;\n"
      "bar.red.or.pred out, %1, %2, in;\n"
      "selp.s32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int32_t>(predicate))
      : "memory");
  return any != 0;
}

// L2 policies: data read once leaves first; data that another kernel reads soon stays.
__device__ inline uint64_t EvictFirst() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t EvictLast() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// A box of a tensor map (dim, token, head, sequence or block) into shared memory; completes on the barrier.
__device__ inline void CopyBox(void* to, const CUtensorMap* map, uint64_t* barrier, uint64_t policy, int32_t dim,
                               int32_t token, int32_t head, int32_t sequence) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(SharedAddress(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(SharedAddress(barrier)), "r"(dim), "r"(token), "r"(head), "r"(sequence),
      "l"(policy)
      : "memory");
}

template <int kRegisters>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dropkv::cuda
