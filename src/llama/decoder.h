// Continuing a sequence after the prefill: over the full cache, or over a compacted one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "dropkv/keep_list.h"
#include "llama/context.h"

namespace dropkv {
class ThreadPool;
}

namespace dropkv::llama {

struct Prefilled;

class Decoder {
 public:
  virtual ~Decoder() = default;

  // Decodes tokens at positions position, position + 1, ...; the logits of the last one are kept.
  virtual Status Feed(std::span<const Token> tokens, int32_t position) = 0;
  virtual std::span<const float> logits() const = 0;

  // Forgets every token fed so far, so that another text can follow the prefill.
  virtual Status Rewind() = 0;

  virtual std::string_view name() const = 0;  // "full", "native", "ragged stop", "ragged replace"
};

// Removes what lies behind the prompt and the tokens generated for their queries from the full cache.
Status ForgetBehind(Prefilled* prefilled);

// Over the prefill's own context, which must outlive it.
Result<std::unique_ptr<Decoder>> MakeFullDecoder(Prefilled* prefilled);

// The kept rows of every head are gathered into a context sized for kept + reserve tokens, where llama.cpp's own
// attention goes on. `keep` must hold the same number of tokens for every layer and head. Does not need `prefilled`
// afterwards.
Result<std::unique_ptr<Decoder>> MakeNativeDecoder(Prefilled* prefilled, const KeepList& keep, int32_t reserve);

// The kept rows go into ragged caches of our own, and a small context's attention is taken over. Any keep list.
Result<std::unique_ptr<Decoder>> MakeRaggedDecoder(Prefilled* prefilled, const KeepList& keep, int32_t reserve);

// The native one where the list allows it, else the ragged one.
Result<std::unique_ptr<Decoder>> MakeCompactedDecoder(Prefilled* prefilled, const KeepList& keep, int32_t reserve);

}  // namespace dropkv::llama
