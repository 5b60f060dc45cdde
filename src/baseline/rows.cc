#include "baseline/rows.h"

#include <charconv>
#include <optional>
#include <vector>

#include "dropkv/cache_view.h"

namespace dropkv::baseline {
namespace {

Status Expected(const char* field, const std::string& expected, const std::string& got) {
  return InvalidArgument(std::string(field) + ": expected " + expected + ", got " + got);
}

std::string Quoted(std::string_view text) { return std::string("\"").append(text).append("\""); }

Status NotUnderstood(std::string_view text, const std::string& reason) {
  return Expected("rows",
                  "window:W, delay:M, draft:M, draft:M@BUDGET or oracle:M, joined with +, such as window:8+draft:8@10%",
                  Quoted(text) + ": " + reason);
}

// Digits alone.
std::optional<int32_t> WholeNumber(std::string_view text) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || text.front() == '-' || error != std::errc() || end != text.data() + text.size())
    return std::nullopt;
  return value;
}

// Parts between separators: one more than there are separators.
std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool IsSame(const Budget& budget) { return !budget.fraction.has_value() && budget.tokens == 0; }

// "10%", "256", "same".
std::string TextOf(const Budget& budget) {
  if (IsSame(budget)) return "same";
  if (!budget.fraction.has_value()) return std::to_string(budget.tokens);
  char digits[32];
  const auto [end, error] =
      std::to_chars(digits, digits + sizeof digits, *budget.fraction * 100.0, std::chars_format::general, 6);
  return std::string(digits, end) + "%";
}

// What stands behind the draft's number of tokens.
Status ReadDraft(std::string_view text, const std::vector<std::string_view>& options, RowSources* rows) {
  bool budget = false;
  for (size_t i = 1; i < options.size(); ++i) {
    const std::string_view option = options[i];
    if (option.starts_with('w')) {
      const std::optional<int32_t> window = WholeNumber(option.substr(1));
      if (!window || *window < 1 || *window > kMaxRows)
        return NotUnderstood(text, "w takes a number of rows, 1 to " + std::to_string(kMaxRows));
      if (rows->draft_window != 0) return NotUnderstood(text, "the draft has two windows");
      rows->draft_window = *window;
      continue;
    }
    if (option.starts_with('x')) {
      const std::optional<int32_t> rounds = WholeNumber(option.substr(1));
      if (!rounds || *rounds < 1 || *rounds > kMaxDraftRounds)
        return NotUnderstood(text, "x takes a number of rounds, 1 to " + std::to_string(kMaxDraftRounds));
      if (rows->draft_rounds != 1) return NotUnderstood(text, "the draft has two numbers of rounds");
      rows->draft_rounds = *rounds;
      continue;
    }
    if (budget) return NotUnderstood(text, "the draft has two budgets");
    budget = true;
    if (option == "same") {
      rows->draft_budget = Budget{};
      continue;
    }
    const Result<Budget> read = ParseBudget(option);
    if (!read.ok()) return NotUnderstood(text, "of the draft, " + read.status().message());
    rows->draft_budget = *read;
  }
  return Status::Ok();
}

// One source, "draft:8@10%".
Status ReadSource(std::string_view text, std::string_view part, RowsSetting* setting) {
  const size_t colon = part.find(':');
  const std::string_view word = part.substr(0, colon);
  RowSources& rows = setting->sources;
  int32_t* const field = word == "window"   ? &setting->window
                         : word == "delay"  ? &rows.delay
                         : word == "draft"  ? &rows.draft
                         : word == "oracle" ? &rows.oracle
                                            : nullptr;
  if (field == nullptr) return NotUnderstood(text, Quoted(word) + " is no source");
  if (*field != 0) return NotUnderstood(text, Quoted(word) + " stands there twice");
  const int32_t most = word == "window" ? kMaxRows : kMaxGeneratedRows;
  const std::vector<std::string_view> options =
      Split(colon == std::string_view::npos ? std::string_view() : part.substr(colon + 1), '@');
  const std::optional<int32_t> count = WholeNumber(options.front());
  if (!count || *count < 1 || *count > most)
    return NotUnderstood(text, std::string(word) + " takes a number of rows, 1 to " + std::to_string(most));
  *field = *count;
  if (word == "draft") return ReadDraft(text, options, &rows);
  if (options.size() > 1) return NotUnderstood(text, "@ stands behind a draft only");
  return Status::Ok();
}

}  // namespace

