#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>

#include "eval/report/tables.h"

namespace dropkv::eval {
namespace {

using Runs = std::vector<RunRecord>;
using Strings = std::vector<std::string>;

constexpr size_t kShownCommands = 3;
constexpr size_t kNamedOptions = 3;
constexpr size_t kHashDigits = 12;

std::string Joined(const Strings& parts, std::string_view separator = ", ") {
  return fmt::format("{}", fmt::join(parts, separator));
}

// What all runs list, in the order of its first appearance. strings_of: a run's list.
template <typename StringsOf>
Strings Union(const Runs& runs, StringsOf strings_of) {
  Strings all;
  for (const RunRecord& run : runs)
    for (const std::string& text : Strings(std::invoke(strings_of, run)))
      if (!text.empty()) AddOnce(&all, text);
  return all;
}

// The distinct values of one field: usually a single one. string_of: a run's value.
template <typename StringOf>
Strings Values(const Runs& runs, StringOf string_of) {
  return Union(runs, [&](const RunRecord& run) { return Strings{std::string(std::invoke(string_of, run))}; });
}

// Of values that are texts with commas of their own.
template <typename StringOf>
std::string Texts(const Runs& runs, StringOf string_of) {
  return Joined(Values(runs, string_of), "; ");
}

Strings Split(std::string_view text, std::string_view separator) {
  Strings parts;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + separator.size());
  }
  return parts;
}

// "name sha256 bytes" as name and the hash's first digits; other lines as they are.
std::string ShortData(const std::string& line) {
  const size_t bytes = line.rfind(' ');
  if (bytes == std::string::npos || bytes == 0) return line;
  const size_t hash = line.rfind(' ', bytes - 1);
  if (hash == std::string::npos || bytes - hash - 1 < kHashDigits) return line;
  const size_t other = line.find_first_not_of("0123456789abcdef", hash + 1);
  return other == bytes ? line.substr(0, hash + 1 + kHashDigits) : line;
}

Strings DataFiles(const RunRecord& run) {
  Strings files = Split(run.data, "\n");
  std::ranges::transform(files, files.begin(), ShortData);
  return files;
}

// A run without needles needs no haystack: only where no run has one is that worth saying.
std::string Haystack(const Runs& runs) {
  Strings files = Union(runs, [](const RunRecord& run) { return Split(run.haystack, ", "); });
  if (files.size() > 1) std::erase(files, "none");
  return Joined(files);
}

// Some runs may have options and others none, which is a difference too.
std::string Options(const Runs& runs) {
  const bool any = std::ranges::any_of(runs, [](const RunRecord& run) { return !run.options.empty(); });
  return Texts(runs, [&](const RunRecord& run) { return any && run.options.empty() ? "none" : run.options; });
}

Strings Lengths(const RunRecord& run) {
  Strings lengths;
  for (const int32_t length : run.lengths) lengths.push_back(length == 0 ? "as they are" : Grouped(length));
  return lengths;
}

// The last name of a path; slashes at its end belong to it.
std::string_view LastName(std::string_view path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string_view::npos) return path.substr(0, 1);
  const size_t slash = path.find_last_of('/', end);
  return path.substr(slash + 1, end - slash);
}

// Where the path that begins the text ends: at a space outside of quotes, at its closing quote, before another path.
size_t PathEnd(std::string_view text, char quote) {
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool list = c == ',' && text.substr(i + 1).starts_with('/');
    const bool end = quote != 0 ? c == quote : std::string_view(" \t\n'\"").find(c) != std::string_view::npos;
    if (list || end) return i;
  }
  return text.size();
}

// /folder/model.gguf as model.gguf: which folders a machine has is nothing that a reader needs.
std::string WithoutFolders(std::string_view command) {
  std::string text;
  char quote = 0;
  for (size_t i = 0; i < command.size();) {
    const char c = command[i];
    const bool first = i == 0 || std::string_view(" \t\n'\"=,").find(command[i - 1]) != std::string_view::npos;
    if (c == '/' && first) {
      const size_t size = PathEnd(command.substr(i), quote);
      text += LastName(command.substr(i, size));
      i += size;
      continue;
    }
    if (quote == 0 && (c == '\'' || c == '"'))
      quote = c;
    else if (c == quote)
      quote = 0;
    text += c;
    ++i;
  }
  return text;
}

