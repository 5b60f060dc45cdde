#include "cli/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <span>

namespace dropkv::cli {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

using baseline::LayerRule;
using baseline::Recipe;
using baseline::Scorer;

bool IsFull(const RunRecord& run) { return run.policy.scorer == Scorer::kFull; }

bool IsPooled(const Policy& policy) { return policy.pool.before + policy.pool.after > 0; }

// Scores that read queries say how they are pooled, even if not at all.
std::string Pool(const Recipe& recipe) {
  const bool read = baseline::NeedsOf(recipe).window_queries || IsPooled(recipe.policy);
  return read ? PoolingText(recipe.policy.pool) : "none";
}

std::string LayerRuleName(const Recipe& recipe) {
  switch (recipe.layers) {
    case LayerRule::kPyramid:
    case LayerRule::kPyramidOriginal:
      return "pyramid";
    case LayerRule::kCake:
      return "cake";
    case LayerRule::kFlat:
      return "flat";
    case LayerRule::kSame:
      break;
  }
  return "same";
}

std::string HeadsName(const Recipe& recipe) {
  return recipe.flat_heads ? "flat" : std::string(HeadRuleName(recipe.policy.heads));
}

std::string FirstAnswer(const RunRecord& run) { return run.turns.empty() ? "" : run.turns.front().answer.text; }

std::string Settings(const Recipe& recipe) {
  const Policy& policy = recipe.policy;
  std::string text = policy.window > 0 ? fmt::format("w {}, ", policy.window) : "";
  if (baseline::NeedsOf(recipe).window_queries || IsPooled(policy)) text += "pool " + PoolingText(policy.pool) + ", ";
  if (policy.sink > 0) text += fmt::format("sink {}, ", policy.sink);
  if (recipe.rows.generated() > 0) text += "rows " + baseline::RowsText(recipe.rows, policy.window) + ", ";
  if (recipe.recent > 0) text += fmt::format("recent {}, ", recipe.recent);
  if (recipe.recent_share > 0) text += fmt::format("recent {:g}%, ", 100 * recipe.recent_share);
  if (recipe.chunk > 0) text += fmt::format("chunks of {}, ", recipe.chunk);
  text += HeadsName(recipe);
  if (recipe.layers != LayerRule::kSame) text += ", layers " + LayerRuleName(recipe);
  return text;
}

// Pads to `width` characters; UTF-8 does not occur in these cells.
std::string Row(const std::vector<std::string>& cells, const std::vector<size_t>& widths) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i)
    line += i == 0 ? fmt::format("{:<{}}", cells[i], widths[i]) : fmt::format("  {:>{}}", cells[i], widths[i]);
  line.resize(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::vector<std::string> Cells(const RunSummary& summary, const RunRecord& run) {
  const double speed = TokensPerSecond(run);
  return {run.policy.name(),
          run.budget,
          fmt::format("{} / {:.0f} / {}", run.kept_min, run.kept_mean, run.kept_max),
          fmt::format("{:.1f} -> {:.1f}", run.kv_bytes_before / kMiB, run.kv_bytes_after / kMiB),
          IsFull(run) ? "-" : fmt::format("{:.1f}", run.score_s * 1e3),
          IsFull(run) ? "-" : fmt::format("{:.2f}%", 100 * run.score_s / summary.prefill_s),
          IsFull(run) ? "-" : fmt::format("{:.1f}", run.compact_s * 1e3),
          speed > 0 ? fmt::format("{:.1f}", speed) : "-",
          fmt::format("{:.4f}", run.output_error),
          run.decode,
          run.verdict};
}

std::string ResidentText(const RunRecord& run) {
  const double evicted = static_cast<double>(run.kv_bytes_before - run.kv_bytes_after);
  const double fell = static_cast<double>(run.resident_before - run.resident_after);
  std::string text = fmt::format("  resident set {:.1f} -> {:.1f} MiB: fell by {:.1f} MiB", run.resident_before / kMiB,
                                 run.resident_after / kMiB, fell / kMiB);
  // Of a small cache the share says nothing: the contexts' own buffers weigh more.
  if (evicted >= 4 * kMiB)
    text += fmt::format(", {:.0f}% of the {:.1f} MiB evicted", 100 * fell / evicted, evicted / kMiB);
  return text + "\n";
}

// Settings and remarks of one policy's runs: "snapkv 5%, 10%: w 8, ...".
std::string PolicyText(const RunSummary& summary, std::span<const RunRecord> runs) {
  std::string budgets;
  for (const RunRecord& run : runs) budgets += (budgets.empty() ? "" : ", ") + run.budget;
  std::string text = fmt::format("{} {}: {}\n", runs.front().policy.name(), budgets, Settings(runs.front().policy));
  for (const RunRecord& run : runs) {
    const std::string which = runs.size() == 1 ? "" : " at " + run.budget;
    for (const std::string& remark : Remarks(summary, run)) text += fmt::format("  note{}: {}\n", which, remark);
    if (run.resident_before > 0) text += ResidentText(run);
  }
  return text;
}

nlohmann::json RowsJson(const Recipe& recipe) {
  if (!baseline::NeedsOf(recipe).window_queries) return nullptr;
  return baseline::RowsText(recipe.rows, recipe.policy.window);
}

nlohmann::json TurnsJson(const RunRecord& run) {
  nlohmann::json turns = nlohmann::json::array();
  for (const Turn& turn : run.turns)
    turns.push_back({{"question", turn.question},
                     {"tokens", turn.answer.tokens},
                     {"text", turn.answer.text},
                     {"ended", turn.answer.ended}});
  return turns;
}

nlohmann::json RunJson(const RunSummary& summary, const RunRecord& run) {
  nlohmann::json json = {
      {"policy", run.policy.name()},
      {"budget", run.budget},
      {"window", run.policy.policy.window},
      {"rows", RowsJson(run.policy)},
      {"judged_by_generated", run.judged_by},
      {"pool", Pool(run.policy)},
      {"sink", run.policy.policy.sink},
      {"heads", HeadsName(run.policy)},
      {"layers", LayerRuleName(run.policy)},
      {"decode", run.decode},
      {"kept_tokens", {{"min", run.kept_min}, {"mean", run.kept_mean}, {"max", run.kept_max}}},
      {"kv_bytes_before", run.kv_bytes_before},
      {"kv_bytes_after", run.kv_bytes_after},
      {"prefill_s", summary.prefill_s},
      {"score_s", run.score_s},
      {"certificate_s", run.evict.certificate_s},
      {"compact_s", run.compact_s},
      {"decode_tokens_per_s", TokensPerSecond(run)},
      {"output_error", run.output_error},
      {"evicted_mass", run.evicted_mass},
      {"certificate_rows", run.certificate_rows},
      {"nonfinite_tokens", run.evict.nonfinite_tokens},
      {"dominant_tokens", run.evict.dominant_tokens},
      {"skipped_rows", run.evict.skipped_rows},
      {"kernel", run.evict.kernel},
      {"remarks", Remarks(summary, run)},
      {"tokens", run.turns.empty() ? std::vector<llama::Token>() : run.turns.front().answer.tokens},
      {"text", FirstAnswer(run)},
      {"turns", TurnsJson(run)},
  };
  if (IsFull(run)) {
    for (const char* name : {"window", "rows", "pool", "sink", "heads", "layers"}) json[name] = nullptr;
  }
  if (run.policy.rows.draft > 0)
    json["draft"] = {{"tokens", run.draft.tokens}, {"seconds", run.draft.seconds}, {"kv_bytes", run.draft.kv_bytes}};
  if (!run.verdict.empty()) json["verdict"] = run.verdict;
  if (run.resident_before > 0) {
    json["resident_bytes_before"] = run.resident_before;
    json["resident_bytes_after"] = run.resident_after;
  }
  return json;
}

}  // namespace