Budget DraftBudget(const RowSources& rows, const Budget& run) {
  return IsSame(rows.draft_budget) ? run : rows.draft_budget;
}

Result<RowsSetting> ParseRows(std::string_view text) {
  RowsSetting setting;
  for (const std::string_view part : Split(text, '+')) DROPKV_RETURN_IF_ERROR(ReadSource(text, part, &setting));
  setting.sources.window = setting.window > 0;
  DROPKV_RETURN_IF_ERROR(CheckSources(setting.sources, setting.window));
  return setting;
}

std::string RowsText(const RowSources& rows, int32_t window) {
  std::string text;
  const auto add = [&text](const char* source, int32_t count) {
    text.append(text.empty() ? "" : "+").append(source).append(":").append(std::to_string(count));
  };
  if (rows.window) add("window", window);
  if (rows.delay > 0) add("delay", rows.delay);
  if (rows.draft > 0) {
    add("draft", rows.draft);
    text.append("@").append(TextOf(rows.draft_budget));
    if (rows.draft_window > 0) text.append("@w").append(std::to_string(rows.draft_window));
    if (rows.draft_rounds > 1) text.append("@x").append(std::to_string(rows.draft_rounds));
  }
  if (rows.oracle > 0) add("oracle", rows.oracle);
  return text;
}

Status CheckSources(const RowSources& rows, int32_t window) {
  struct Source {
    const char* field;
    int32_t count;
  };
  int32_t sources = 0;
  for (const Source& source :
       {Source{"rows.delay", rows.delay}, {"rows.draft", rows.draft}, {"rows.oracle", rows.oracle}}) {
    if (source.count < 0 || source.count > kMaxGeneratedRows)
      return Expected(source.field, "0 to " + std::to_string(kMaxGeneratedRows), std::to_string(source.count));
    sources += source.count > 0 ? 1 : 0;
  }
  if (sources > 1) return Expected("rows", "one of delay, draft and oracle", Quoted(RowsText(rows, window)));
  if (sources == 0 && !rows.window) return Expected("rows", "the window, or rows of generated tokens", "neither");
  if (rows.window && sources > 0 && window + rows.generated() > kMaxRows)
    return Expected("rows", "at most " + std::to_string(kMaxRows) + " in all",
                    Quoted(RowsText(rows, window)) + ", " + std::to_string(window + rows.generated()));
  const Budget& budget = rows.draft_budget;
  const bool valid =
      budget.fraction.has_value() ? *budget.fraction > 0.0 && *budget.fraction <= 1.0 : budget.tokens >= 0;
  if (!valid) return Expected("rows.draft_budget", "a share above 0 up to 1, or at least 1 token", TextOf(budget));
  if (rows.draft_window < 0 || rows.draft_window > kMaxRows)
    return Expected("rows.draft_window", "0 to " + std::to_string(kMaxRows), std::to_string(rows.draft_window));
  if (rows.draft_rounds < 1 || rows.draft_rounds > kMaxDraftRounds)
    return Expected("rows.draft_rounds", "1 to " + std::to_string(kMaxDraftRounds), std::to_string(rows.draft_rounds));
  if (rows.draft > 0) return Status::Ok();
  if (rows.draft_rounds != 1)
    return Expected("rows.draft_rounds", "1 without a draft", std::to_string(rows.draft_rounds));
  const Budget plain = RowSources{}.draft_budget;
  if (budget.fraction != plain.fraction || budget.tokens != plain.tokens)
    return Expected("rows.draft_budget", "the default without a draft", TextOf(budget));
  if (rows.draft_window != 0)
    return Expected("rows.draft_window", "0 without a draft", std::to_string(rows.draft_window));
  return Status::Ok();
}

}  // namespace dropkv::baseline