// Words of a command; a quoted one is one word.
Strings Words(const std::string& command) {
  Strings words(1);
  char quote = 0;
  for (const char c : command) {
    if (quote == 0 && std::string_view(" \t\n").find(c) != std::string_view::npos) {
      if (!words.back().empty()) words.emplace_back();
      continue;
    }
    if (quote == 0 && (c == '\'' || c == '"'))
      quote = c;
    else if (c == quote)
      quote = 0;
    words.back() += c;
  }
  return words;
}

// The values that stand behind each option; "": what stands before the first. names: the options, each once.
std::map<std::string, std::string> OptionValues(const std::string& command, Strings* names) {
  std::map<std::string, std::string> values;
  std::string name;
  for (const std::string& word : Words(command)) {
    const bool option = word.size() > 1 && word[0] == '-' && word.find_first_of("0123456789.") != 1;
    const size_t value = option ? word.find('=') : 0;
    if (option) name = word.substr(0, value);
    AddOnce(names, name);
    std::string& all = values[name];
    all += '\n';
    if (value != std::string::npos) all.append(word, value);
  }
  return values;
}

// " that differ in --tasks and --out"; nothing where they differ in more than can be named.
std::string Differing(const Strings& commands) {
  Strings names;
  std::vector<std::map<std::string, std::string>> values;
  for (const std::string& command : commands) values.push_back(OptionValues(command, &names));
  std::erase_if(names, [&](const std::string& name) {
    const auto value_of = [&](const auto& of) { return of.contains(name) ? of.at(name) : std::string(); };
    return std::ranges::all_of(values, [&](const auto& of) { return value_of(of) == value_of(values.front()); });
  });
  if (names.empty() || names.size() > kNamedOptions || std::ranges::find(names, "") != names.end()) return "";
  const std::string last = names.back();
  names.pop_back();
  return fmt::format(" that differ in {}{}{}", Joined(names), names.empty() ? "" : " and ", last);
}

// One a line; what is left out is said in a shell's comment.
std::string Commands(const Runs& runs) {
  const Strings all = Values(runs, [](const RunRecord& run) { return WithoutFolders(run.command); });
  const auto shown = static_cast<ptrdiff_t>(std::min(all.size(), kShownCommands));
  std::string text = Joined(Strings(all.begin(), all.begin() + shown), "\n");
  if (all.size() > kShownCommands)
    text += fmt::format("\n# and {} more{}", all.size() - kShownCommands, Differing(all));
  return text;
}

std::string Cache(const RunRecord& run) {
  return fmt::format("{}, flash attention {}", run.kv_type, run.flash_attention ? "on" : "off");
}

// Of runs by an earlier version nothing is said.
std::string Batch(const RunRecord& run) {
  return run.batch ? fmt::format("up to {} keep lists", *run.batch) : std::string();
}

std::string File(const RunRecord& run) { return fmt::format("{}, {} bytes", run.model_file, Grouped(run.model_bytes)); }

std::string Samples(const RunRecord& run) { return run.samples == 0 ? "all" : std::to_string(run.samples); }

}  // namespace

Table ProtocolTable(const std::vector<RunRecord>& runs) {
  Table table;
  table.rows = {
      {"model", Texts(runs, &RunRecord::model)},
      {"file", Texts(runs, File)},
      {"sha256", Texts(runs, &RunRecord::model_sha256)},
      {"libllama", Texts(runs, &RunRecord::libllama)},
      {"dropkv", Texts(runs, &RunRecord::dropkv_version)},
      {"machine", Texts(runs, &RunRecord::machine)},
      {"threads", Joined(Values(runs, [](const RunRecord& run) { return std::to_string(run.threads); }))},
      {"decoded together", Texts(runs, Batch)},
      {"cache", Texts(runs, Cache)},
      {"question", Joined(Union(runs, &RunRecord::questions))},
      {"chat template", Texts(runs, &RunRecord::chat_template)},
      {"haystack", Haystack(runs)},
      {"data", Joined(Union(runs, DataFiles), "\n")},
      {"seed", Joined(Values(runs, [](const RunRecord& run) { return std::to_string(run.seed); }))},
      {"samples a task", Joined(Values(runs, Samples))},
      {"lengths", Joined(Union(runs, Lengths))},
      {"tasks", Joined(Union(runs, &RunRecord::tasks))},
      {"settings", Joined(Union(runs, &RunRecord::settings))},
      {"budgets", Joined(Union(runs, &RunRecord::budgets))},
      {"options", Options(runs)},
      {"started", Joined(Values(runs, &RunRecord::started))},
      {"command", Commands(runs)},
  };
  std::erase_if(table.rows, [](const std::vector<std::string>& row) { return row.back().empty(); });
  return table;
}

}  // namespace dropkv::eval
