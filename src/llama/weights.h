// The output projections W_O of a model, read from its GGUF file: rows are dequantised when they are asked for, so that
// a quantised matrix is never expanded whole.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "baseline/input.h"
#include "dropkv/status.h"

namespace dropkv::llama {

class OutputWeights {
 public:
  // Reads the file's directory and maps the file; of the weights nothing is read yet. Errors: kIo.
  static Result<OutputWeights> Open(const std::string& path);

  // y = W_O x of a layer, x [columns] the attention outputs of all query heads. The projection keeps the file mapped
  // and may outlive this object. Errors (kUnsupported), by the tensor's name: not in this file (the model may be split
  // over several), another number of columns, a type that ggml does not dequantise.
  Result<baseline::OutputProjection> Layer(int32_t layer, int32_t columns) const;

 private:
  class Mapping;
  struct Place {
    int type = 0;  // ggml_type
    int64_t columns = 0;
    int64_t rows = 0;
    size_t offset = 0;  // in the file
  };
  OutputWeights() = default;

  std::shared_ptr<const Mapping> file_;
  std::map<std::string, Place> places_;  // of all tensors
  int32_t parts_ = 1;                    // files that the model is split over
};

}  // namespace dropkv::llama
