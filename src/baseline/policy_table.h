// The table of policies as text, made from the recipes themselves.
#pragma once

#include <span>
#include <string>

#include "baseline/recipe.h"

namespace dropkv::baseline {

// The cells of one policy's row.
struct PolicyRow {
  std::string name;
  std::string signal;
  std::string needs;         // "window q, k, v"
  std::string window;        // the rows that judge: "64", "8 + 4" with those of generated tokens, or "-"
  std::string pooling;       // "mean 5 of the past", or "-"
  std::string is_protected;  // "first 4, last 64", or "-"
  std::string allocator;     // of heads, then of layers: "ada 0.2, pyramid"
  std::string cost;          // multiply-adds per query head, to the order of magnitude
  std::string source;
};

PolicyRow RowOf(const Recipe& recipe);

// For a terminal: the settings in columns, then formula, cost and source on two lines of their own.
std::string PolicyTableText(std::span<const Recipe> recipes);

// One table in Markdown, without any text around it.
std::string PolicyTableMarkdown(std::span<const Recipe> recipes);

// All of docs/policies.md: how names are made, which presets differ and why, and the table of all presets.
std::string PolicyDocument();

}  // namespace dropkv::baseline
