#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "eval/report/html.h"

namespace dropkv::eval {
namespace {

constexpr double kWidth = 760;
constexpr double kHeight = 396;
constexpr double kLeft = 48;
constexpr double kRight = 12;
constexpr double kTop = 30;
constexpr double kBottom = 52;
constexpr size_t kColours = 8;
constexpr double kBandShare = 0.76;  // of a budget's width in which its settings stand side by side

struct Scale {
  double low = 0;
  double high = 100;
  double step = 20;

  double Y(double score) const { return kTop + (kHeight - kTop - kBottom) * (high - score) / (high - low); }
};

Scale MakeScale(const Slice& slice) {
  double low = 100;
  double high = 0;
  const auto add = [&](const Estimate& score) {
    low = std::min(low, score.interval ? score.interval->low : score.value);
    high = std::max(high, score.interval ? score.interval->high : score.value);
  };
  if (slice.full) add(slice.full->score);
  for (const Cell& cell : slice.cells) add(cell.score);
  Scale scale;
  scale.step = high - low > 50 ? 20 : high - low > 25 ? 10 : 5;
  scale.low = std::max(0.0, std::floor(low / scale.step) * scale.step);
  scale.high = std::min(100.0, std::ceil(high / scale.step) * scale.step);
  if (scale.high <= scale.low) (scale.low > 0 ? scale.low : scale.high) += (scale.low > 0 ? -1 : 1) * scale.step;
  return scale;
}

// One shape a setting, so that colour is never the only difference.
std::string Marker(size_t series, double x, double y) {
  switch (series % kColours) {
    case 0:
      return fmt::format(R"(<circle cx="{:.1f}" cy="{:.1f}" r="5"/>)", x, y);
    case 1:
      return fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="9" height="9"/>)", x - 4.5, y - 4.5);
    case 2:
      return fmt::format(R"(<path d="M{:.1f} {:.1f}l6 10.5h-12z"/>)", x, y - 6.5);
    case 3:
      return fmt::format(R"(<path d="M{:.1f} {:.1f}l6 6.5l-6 6.5l-6 -6.5z"/>)", x, y - 6.5);
    case 4:
      return fmt::format(R"(<path d="M{:.1f} {:.1f}l6 -10.5h-12z"/>)", x, y + 6.5);
    case 5:
      return fmt::format(R"(<circle class="hollow" cx="{:.1f}" cy="{:.1f}" r="4.5"/>)", x, y);
    case 6:
      return fmt::format(R"(<path class="stroke" d="M{:.1f} {:.1f}l9 9m0 -9l-9 9"/>)", x - 4.5, y - 4.5);
    default:
      return fmt::format(R"(<rect class="hollow" x="{:.1f}" y="{:.1f}" width="8.5" height="8.5"/>)", x - 4.25,
                         y - 4.25);
  }
}

// Where a setting stands within the width of a budget.
double X(const Slice& slice, size_t series, size_t budget) {
  const double band = (kWidth - kLeft - kRight) / static_cast<double>(slice.budgets.size());
  const double inside = (static_cast<double>(series) + 0.5) / static_cast<double>(slice.settings.size());
  return kLeft + band * (static_cast<double>(budget) + 0.5 + kBandShare * (inside - 0.5));
}

std::string Axes(const Slice& slice, const Scale& scale) {
  std::string svg = R"(<text x="0" y="13">score</text>)";
  for (double tick = scale.low; tick <= scale.high + 1e-9; tick += scale.step)
    svg += fmt::format(
        R"(<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/><text x="{3}" y="{4:.1f}" text-anchor="end">{5:.0f}</text>)",
        kLeft, kWidth - kRight, scale.Y(tick), kLeft - 8, scale.Y(tick) + 4.5, tick);
  const double band = (kWidth - kLeft - kRight) / static_cast<double>(slice.budgets.size());
  for (size_t i = 0; i < slice.budgets.size(); ++i) {
    const double x = kLeft + band * static_cast<double>(i);
    if (i > 0)
      svg += fmt::format(R"(<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>)", x, kTop,
                         kHeight - kBottom + 6);
    svg += fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>)", x + band / 2, kHeight - 30,
                       HtmlEscape(slice.budgets[i]));
  }
  return svg + fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="middle">kept</text>)", (kLeft + kWidth - kRight) / 2,
                           kHeight - 8);
}

