// What the settings of a sample draft before they evict: decoded once for all that draft alike, all of them together.
#pragma once

#include <span>
#include <vector>

#include "dropkv/engine.h"
#include "dropkv/keep_list.h"
#include "dropkv/status.h"
#include "eval/runner/grid.h"
#include "llama/prefill.h"

namespace dropkv::eval {

class Drafts {
 public:
  // Decodes what `jobs` draft, at most `batch` caches at a time (1: by decoders of their own). Settings that cut alike
  // to the same budget share a draft, the shorter one is the longer one's beginning; those of several rounds share it
  // where they agree in all they score by.
  Status Make(llama::Prefilled* prefilled, Engine* engine, std::span<const Job* const> jobs, int32_t batch);

  // The tokens that a job asks, at most as many as its setting says; empty where it drafts none.
  std::span<const llama::Token> Of(const Job& job) const;
  // The time that they took, of which the part in a batch is shared evenly. Scores that drafts share count for each.
  double Seconds(const Job& job) const;

 private:
  struct Draft {
    baseline::Recipe recipe;  // of the first setting that drafts so
    Budget budget;
    int32_t most = 0;  // tokens
    KeepList keep;
    std::vector<llama::Token> tokens;
    bool ended = false;
    double seconds = 0;
  };

  size_t Find(const Job& job) const;  // drafts_.size(): not there
  static Status CutFirst(llama::Prefilled* prefilled, Engine* engine, std::span<Draft* const> drafts);
  static Status CutAgain(llama::Prefilled* prefilled, Engine* engine, std::span<Draft* const> drafts);
  static Status DecodeTogether(llama::Prefilled* prefilled, std::span<Draft* const> drafts);
  static Status DecodeAlone(llama::Prefilled* prefilled, Draft* draft);

  std::vector<Draft> drafts_;
};

}  // namespace dropkv::eval