std::string Judge(std::string_view answer, std::string_view expected) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  const auto found = std::search(answer.begin(), answer.end(), expected.begin(), expected.end(), same);
  return found != answer.end() ? "right" : "WRONG";
}

double TokensPerSecond(const RunRecord& run) {
  double seconds = 0;
  int64_t steps = 0;
  for (const Turn& turn : run.turns) {
    seconds += turn.answer.seconds;
    steps += turn.answer.steps;
  }
  return seconds > 0 ? static_cast<double>(steps) / seconds : 0;
}

std::vector<std::string> Remarks(const RunSummary& summary, const RunRecord& run) {
  std::vector<std::string> remarks;
  if (IsFull(run)) return remarks;
  const Policy& policy = run.policy.policy;
  const bool evicted = run.kv_bytes_after < run.kv_bytes_before;
  if (summary.layers == summary.sliding_layers)
    remarks.push_back("nothing evicted: the prompt lies inside the model's sliding window");
  else if (!evicted && summary.prompt_tokens <= policy.window)
    remarks.push_back(fmt::format("nothing evicted: the prompt of {} tokens is not longer than the window of {}",
                                  summary.prompt_tokens, policy.window));
  else if (run.policy.rows.delay > 0 && run.judged_by == 0)
    remarks.push_back(
        fmt::format("nothing evicted yet: the answer ended within the delay of {} tokens", run.policy.rows.delay));
  else if (!evicted)
    remarks.push_back("nothing evicted: the budget keeps every token");
  if (run.draft.seconds > 0)
    remarks.push_back(fmt::format("{} token{} drafted in {:.0f} ms from a cache of {:.1f} MiB beside the full one",
                                  run.draft.tokens.size(), run.draft.tokens.size() == 1 ? "" : "s",
                                  run.draft.seconds * 1e3, run.draft.kv_bytes / kMiB));
  if (run.evict.budget.raised) {
    const bool by_window = run.evict.budget.keep == policy.window + policy.sink;
    const std::string what =
        by_window ? fmt::format("window {} and sinks {} are", policy.window, policy.sink) : "that many are";
    remarks.push_back(
        fmt::format("budget {} raised to {} tokens: {} always kept", run.budget, run.evict.budget.keep, what));
  }
  if (summary.sliding_layers > 0 && summary.sliding_layers < summary.layers)
    remarks.push_back(fmt::format("{} of {} layers have a sliding window and were left alone", summary.sliding_layers,
                                  summary.layers));
  if (run.evict.nonfinite_tokens > 0)
    remarks.push_back(fmt::format("{} (layer, head, token) hold NaN or Inf: kept", run.evict.nonfinite_tokens));
  if (run.evict.skipped_rows > 0)
    remarks.push_back(fmt::format("{} query rows hold NaN or Inf: they judged nothing", run.evict.skipped_rows));
  remarks.insert(remarks.end(), run.warnings.begin(), run.warnings.end());
  return remarks;
}

