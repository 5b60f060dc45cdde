// What the current device is.
#pragma once

#include <cuda_runtime_api.h>

namespace dropkv::cuda {

inline cudaError_t DeviceAttribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(value, attribute, device);
}

// 90 for 9.0.
inline cudaError_t ComputeCapability(int* value) {
  int major = 0;
  int minor = 0;
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrComputeCapabilityMajor, &major); error != cudaSuccess)
    return error;
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrComputeCapabilityMinor, &minor); error != cudaSuccess)
    return error;
  *value = 10 * major + minor;
  return cudaSuccess;
}

}  // namespace dropkv::cuda
