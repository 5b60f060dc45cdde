// The next token from logits: greedy at temperature 0, else from the softmax, seeded. libllama's own sampler chain.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "llama/model.h"

struct llama_sampler;

namespace dropkv::llama {

class Sampler {
 public:
  Sampler(float temperature, uint32_t seed);
  Sampler(Sampler&&) noexcept;
  ~Sampler();

  Token Next(std::span<const float> logits);

 private:
  struct Deleter {
    void operator()(llama_sampler* sampler) const;
  };
  std::unique_ptr<llama_sampler, Deleter> chain_;
};

}  // namespace dropkv::llama
