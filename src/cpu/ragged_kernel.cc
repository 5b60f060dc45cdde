#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/ragged_kernel.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "cpu/ragged_kernel-inl.h"
#include "cpu/ragged_kernel.h"
#include "hwy/highway.h"

#if HWY_ONCE
namespace dropkv::ragged {
namespace {

HWY_EXPORT(AttendPart);
HWY_EXPORT(TargetName);

}  // namespace

std::string_view KernelName() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

void Attend(const Part& part) { HWY_DYNAMIC_DISPATCH(AttendPart)(part); }

}  // namespace dropkv::ragged
#endif  // HWY_ONCE
