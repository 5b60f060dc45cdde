// Device memory of tests and benchmarks: freed by its owner, copied on the stream it is given.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace dropkv::cuda {

// Ends the program with the place and the error's name: nothing of a test means anything after a failed call.
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

// What the host fills is complete when the call returns, whatever stream reads it next. A copy from pageable memory
// returns when its source has been read, a fill at once; and a stream that does not block never waits for either.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) {
    Check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T) + 1), "cudaMalloc");
    Check(cudaMemset(data_, 0xFF, count * sizeof(T)), "cudaMemset");  // NaN, -1: what nothing wrote shows
    Check(cudaDeviceSynchronize(), "fill");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { Upload(host); }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  void Upload(const std::vector<T>& host) {
    Check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    Check(cudaDeviceSynchronize(), "upload");
  }
  // Waits for the device.
  std::vector<T> Download() const {
    Check(cudaDeviceSynchronize(), "kernel");
    std::vector<T> host(count_);
    Check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }
  T* get() const { return data_; }
  size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace dropkv::cuda
