// Decode attention beside the device's own copy rate, in one run: a table, then the same as CSV, a row for every kernel
// that the device has. A graph holds one
// decode per layer of a model, every layer with its own keys and values, together several times the L2 cache; the time
// of a layer is a graph's, divided by its layers. Bytes are the keys and values of the lists: what must be read.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

constexpr int kReplays = 21;
constexpr int64_t kGraphBytes = int64_t{1} << 30;  // of all layers
constexpr int64_t kMaxLayers = 128;

struct BenchCase {
  int32_t sequences;
  int32_t kv_heads;
  int32_t group;
  int32_t dim;
  int32_t tokens;  // of a list, on average
  bool ragged;     // lists of 0.2 to 1.8 times that
};

struct Kernel {
  const char* name;
  cudaError_t (*launch)(const DecodeParams& params, cudaStream_t stream);
};

struct Result {
  const char* kernel;
  BenchCase shape;
  int64_t bytes;
  double microseconds;
};

__global__ void FillRandom(__nv_bfloat16* to, int64_t count, uint32_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t x = (static_cast<uint32_t>(i) + seed) * 0x9E3779B9U;
    x = (x ^ (x >> 16)) * 0x85EBCA6BU;
    x = (x ^ (x >> 13)) * 0xC2B2AE35U;
    to[i] = __float2bfloat16(static_cast<float>(x >> 8) * 0x1p-23F - 1.0F);
  }
}

DeviceArray<__nv_bfloat16> RandomArray(int64_t count, uint32_t seed) {
  DeviceArray<__nv_bfloat16> array(count);
  FillRandom<<<1024, 256>>>(array.get(), count, seed);
  Check(cudaGetLastError(), "fill");
  return array;
}

// Offsets of the lists. Ragged lengths are spread evenly and dealt out in no order.
std::vector<int64_t> MakeOffsets(const BenchCase& c) {
  const int32_t lists = c.sequences * c.kv_heads;
  std::vector<int64_t> offsets{0};
  for (int32_t i = 0; i < lists; ++i) {
    const double place = lists > 1 ? static_cast<double>(i * 37 % lists) / (lists - 1) : 0.5;
    offsets.push_back(offsets.back() + static_cast<int64_t>(c.tokens * (c.ragged ? 0.2 + 1.6 * place : 1.0)));
  }
  return offsets;
}

