#include "eval/report/html.h"

#include <fmt/format.h>

#include <set>

#include "eval/report/report.h"

namespace dropkv::eval {
namespace {

// Nothing may be loaded or sent, whatever a name holds.
constexpr const char* kHead =
    R"(<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
)";

// "46.3 [44.0, 48.5] *": the interval is set back, the star hangs out of the column.
std::string CellHtml(const std::string& text) {
  const size_t open = text.find(" [");
  const size_t close = text.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return HtmlEscape(text);
  return HtmlEscape(text.substr(0, open)) + " <small>" + HtmlEscape(text.substr(open + 1, close - open)) + "</small>" +
         (text.ends_with(" *") ? R"( <b class="mark">*</b>)" : HtmlEscape(text.substr(close + 1)));
}

std::string Protocol(const std::vector<RunRecord>& runs) {
  std::string html = "<dl>";
  for (const auto& row : ProtocolTable(runs).rows) {
    const bool code = row.front() == "command" || row.front() == "sha256";
    html += fmt::format("<dt>{}</dt><dd{}>{}</dd>", HtmlEscape(row.front()), code ? R"( class="code")" : "",
                        HtmlEscape(row.back()));
  }
  return html + "</dl>\n";
}

std::string TaskTables(const Slice& slice) {
  if (slice.budgets.empty()) return HtmlTable(TaskTable(slice, "100%"), 4);
  std::string html =
      R"(<div class="choose"><div class="controls">)" + HtmlSelect("Tasks at budget", slice.budgets) + "</div>";
  for (size_t i = 0; i < slice.budgets.size(); ++i)
    html += fmt::format(R"(<div data-key="{}">{}</div>)", i, HtmlTable(TaskTable(slice, slice.budgets[i]), 4));
  return html + "</div>\n";
}

std::string SliceSection(const Slice& slice, const std::string& id, const std::string& against) {
  std::string html = fmt::format("<section id=\"{}\"><h3>{}</h3>\n<p>{}</p>\n", id, HtmlEscape(SliceTitle(slice)),
                                 HtmlEscape(SliceHead(slice)));
  if (const std::string counts = SampleCounts(slice); !counts.empty()) html += "<p>" + HtmlEscape(counts) + "</p>\n";
  html += HtmlChart(slice);
  for (const Table& table : {ScoreTable(slice), CategoryTable(slice), DifferenceToFullTable(slice),
                             DifferenceToAgainstTable(slice, against)})
    html += HtmlTable(table, 4);
  html += TaskTables(slice);
  const Table costs = CostTable(slice);
  return html + HtmlTable(FidelityTable(slice, against), 4) + "<details><summary>" + HtmlEscape(costs.title) +
         "</summary>" + HtmlTable(costs, 4) + "</details></section>\n";
}

std::string ModelSection(const ModelSummary& model, const std::string& id, const std::string& against) {
  std::string html = fmt::format("<section id=\"{}\"><h2>{}</h2>\n", id, HtmlEscape(model.label));
  html += "<details open=\"open\"><summary>Protocol</summary>" + Protocol(model.runs) + "</details>\n";
  std::set<std::pair<std::string, bool>> heat_maps;
  for (const Slice& slice : model.slices) heat_maps.emplace(slice.suite, slice.hidden);
  for (size_t i = 0; i < model.slices.size(); ++i)
    html += SliceSection(model.slices[i], fmt::format("{}-{}", id, i), against);
  for (const auto& [suite, hidden] : heat_maps) html += HtmlHeatMaps(model, suite, hidden);
  return html + HtmlTable(WarningTable(model), 3) + "</section>\n";
}

std::string Contents(const Summary& summary) {
  std::string html = "<nav aria-label=\"Contents\"><ul>\n";
  for (size_t m = 0; m < summary.models.size(); ++m) {
    html += fmt::format("<li><a href=\"#m{}\">{}</a><ul>", m, HtmlEscape(summary.models[m].label));
    for (size_t i = 0; i < summary.models[m].slices.size(); ++i)
      html +=
          fmt::format("<li><a href=\"#m{}-{}\">{}</a></li>", m, i, HtmlEscape(SliceTitle(summary.models[m].slices[i])));
    html += "</ul></li>\n";
  }
  return html + "</ul></nav>\n";
}

}  // namespace

std::string HtmlEscape(std::string_view text) {
  std::string html;
  for (const char c : text) {
    switch (c) {
      case '&':
        html += "&amp;";
        break;
      case '<':
        html += "&lt;";
        break;
      case '>':
        html += "&gt;";
        break;
      case '"':
        html += "&quot;";
        break;
      case '\'':
        html += "&#39;";
        break;
      default:  // control characters are not allowed in a page
        html += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? '?' : c;
    }
  }
  return html;
}

std::string HtmlSelect(std::string_view label, const std::vector<std::string>& options) {
  std::string html = fmt::format("<label>{} <select>", HtmlEscape(label));
  for (size_t i = 0; i < options.size(); ++i)
    html += fmt::format("<option value=\"{}\">{}</option>", i, HtmlEscape(options[i]));
  return html + "</select></label>";
}

std::string HtmlTable(const Table& table, int heading) {
  if (table.rows.empty()) return "";
  const std::string title = HtmlEscape(table.title);
  std::string html = fmt::format(
      "<h{0}>{1}</h{0}>\n<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{1}\"><table><thead><tr>",
      heading, title);
  for (const std::string& name : table.head)
    html += fmt::format("<th scope=\"col\"><button type=\"button\">{}</button></th>", HtmlEscape(name));
  html += "</tr></thead><tbody>\n";
  for (const auto& row : table.rows) {
    html += "<tr>";
    for (size_t i = 0; i < row.size(); ++i)
      html += i == 0 ? "<th scope=\"row\">" + HtmlEscape(row[i]) + "</th>" : "<td>" + CellHtml(row[i]) + "</td>";
    html += "</tr>\n";
  }
  html += "</tbody></table></div>\n";
  if (!table.note.empty()) html += "<p class=\"note\">" + HtmlEscape(table.note) + "</p>\n";
  return html;
}

std::string HtmlReport(const Summary& summary) {
  std::string names;
  for (const ModelSummary& model : summary.models) names += (names.empty() ? "" : ", ") + model.label;
  std::string html = "<!DOCTYPE html>\n<html lang=\"en\"><head>\n";
  html += kHead + fmt::format("<title>dropkv eval: {}</title>\n<style>", HtmlEscape(names)) + HtmlStyle() +
          "</style></head>\n<body>\n<h1>Evaluation of KV-cache eviction</h1>\n";
  html += fmt::format(
      "<p>Scores are the mean of the tasks' means, 0 to 100. Intervals are 95%, from {} resamples of the samples "
      "within "
      "each task; differences are paired.</p>\n",
      kResamples);
  html += Contents(summary);
  for (size_t i = 0; i < summary.models.size(); ++i)
    html += ModelSection(summary.models[i], fmt::format("m{}", i), summary.against);
  for (const std::string& remark : summary.remarks) html += "<p class=\"note\">" + HtmlEscape(remark) + "</p>\n";
  return html + "<script>" + HtmlScript() + "</script>\n</body></html>\n";
}

}  // namespace dropkv::eval
