#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "cli/eval.h"
#include "cli/policies.h"
#include "cli/run.h"
#include "cli/score.h"
#include "dropkv/version.h"

namespace {

constexpr const char* kHelp = R"(usage: dropkv <command> [flags]
KV-cache eviction by the change of the attention output, on any GGUF model through llama.cpp.

  run       read a document, keep a small part of its KV cache, answer from it
  score     score the tensors of one attention layer by any policy: no model needed
  policies  list the eviction policies
  eval      RULER, LongBench or your own samples: every policy from one prefill; eval report shows results
  version   print the version

dropkv <command> --help lists the flags of a command. A first try:
  dropkv run -m model.gguf -f document.txt -p "What is the harbour called?" --budget 10%,5% --compare full
)";

using Command = dropkv::Status (*)(const std::vector<std::string>& arguments);

struct NamedCommand {
  const char* name;
  Command command;
};

constexpr NamedCommand kCommands[] = {{"run", &dropkv::cli::Run},
                                      {"score", &dropkv::cli::Score},
                                      {"policies", &dropkv::cli::Policies},
                                      {"eval", &dropkv::cli::Eval}};

// Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C.
int ExitCode(const dropkv::Status& status) {
  switch (status.code()) {
    case dropkv::Code::kOk:
      return 0;
    case dropkv::Code::kInvalidArgument:
    case dropkv::Code::kNotFound:
      return 2;
    case dropkv::Code::kCancelled:
      return 130;
    default:
      return 1;
  }
}

int Main(const std::vector<std::string>& arguments) {
  const std::string command = arguments.empty() ? "" : arguments.front();
  for (const NamedCommand& known : kCommands) {
    if (command != known.name) continue;
    const dropkv::Status status = known.command({arguments.begin() + 1, arguments.end()});
    if (!status.ok()) std::fprintf(stderr, "dropkv: %s\n", status.message().c_str());
    return ExitCode(status);
  }
  if (command == "version" || command == "--version") {
    std::printf("dropkv %s\n", std::string(dropkv::Version()).c_str());
    return 0;
  }
  if (command == "--help" || command == "-h" || command == "help") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  if (command.empty()) {
    std::fputs(kHelp, stderr);
    return 2;
  }
  std::fprintf(stderr, "dropkv: unknown command '%s'; expected run, score, policies, eval or version (dropkv --help)\n",
               command.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Main({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dropkv: %s\n", error.what());
    return 1;
  }
}