// Median time of what `enqueue` puts into a stream, in microseconds.
template <typename F>
double MedianTime(cudaStream_t stream, F&& enqueue) {
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  Check(cudaEventCreate(&start), "event");
  Check(cudaEventCreate(&stop), "event");
  std::vector<float> times;
  for (int i = 0; i < kReplays + 2; ++i) {
    Check(cudaEventRecord(start, stream), "record");
    enqueue();
    Check(cudaEventRecord(stop, stream), "record");
    Check(cudaEventSynchronize(stop), "synchronize");
    float milliseconds = 0.0F;
    Check(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
    if (i >= 2) times.push_back(milliseconds);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1e3;
}

// The same, of a graph of it.
template <typename F>
double MedianGraphTime(cudaStream_t stream, F&& enqueue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t instance = nullptr;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  enqueue();
  Check(cudaStreamEndCapture(stream, &graph), "end capture");
  Check(cudaGraphInstantiate(&instance, graph, 0), "instantiate");
  const double time = MedianTime(stream, [&] { Check(cudaGraphLaunch(instance, stream), "launch"); });
  cudaGraphExecDestroy(instance);
  cudaGraphDestroy(graph);
  return time;
}

// Bytes a second, read and written: of the driver's own copy, many times the L2 cache, in the stream itself.
double CopyRate(cudaStream_t stream) {
  constexpr int64_t kBytes = int64_t{2} << 30;
  const DeviceArray<uint8_t> from(kBytes);
  const DeviceArray<uint8_t> to(kBytes);
  Check(cudaDeviceSynchronize(), "fill");
  const double time = MedianTime(
      stream, [&] { Check(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice, stream), "copy"); });
  return 2 * kBytes / (time * 1e-6);
}

struct Layer {
  DeviceArray<__nv_bfloat16> k;
  DeviceArray<__nv_bfloat16> v;
};

void RunCase(const BenchCase& c, const std::vector<Kernel>& kernels, cudaStream_t stream,
             std::vector<Result>& results) {
  const std::vector<int64_t> host_offsets = MakeOffsets(c);
  const int64_t rows = host_offsets.back();
  const int64_t bytes = rows * c.dim * 2 * static_cast<int64_t>(sizeof(__nv_bfloat16));
  const int64_t count = std::clamp<int64_t>((kGraphBytes + bytes - 1) / bytes, 4, kMaxLayers);
  std::vector<Layer> layers;
  for (int64_t i = 0; i < count; ++i)
    layers.push_back({RandomArray(rows * c.dim, static_cast<uint32_t>(2 * i)),
                      RandomArray(rows * c.dim, static_cast<uint32_t>(2 * i + 1))});
  const int64_t query_elements = int64_t{c.sequences} * c.kv_heads * c.group * c.dim;
  const DeviceArray<__nv_bfloat16> q = RandomArray(query_elements, 77);
  const DeviceArray<__nv_bfloat16> out(query_elements);
  const DeviceArray<int64_t> offsets(host_offsets);

  DecodeParams params;
  params.cache.dtype = DType::kBF16;
  params.cache.sequences = c.sequences;
  params.cache.kv_heads = c.kv_heads;
  params.cache.key_dim = c.dim;
  params.cache.value_dim = c.dim;
  for (size_t i = 1; i < host_offsets.size(); ++i)
    params.cache.max_tokens =
        std::max(params.cache.max_tokens, static_cast<int32_t>(host_offsets[i] - host_offsets[i - 1]));
  params.cache.k.token_stride = c.dim;
  params.cache.v.token_stride = c.dim;
  params.cache.offsets = offsets.get();
  params.cache.rows_in_pool = rows;
  params.q = q.get();
  params.out = out.get();
  params.group = c.group;
  params.scale = 0.09F;
  const DeviceArray<uint8_t> workspace(std::vector<uint8_t>(DecodeWorkspaceBytes(params)));
  params.workspace = workspace.get();
  Check(cudaDeviceSynchronize(), "fill");
  for (const Kernel& kernel : kernels) {
    const double time = MedianGraphTime(stream, [&] {
      for (const Layer& layer : layers) {
        params.cache.k.data = layer.k.get();
        params.cache.v.data = layer.v.get();
        Check(kernel.launch(params, stream), kernel.name);
      }
    });
    results.push_back({kernel.name, c, bytes, time / static_cast<double>(count)});
  }
}

void Print(const std::vector<Result>& results, double copy_rate) {
  std::printf("copy rate %.0f GB/s (read and written)\n\n", copy_rate * 1e-9);
  std::printf("%6s %5s %4s %3s %4s %7s %8s %9s %9s %8s %6s\n", "kernel", "batch", "Hkv", "g", "d", "tokens", "lists",
              "MB", "us", "GB/s", "share");
  for (const Result& r : results) {
    const BenchCase& c = r.shape;
    const double rate = static_cast<double>(r.bytes) / (r.microseconds * 1e-6);
    std::printf("%6s %5d %4d %3d %4d %7d %8s %9.1f %9.2f %8.0f %6.3f\n", r.kernel, c.sequences, c.kv_heads, c.group,
                c.dim, c.tokens, c.ragged ? "ragged" : "uniform", static_cast<double>(r.bytes) * 1e-6, r.microseconds,
                rate * 1e-9, rate / copy_rate);
  }
  std::printf(
      "\nkernel,batch,kv_heads,group,dim,tokens,lists,bytes,microseconds,share_of_copy_rate,copy_bytes_per_second\n");
  for (const Result& r : results) {
    const BenchCase& c = r.shape;
    std::printf("%s,%d,%d,%d,%d,%d,%s,%lld,%.3f,%.4f,%.4g\n", r.kernel, c.sequences, c.kv_heads, c.group, c.dim,
                c.tokens, c.ragged ? "ragged" : "uniform", static_cast<long long>(r.bytes), r.microseconds,
                static_cast<double>(r.bytes) / (r.microseconds * 1e-6) / copy_rate, copy_rate);
  }
}

std::vector<Kernel> Kernels() {
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "properties");
  std::vector<Kernel> kernels{{"sm80", LaunchDecodeSm80}};
  if (device.major == 9 && device.minor == 0) kernels.push_back({"sm90", LaunchDecodeSm90});
  return kernels;
}

void RunAll() {
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const double copy_rate = CopyRate(stream);
  const std::vector<Kernel> kernels = Kernels();
  std::vector<Result> results;
  for (const int32_t tokens : {6554, 1638, 64})  // 5% of 128K, of 32K; what a call costs by itself
    for (const int32_t sequences : {8, 1})
      for (const int32_t dim : {128, 64})
        for (const int32_t group : {4, 8})
          for (const bool ragged : {false, true})
            RunCase({sequences, 8, group, dim, tokens, ragged}, kernels, stream, results);
  Print(results, copy_rate);
  Check(cudaStreamDestroy(stream), "stream");
}

}  // namespace
}  // namespace dropkv::cuda

int main() { dropkv::cuda::RunAll(); }
