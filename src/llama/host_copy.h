// Host memory with the bytes of a layer's keys and values, where the cache itself lies on a device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

struct ggml_tensor;

namespace dropkv::llama {

// Laid out like the cache. Cells are copied when they are asked for, once after each time they were written.
class HostCopy {
 public:
  struct Roots {
    ggml_tensor* k = nullptr;
    ggml_tensor* v = nullptr;
    bool v_transposed = false;  // element (row, cell) at row * cells + cell
  };

  // The cells were, or are about to be, written on the device.
  void Forget(std::span<const int32_t> cells);

  // Brings the cells that are not here yet. Not before the device is done with writing them.
  void Read(const Roots& roots, std::span<const int32_t> cells);

  // Takes the cells' bytes to the device.
  void Write(const Roots& roots, std::span<const int32_t> cells) const;

  void* k() const { return k_.get(); }
  void* v() const { return v_.get(); }

 private:
  std::unique_ptr<unsigned char[]> k_;
  std::unique_ptr<unsigned char[]> v_;
  std::vector<char> here_;  // by cell
};

}  // namespace dropkv::llama
