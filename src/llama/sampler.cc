#include "llama/sampler.h"

#include <llama.h>

namespace dropkv::llama {

void Sampler::Deleter::operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }

Sampler::Sampler(float temperature, uint32_t seed)
    : chain_(llama_sampler_chain_init(llama_sampler_chain_default_params())) {
  if (temperature <= 0) {
    llama_sampler_chain_add(chain_.get(), llama_sampler_init_greedy());
    return;
  }
  llama_sampler_chain_add(chain_.get(), llama_sampler_init_temp(temperature));
  llama_sampler_chain_add(chain_.get(), llama_sampler_init_dist(seed));
}

Sampler::Sampler(Sampler&&) noexcept = default;
Sampler::~Sampler() = default;

Token Sampler::Next(std::span<const float> logits) {
  std::vector<llama_token_data> candidates(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) candidates[i] = {static_cast<llama_token>(i), logits[i], 0.0F};
  llama_token_data_array array{candidates.data(), candidates.size(), -1, false};
  llama_sampler_apply(chain_.get(), &array);
  const Token token = array.data[array.selected].id;
  llama_sampler_accept(chain_.get(), token);
  return token;
}

}  // namespace dropkv::llama
