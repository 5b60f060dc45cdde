#include "llama/weights.h"

#include <fcntl.h>
#include <ggml.h>
#include <gguf.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

namespace dropkv::llama {

// A whole file, read-only.
class OutputWeights::Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    struct stat status {};
    if (::fstat(file, &status) == 0 && status.st_size > 0) {
      void* data = ::mmap(nullptr, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
      if (data != MAP_FAILED) {
        data_ = static_cast<const char*>(data);
        size_ = status.st_size;
      }
    }
    ::close(file);
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

Result<OutputWeights> OutputWeights::Open(const std::string& path) {
  OutputWeights weights;
  weights.file_ = std::make_shared<const Mapping>(path);
  ggml_context* described = nullptr;
  const std::unique_ptr<gguf_context, void (*)(gguf_context*)> file(
      gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = &described}), gguf_free);
  const std::unique_ptr<ggml_context, void (*)(ggml_context*)> tensors(described, ggml_free);
  if (file == nullptr || weights.file_->data() == nullptr)
    return Status(Code::kIo, "--model: cannot read the weights of " + path);
  for (int64_t i = 0; i < gguf_get_n_tensors(file.get()); ++i) {
    const char* name = gguf_get_tensor_name(file.get(), i);
    const ggml_tensor* tensor = ggml_get_tensor(tensors.get(), name);
    const size_t offset = gguf_get_data_offset(file.get()) + gguf_get_tensor_offset(file.get(), i);
    if (offset + ggml_nbytes(tensor) > weights.file_->size())
      return Status(Code::kIo, "--model: tensor '" + std::string(name) + "' reaches beyond the end of " + path);
    weights.places_[name] = {tensor->type, tensor->ne[0], tensor->ne[1], offset};
  }
  const int64_t split = gguf_find_key(file.get(), "split.count");
  if (split >= 0 && gguf_get_kv_type(file.get(), split) == GGUF_TYPE_UINT16)
    weights.parts_ = gguf_get_val_u16(file.get(), split);
  return weights;
}

Result<baseline::OutputProjection> OutputWeights::Layer(int32_t layer, int32_t columns) const {
  const std::string prefix = "blk." + std::to_string(layer) + ".attn_output.";
  const std::string name = prefix + "weight";
  const auto found = places_.find(name);
  if (found == places_.end())
    return Unsupported("the model file has no tensor '" + name + "'" +
                       (parts_ > 1 ? ", it is one of " + std::to_string(parts_) +
                                         " parts: a model in one file is needed (llama-gguf-split --merge)"
                                   : ""));
  if (places_.contains(prefix + "scale"))
    return Unsupported("tensor '" + name + "' goes with a scale of its own ('" + prefix + "scale')");
  const Place& place = found->second;
  if (place.columns != columns)
    return Unsupported("tensor '" + name + "': expected " + std::to_string(columns) + " columns, got " +
                       std::to_string(place.columns));
  const auto type = static_cast<ggml_type>(place.type);
  const ggml_to_float_t to_float = ggml_get_type_traits(type)->to_float;
  if (to_float == nullptr && type != GGML_TYPE_F32)
    return Unsupported("tensor '" + name + "': ggml does not dequantise its type " + ggml_type_name(type));
  const size_t row_bytes = ggml_row_size(type, columns);
  baseline::OutputProjection projection;
  projection.hidden = static_cast<int32_t>(place.rows);
  projection.columns = columns;
  projection.read_row = [file = file_, offset = place.offset, row_bytes, columns, to_float](int32_t row, float* out) {
    const char* source = file->data() + offset + row * row_bytes;
    if (to_float == nullptr)
      std::memcpy(out, source, row_bytes);
    else
      to_float(source, out, columns);
  };
  return projection;
}

}  // namespace dropkv::llama