std::string TableText(const RunSummary& summary) {
  std::vector<std::vector<std::string>> rows = {{"policy", "budget", "kept min/mean/max", "KV MiB", "score ms",
                                                 "of prefill", "compact ms", "tokens/s", "output error", "decode", ""}};
  for (const RunRecord& run : summary.runs) rows.push_back(Cells(summary, run));
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text = fmt::format("{}: {} tokens, question {}, prefill {:.2f} s ({:.0f} tokens/s)\n", summary.model,
                                 summary.prompt_tokens, summary.hidden ? "hidden" : "seen", summary.prefill_s,
                                 summary.prompt_tokens / summary.prefill_s);
  if (summary.statistics_s > 0)
    text += fmt::format("statistics of all queries, for the policies that read them: {:.2f} s\n", summary.statistics_s);
  if (summary.device != "CPU")
    text += fmt::format("{}: {:.0f} ms to bring the cache to host memory\n", summary.device, summary.copy_s * 1e3);
  for (const auto& row : rows) text += Row(row, widths);
  for (const RunRecord& run : summary.runs)
    if (run.verdict == "WRONG")
      text += fmt::format("{} {}: the answer is WRONG: \"{}\"\n", run.policy.name(), run.budget, FirstAnswer(run));
  for (auto run = summary.runs.begin(); run != summary.runs.end();) {
    const auto end = std::find_if(run, summary.runs.end(),
                                  [&](const RunRecord& other) { return other.policy.name() != run->policy.name(); });
    if (!IsFull(*run)) text += PolicyText(summary, {run, end});
    run = end;
  }
  return text;
}

std::string JsonText(const RunSummary& summary) {
  nlohmann::json runs = nlohmann::json::array();
  for (const RunRecord& run : summary.runs) runs.push_back(RunJson(summary, run));
  const nlohmann::json json = {{"model", summary.model},
                               {"device", summary.device},
                               {"n_layers", summary.layers},
                               {"sliding_layers", summary.sliding_layers},
                               {"prompt_tokens", summary.prompt_tokens},
                               {"question", summary.hidden ? "hidden" : "seen"},
                               {"self_test_worst", summary.self_test_worst},
                               {"statistics_s", summary.statistics_s},
                               {"copy_s", summary.copy_s},
                               {"runs", runs}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace dropkv::cli
