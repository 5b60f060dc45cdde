// How few blocks share the work on those lists that have a flag set.
#pragma once

#include "cuda/any/vector.cuh"

namespace dropkv::cuda {

// This block's share of the parts of all lists whose flag is set (flags null: of all lists), one after the other. For
// kernels that mostly find nothing to do: few blocks see that quickly, and share what there is, wherever it is.
class FlaggedParts {
 public:
  __device__ FlaggedParts(const int32_t* flags, int32_t lists, int32_t list_parts)
      : flags_(flags), lists_(lists), list_parts_(list_parts), next_(static_cast<int32_t>(blockIdx.x)) {}

  // Whole warps call it. False: there are no more.
  __device__ bool Next() {
    while (flagged_ == 0 || next_ >= list_parts_) {
      if (flagged_ != 0) {
        next_ -= list_parts_;
        flagged_ &= flagged_ - 1;
        continue;
      }
      first_ += 32;
      if (first_ >= lists_) return false;
      const int32_t own = first_ + static_cast<int32_t>(threadIdx.x % 32);
      flagged_ = __ballot_sync(kAllLanes, own < lists_ && (flags_ == nullptr || flags_[own] != 0));
    }
    part_ = next_;
    next_ += static_cast<int32_t>(gridDim.x);
    return true;
  }
  __device__ int32_t list() const { return first_ + __ffs(static_cast<int32_t>(flagged_)) - 1; }
  __device__ int32_t part() const { return part_; }

 private:
  const int32_t* flags_;
  int32_t lists_;
  int32_t list_parts_;
  int32_t next_;  // part of the first list in flagged_
  int32_t part_ = 0;
  int32_t first_ = -32;   // list of bit 0 of flagged_
  unsigned flagged_ = 0;  // of 32 lists, those that are not done
};

}  // namespace dropkv::cuda
