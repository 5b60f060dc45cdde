#include "cli/eval_report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include "eval/report/report.h"

namespace dropkv::cli {
namespace {

constexpr const char* kHelp =
    R"(usage: dropkv eval report DIR... [--against SETTING] [--markdown FILE] [--html FILE] [--json]
Score over budget of every setting with 95% intervals, differences, fidelity, kept tokens and times, from the folders
that dropkv eval wrote (--out). Models, suites, lengths and questions are kept apart.

  DIR                folder with results.jsonl and run.json; several are taken together
  --against SETTING  the setting that others are compared with beside the full cache (snapkv)
  --markdown FILE    the same as Markdown, with protocol and a table of the tasks
  --html FILE        one page without network: charts, needle heat map, tables
  --json             all numbers on standard output instead of the tables
)";

struct ReportArguments {
  std::vector<std::string> folders;
  std::string against;
  std::string markdown;
  std::string html;
  bool json = false;
  bool help = false;
};

Result<ReportArguments> Parse(const std::vector<std::string>& arguments) {
  ReportArguments parsed;
  const std::pair<const char*, std::string*> valued[] = {
      {"--against", &parsed.against}, {"--markdown", &parsed.markdown}, {"--html", &parsed.html}};
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const auto* flag = std::ranges::find_if(valued, [&](const auto& known) { return argument == known.first; });
    if (flag != std::end(valued)) {
      if (++i == arguments.size() || arguments[i].empty())
        return InvalidArgument("eval report: " + argument + ": expected a value behind it");
      *flag->second = arguments[i];
    } else if (argument == "--json") {
      parsed.json = true;
    } else if (argument == "--help" || argument == "-h") {
      parsed.help = true;
    } else if (argument.starts_with('-')) {
      return InvalidArgument("eval report: expected --against, --markdown, --html, --json or a folder, got '" +
                             argument + "'");
    } else {
      parsed.folders.push_back(argument);
    }
  }
  if (parsed.folders.empty() && !parsed.help)
    return InvalidArgument("eval report: expected a folder that dropkv eval wrote to (dropkv eval report --help)");
  return parsed;
}

Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) return {Code::kIo, path + ": writing failed"};
  std::fprintf(stderr, "wrote %s\n", path.c_str());
  return Status::Ok();
}

// A misspelt --against would only leave its table out.
Status CheckAgainst(const eval::Summary& summary) {
  std::vector<std::string> names;
  for (const eval::ModelSummary& model : summary.models)
    for (const eval::Slice& slice : model.slices) {
      if (slice.Has(summary.against)) return Status::Ok();
      for (const std::string& name : slice.settings)
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return {Code::kNotFound, "--against: expected one of the settings " + list + "; got '" + summary.against + "'"};
}

}  // namespace

Status EvalReport(const std::vector<std::string>& arguments) {
  const Result<ReportArguments> parsed = Parse(arguments);
  if (!parsed.ok()) return parsed.status();
  if (parsed->help) {
    std::fputs(kHelp, stdout);
    return Status::Ok();
  }
  const Result<eval::Results> results = eval::ReadResults(parsed->folders);
  if (!results.ok()) return results.status();
  const eval::Summary summary = eval::Summarise(*results, parsed->against.empty() ? "snapkv" : parsed->against);
  if (!parsed->against.empty()) DROPKV_RETURN_IF_ERROR(CheckAgainst(summary));
  if (!parsed->markdown.empty()) DROPKV_RETURN_IF_ERROR(WriteFile(parsed->markdown, eval::MarkdownReport(summary)));
  if (!parsed->html.empty()) DROPKV_RETURN_IF_ERROR(WriteFile(parsed->html, eval::HtmlReport(summary)));
  std::fputs((parsed->json ? eval::JsonReport(summary) : eval::TerminalReport(summary)).c_str(), stdout);
  return Status::Ok();
}

}  // namespace dropkv::cli
