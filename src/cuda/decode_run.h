// A test's batch with what decode attention takes and writes, and the kernels that may run it.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "cuda/device_batch.h"

namespace dropkv::cuda {

// Decode reads the rows of a batch with one row per query head.
class DecodeRun {
 public:
  explicit DecodeRun(const HostBatch& batch)
      : device_(batch), q_(batch.q()), sinks_(batch.sinks()), out16_(Elements(batch)), out32_(Elements(batch)) {
    const DeviceCase& c = batch.shape();
    params_.cache = device_.attend().cache;
    params_.q = q_.get();
    params_.out = out16_.get();
    params_.out32 = out32_.get();
    params_.group = c.group;
    params_.scale = 1.0F / std::sqrt(static_cast<float>(c.key_dim));
    params_.soft_cap = c.soft_cap;
    params_.sinks = c.sinks ? sinks_.get() : nullptr;
    workspace_ = DeviceArray<uint8_t>(std::vector<uint8_t>(DecodeWorkspaceBytes(params_)));
    params_.workspace = workspace_.get();
  }

  const DecodeParams& params() const { return params_; }
  cudaStream_t stream() const { return stream_.get(); }

  std::vector<float> Run(const std::string& kernel) { return Run(kernel, params_); }
  std::vector<float> Run(const std::string& kernel, const DecodeParams& params) {
    Clear();
    Launch(kernel, params);
    return out32_.Download();
  }
  void Launch(const std::string& kernel, const DecodeParams& params) const {
    Check(kernel == "any"    ? LaunchDecodeAny(params, stream())
          : kernel == "sm80" ? LaunchDecodeSm80(params, stream())
                             : LaunchDecodeSm90(params, stream()),
          kernel.c_str());
  }

  // NaN everywhere, so that what a launch leaves out shows.
  void Clear() {
    Check(cudaDeviceSynchronize(), "before");
    out32_.Upload(std::vector<float>(out32_.size(), NAN));
    out16_.Upload(std::vector<uint16_t>(out16_.size(), 0xFFFF));
  }
  std::vector<float> Out() const { return out32_.Download(); }
  std::vector<uint16_t> Out16() const { return out16_.Download(); }

 private:
  static size_t Elements(const HostBatch& batch) {
    return static_cast<size_t>(batch.shape().lists()) * batch.shape().group * batch.shape().value_dim;
  }

  DeviceBatch device_;
  DeviceArray<uint16_t> q_;
  DeviceArray<float> sinks_;
  DeviceArray<uint16_t> out16_;
  DeviceArray<float> out32_;
  DeviceArray<uint8_t> workspace_;
  OwnedStream stream_;
  DecodeParams params_;
};

inline bool NoDevice() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0;
}

inline bool IsHopper() {
  int major = 0;
  int minor = 0;
  Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "major");
  Check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "minor");
  return major == 9 && minor == 0;
}

// The tensor-core kernels that the device runs.
inline std::vector<std::string> FastKernels() {
  return IsHopper() ? std::vector<std::string>{"sm80", "sm90"} : std::vector<std::string>{"sm80"};
}

// Why a kernel does not take a shape; null where it does.
inline const char* Refused(const std::string& kernel, const DecodeParams& params) {
  if (kernel == "any") return nullptr;
  if (kernel == "sm90") return RefusesDecodeSm90(params);
  return SupportsDecodeSm80(params) ? nullptr : "a shape or a view for the careful kernel alone";
}

}  // namespace dropkv::cuda