std::string FullLine(const Estimate& score, const Scale& scale) {
  std::string svg = "<g>";
  if (score.interval)
    svg += fmt::format(R"(<rect class="band" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>)", kLeft,
                       scale.Y(score.interval->high), kWidth - kLeft - kRight,
                       scale.Y(score.interval->low) - scale.Y(score.interval->high));
  const double y = scale.Y(score.value);
  // Below the line where there is no room above it.
  const double text_y = y - kTop > 20 ? y - 6 : y + 17;
  return svg + fmt::format(R"(<line class="full" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>)"
                           R"(<text x="{3}" y="{4:.1f}">full cache</text><title>full cache: {5}, n = {6}</title></g>)",
                           kLeft, kWidth - kRight, y, kLeft + 6, text_y, EstimateText(score), score.samples);
}

std::string Series(const Slice& slice, const Scale& scale, size_t series) {
  const std::string& setting = slice.settings[series];
  std::string join;
  std::string points;
  for (size_t i = 0; i < slice.budgets.size(); ++i) {
    const Cell* cell = slice.Find(setting, slice.budgets[i]);
    if (cell == nullptr) continue;
    const double x = X(slice, series, i);
    const double y = scale.Y(cell->score.value);
    join += fmt::format("{}{:.1f} {:.1f}", join.empty() ? "M" : "L", x, y);
    points += fmt::format("<g><title>{} at {}: {}, n = {}</title>", HtmlEscape(setting), HtmlEscape(slice.budgets[i]),
                          EstimateText(cell->score), cell->score.samples);
    if (cell->score.interval)
      points += fmt::format(R"(<line x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>)", x,
                            scale.Y(cell->score.interval->low), scale.Y(cell->score.interval->high));
    points += Marker(series, x, y) + "</g>";
  }
  const char* dash = series < kColours ? "" : R"( stroke-dasharray="5 4")";  // the colours begin again
  return fmt::format(R"(<g class="series c{}" data-series="{}"><path class="join"{} d="{}"/>{}</g>)", series % kColours,
                     series, dash, join, points);
}

std::string Legend(const Slice& slice) {
  std::string html = R"(<ul class="legend">)";
  for (size_t i = 0; i < slice.settings.size(); ++i) {
    const char* dash = i < kColours ? "" : R"( stroke-dasharray="3 3")";
    html += fmt::format(R"(<li><button type="button" aria-pressed="false" data-series="{0}">)"
                        R"(<svg viewBox="0 0 20 20" aria-hidden="true"><g class="series c{1}">)"
                        R"(<path class="join"{2} d="M0 10L20 10"/>{3}</g></svg>{4}</button></li>)",
                        i, i % kColours, dash, Marker(i, 10, 10), HtmlEscape(slice.settings[i]));
  }
  return html + "</ul>";
}

}  // namespace

std::string HtmlChart(const Slice& slice) {
  if (slice.cells.empty()) return "";
  const Scale scale = MakeScale(slice);
  std::string svg = fmt::format(R"(<svg viewBox="0 0 {} {}" role="img" aria-label="Score over the share kept: {}">)",
                                kWidth, kHeight, HtmlEscape(SliceTitle(slice)));
  svg += Axes(slice, scale);
  if (slice.full) svg += FullLine(slice.full->score, scale);
  for (size_t i = 0; i < slice.settings.size(); ++i) svg += Series(slice, scale, i);
  const std::string caption = fmt::format(
      "Score (mean of tasks{}) over what was kept; bars: 95% intervals{}. Within a budget the settings stand "
      "side by side, in the legend's order. A click on a name brings it out.",
      scale.low > 0 ? fmt::format(", axis from {:.0f}", scale.low) : "", slice.full ? "; dashed: full cache" : "");
  return fmt::format(
      R"(<figure class="chart"><div class="scroll" tabindex="0" role="group" aria-label="Chart">{}</svg>)"
      "</div>{}<figcaption>{}</figcaption></figure>\n",
      svg, Legend(slice), caption);
}

}  // namespace dropkv::eval
