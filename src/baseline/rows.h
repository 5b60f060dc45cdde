// Which rows judge the prompt's tokens: those of its window, and those of tokens generated behind it
// (docs/algorithm.md, "Observation rows").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "dropkv/policy.h"
#include "dropkv/status.h"

namespace dropkv::baseline {

// Most rows of generated tokens.
inline constexpr int32_t kMaxGeneratedRows = 64;

// Most drafts, each from a cache that the one before it has cut.
inline constexpr int32_t kMaxDraftRounds = 4;

// At most one of delay, draft and oracle is above 0.
struct RowSources {
  bool window = true;  // the prompt's last policy.window rows; false: the generated rows judge alone
  int32_t delay = 0;   // the answer's first tokens, decoded from the full cache before it is cut
  int32_t draft = 0;   // tokens decoded from a cache cut by the window's rows, and thrown away again
  Budget draft_budget = Budget::Fraction(0.1);  // kept for the draft; Budget{}: what the run itself keeps
  int32_t draft_window = 0;                     // rows that cut for the draft; 0: policy.window
  int32_t draft_rounds = 1;                     // a further draft comes from a cache cut by the one before it
  int32_t oracle = 0;  // the first tokens of the full cache's own answer: nothing that a run could know

  // Rows of generated tokens that are asked for; an answer may end before.
  int32_t generated() const { return delay + draft + oracle; }

  bool operator==(const RowSources&) const = default;
};

// What the draft keeps in a run that keeps `run`.
Budget DraftBudget(const RowSources& rows, const Budget& run);

// What a text says.
struct RowsSetting {
  RowSources sources;
  int32_t window = 0;  // policy.window; 0: not named
};

// Reads sources joined with '+', each at most once: "window:W" (1 to 128), "delay:M", "draft:M", "oracle:M" (1 to 64).
// Behind the draft's M, each at most once: "@10%" or "@256", what it keeps per KV head, or "@same", what the run keeps;
// "@wN", the rows that cut for it; "@xN", so many rounds (1 to 4). Without a window the generated rows judge alone.
Result<RowsSetting> ParseRows(std::string_view text);

// The text that ParseRows reads so: "window:8", "window:8+draft:8@10%", "delay:8". window: policy.window.
std::string RowsText(const RowSources& rows, int32_t window);

// Ranges, what cannot be combined, settings of a draft that there is not. window: policy.window.
Status CheckSources(const RowSources& rows, int32_t window);

}  // namespace dropkv::baseline
