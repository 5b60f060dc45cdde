#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "eval/report/html.h"

namespace dropkv::eval {
namespace {

using Columns = std::vector<const Slice*>;  // one a length

std::string HeatCell(const TaskScore& score) {
  if (score.samples == 0) return R"(<td class="h none">-</td>)";
  const int shade = std::clamp(static_cast<int>(std::lround(score.score / 10)), 0, 10);
  return fmt::format(R"(<td class="h h{}" title="{} sample{}">{:.0f}</td>)", shade, score.samples,
                     score.samples == 1 ? "" : "s", score.score);
}

bool HasNeedles(const Cell* cell) {
  return cell != nullptr && std::ranges::any_of(cell->depths, [](const TaskScore& score) { return score.samples > 0; });
}

// cells: one a column; null where that was not measured.
std::string HeatTable(const std::string& caption, const Columns& columns, const std::vector<const Cell*>& cells) {
  std::string html = fmt::format(R"(<table class="heat"><caption>{}</caption><thead><tr><th scope="col">depth</th>)",
                                 HtmlEscape(caption));
  for (const Slice* slice : columns)
    html += fmt::format(R"(<th scope="col">{}</th>)", slice->length > 0 ? std::to_string(slice->length) : "as it is");
  html += "</tr></thead><tbody>";
  constexpr int kStep = 100 / kDepthBuckets;
  for (int bucket = 0; bucket < kDepthBuckets; ++bucket) {
    html += fmt::format(R"(<tr><th scope="row">{}-{}%</th>)", bucket * kStep, (bucket + 1) * kStep);
    for (const Cell* cell : cells)
      html += HeatCell(cell == nullptr ? TaskScore() : cell->depths[static_cast<size_t>(bucket)]);
    html += "</tr>";
  }
  return html + "</tbody></table>\n";
}

std::string ColourScale() {
  std::string html = R"(<p class="scale">0)";
  for (int shade = 0; shade <= 10; ++shade) html += fmt::format(R"(<i class="h{}"></i>)", shade);
  return html + "100</p>";
}

// The names of all columns, in the order of the first one that has them.
std::vector<std::string> Union(const Columns& columns, const std::vector<std::string> Slice::*names) {
  std::vector<std::string> all;
  for (const Slice* slice : columns)
    for (const std::string& name : slice->*names)
      if (std::ranges::find(all, name) == all.end()) all.push_back(name);
  return all;
}

std::string Panels(const Columns& columns, const std::vector<std::string>& settings,
                   const std::vector<std::string>& budgets) {
  std::string html;
  for (size_t s = 0; s < settings.size(); ++s)
    for (size_t b = 0; b < budgets.size(); ++b) {
      std::vector<const Cell*> cells;
      for (const Slice* slice : columns) cells.push_back(slice->Find(settings[s], budgets[b]));
      if (std::ranges::none_of(cells, HasNeedles)) continue;
      html += fmt::format(
          R"(<div class="scroll" tabindex="0" role="group" aria-label="Heat map" data-key="{}-{}">{}</div>)", s, b,
          HeatTable(settings[s] + " at " + budgets[b], columns, cells));
    }
  return html;
}

}  // namespace

std::string HtmlHeatMaps(const ModelSummary& model, std::string_view suite, bool hidden) {
  Columns columns;
  std::vector<const Cell*> full;
  for (const Slice& slice : model.slices) {
    if (slice.suite != suite || slice.hidden != hidden) continue;
    columns.push_back(&slice);
    full.push_back(slice.full ? &*slice.full : nullptr);
  }
  const std::vector<std::string> settings = Union(columns, &Slice::settings);
  const std::vector<std::string> budgets = Union(columns, &Slice::budgets);
  const std::string panels = Panels(columns, settings, budgets);
  const bool full_has_needles = std::ranges::any_of(full, HasNeedles);
  if (panels.empty() && !full_has_needles) return "";
  std::string html =
      fmt::format("<h3>{}, question {}: where the needle is</h3>\n", HtmlEscape(suite), hidden ? "hidden" : "seen");
  html += R"(<p class="note">Mean score of the samples with a single needle, by length in tokens and by the needle's )"
          "depth in the haystack.</p>" +
          ColourScale() + R"(<div class="choose">)";
  if (!panels.empty())
    html += fmt::format(R"(<div class="controls">{}{}</div>)", HtmlSelect("Setting", settings),
                        HtmlSelect("Budget", budgets));
  html += R"(<div class="pair">)";
  if (full_has_needles)
    html += R"(<div class="scroll" tabindex="0" role="group" aria-label="Heat map">)" +
            HeatTable("full cache", columns, full) + "</div>";
  return html + panels + R"(<p data-none="" hidden="hidden">Not measured.</p></div></div>)" + "\n";
}

}  // namespace dropkv::eval
