#include "cli/run_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "cli/flags.h"
#include "cli/run_settings.h"
#include "llama/evict.h"
#include "llama/look_ahead.h"

namespace dropkv::cli {
namespace {

using baseline::Recipe;
using baseline::Scorer;

constexpr size_t kHelpIndent = 26;  // column of the explanations in the help

// Flags as typed, before they are understood.
struct Raw {
  std::string file;
  std::string budget = "10%";
  std::string policy = "dropkv-ahead";
  std::string compare;
  std::string rows;
  std::string pool;
  std::string heads;
  std::string decode = "auto";
  std::string kv = "f16";
  std::string fa = "on";
  std::string question = "seen";
  std::optional<int32_t> window;
  std::optional<int32_t> sink;
  std::optional<double> alpha;
  bool own_settings = false;
};

Result<std::string> ReadDocument(const std::string& file) {
  if (file == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream stream(file, std::ios::binary);
  std::error_code error;
  if (std::filesystem::is_directory(file, error))
    return Status(Code::kIo, "--file: expected a text file, got a directory: " + file);
  if (!stream) return Status(Code::kIo, "--file: cannot read " + file);
  // read() turns a failed read into badbit; the buffer's own iterators would throw.
  std::string text;
  for (std::array<char, 65536> part; stream;) {
    stream.read(part.data(), part.size());
    text.append(part.data(), static_cast<size_t>(stream.gcount()));
  }
  if (stream.bad()) return Status(Code::kIo, "--file: cannot read " + file);
  return text;
}

// The flags that change policies, understood.
Result<PolicyFlags> ReadPolicyFlags(const Raw& raw) {
  PolicyFlags flags;
  flags.window = raw.window;
  flags.sink = raw.sink;
  flags.alpha = raw.alpha;
  flags.own_settings = raw.own_settings;
  DROPKV_RETURN_IF_ERROR(ReadRows(raw.rows, &flags));
  if (!raw.pool.empty()) {
    const Result<Pooling> parsed = ParsePooling(raw.pool);
    if (!parsed.ok()) return FlagStatus("--pool", parsed.status());
    flags.pool = *parsed;
  }
  if (!raw.heads.empty()) {
    HeadRule rule = HeadRule::kUniform;
    DROPKV_RETURN_IF_ERROR(Choose<HeadRule>(
        "--heads", raw.heads, {{"uniform", HeadRule::kUniform}, {"ada", HeadRule::kAda}, {"ada-o", HeadRule::kAdaO}},
        &rule));
    flags.heads = rule;
  }
  return flags;
}

// Rows that a run cannot have.
Status CheckSources(const Recipe& recipe, bool hidden) {
  if (recipe.rows.oracle > 0)
    return InvalidArgument(
        "--rows: expected window, delay or draft, got oracle (dropkv eval knows the full cache's answer)");
  if (recipe.rows.delay > 0 && hidden)
    return InvalidArgument(
        "--rows: expected window or draft with --question hidden, got delay: there is no answer yet");
  return Status::Ok();
}

Status ChoosePolicies(const Raw& raw, uint32_t seed, RunOptions* options) {
  DROPKV_RETURN_IF_ERROR(AddPolicies("--policy", raw.policy, seed, &options->policies));
  for (const std::string& name : SplitList(raw.compare))
    DROPKV_RETURN_IF_ERROR(AddPolicies("--compare", name, seed, &options->policies));
  const Result<PolicyFlags> flags = ReadPolicyFlags(raw);
  if (!flags.ok()) return flags.status();
  const Status settled = Settle(*flags, &options->policies);
  if (!settled.ok()) return FlagStatus("", settled);
  for (const Recipe& recipe : options->policies) DROPKV_RETURN_IF_ERROR(CheckSources(recipe, options->hidden));
  std::stable_partition(options->policies.begin(), options->policies.end(),
                        [](const Recipe& recipe) { return recipe.scorer == Scorer::kFull; });
  return Status::Ok();
}

// A list of words broken into lines of at most `width` characters; the first line has `first` characters less.
std::string Wrapped(const std::string& text, size_t first, size_t width) {
  std::string out;
  size_t room = width - (first - kHelpIndent);
  std::stringstream stream(text);
  for (std::string word; stream >> word;) {
    if (word.size() + 1 > room) {
      out.back() = '\n';
      out += std::string(kHelpIndent, ' ');
      room = width;
    }
    out += word + ' ';
    room -= word.size() + 1;
  }
  out.pop_back();
  return out;
}

// Budgets that can be refused before a model is loaded: wrong text, counts below window + sink.
Status CheckBudgets(const Raw& raw, RunOptions* options) {
  options->budgets = SplitList(raw.budget);
  if (options->budgets.empty()) return InvalidArgument("--budget: expected a percentage or a count, got nothing");
  for (const std::string& text : options->budgets) {
    const Result<Budget> budget = ParseBudget(text);
    if (!budget.ok()) return FlagStatus("--budget", budget.status());
    for (const Recipe& recipe : options->policies) {
      const Status draft = llama::CheckDraftBudget(recipe, *budget);
      if (!draft.ok()) return FlagStatus("--budget", draft);
      if (recipe.scorer == Scorer::kFull || budget->fraction) continue;
      const Result<KeepCount> count = llama::ResolveBudget(*budget, recipe, llama::ProtectedTokens(recipe), 1 << 20);
      if (!count.ok()) return FlagStatus("--budget", count.status());
    }
  }
  return Status::Ok();
}

Status Understand(const Raw& raw, RunOptions* options) {
  DROPKV_RETURN_IF_ERROR(Choose<DecodeWay>(
      "--decode", raw.decode,
      {{"auto", DecodeWay::kAuto}, {"native", DecodeWay::kNative}, {"ragged", DecodeWay::kRagged}}, &options->decode));
  DROPKV_RETURN_IF_ERROR(Choose<DType>(
      "--kv", raw.kv, {{"f16", DType::kF16}, {"f32", DType::kF32}, {"q8_0", DType::kQ8_0}}, &options->kv_type));
  DROPKV_RETURN_IF_ERROR(Choose<bool>("--fa", raw.fa, {{"on", true}, {"off", false}}, &options->flash_attention));
  DROPKV_RETURN_IF_ERROR(
      Choose<bool>("--question", raw.question, {{"seen", false}, {"hidden", true}}, &options->hidden));
  if (options->kv_type == DType::kQ8_0 && !options->flash_attention)
    return InvalidArgument("--kv q8_0: libllama needs flash attention for a quantised cache, got --fa off");
  if (options->max_tokens < 1)
    return InvalidArgument("--max-tokens: expected at least 1, got " + std::to_string(options->max_tokens));
  if (options->threads < 0 || options->context < 0)
    return InvalidArgument("--threads, --ctx: expected 0 or more, got " +
                           std::to_string(std::min(options->threads, options->context)));
  if (!(options->temperature >= 0) || std::isinf(options->temperature))
    return InvalidArgument("--temp: expected a finite number of at least 0, got " +
                           std::to_string(options->temperature));
  DROPKV_RETURN_IF_ERROR(ChoosePolicies(raw, options->seed, options));
  DROPKV_RETURN_IF_ERROR(CheckBudgets(raw, options));
  if (!raw.file.empty()) {
    Result<std::string> text = ReadDocument(raw.file);
    if (!text.ok()) return text.status();
    options->document = std::move(*text);
    options->has_document = true;
  }
  // Without either, a question may still come from the terminal.
  if (options->has_document || !options->questions.empty()) DROPKV_RETURN_IF_ERROR(CheckPrompt(*options));
  if (options->hidden && options->document.empty())
    return InvalidArgument("--question hidden: expected a document (--file), got none");
  return Status::Ok();
}

}  // namespace

Status CheckPrompt(const RunOptions& options) {
  const bool no_question = std::all_of(options.questions.begin(), options.questions.end(),
                                       [](const std::string& question) { return question.empty(); });
  if (!options.document.empty() || !no_question) return Status::Ok();
  return InvalidArgument("the prompt is empty: --file and --prompt hold no text");
}

Result<std::optional<RunOptions>> ParseRun(std::vector<std::string> arguments) {
  RunOptions options;
  Raw raw;
  CLI::App app("dropkv run");
  app.set_help_flag();
  app.allow_windows_style_options(false);
  bool help = false;
  app.add_flag("-h,--help", help);
  app.add_option("-m,--model", options.model);
  app.add_option("-f,--file", raw.file);
  app.add_option("-p,--prompt", options.questions)->take_all()->allow_extra_args(false);
  app.add_option("--budget", raw.budget);
  app.add_option("--policy", raw.policy);
  app.add_option("--window", raw.window);
  app.add_option("--rows", raw.rows);
  app.add_option("--pool", raw.pool);
  app.add_option("--sink", raw.sink);
  app.add_option("--heads", raw.heads);
  app.add_option("--alpha", raw.alpha);
  app.add_option("--decode", raw.decode);
  app.add_option("--kv", raw.kv);
  app.add_option("--fa", raw.fa);
  app.add_option("--ctx", options.context);
  app.add_option("--threads", options.threads);
  app.add_option("--gpu-layers", options.gpu_layers);
  app.add_option("--temp", options.temperature);
  app.add_option("--seed", options.seed);
  app.add_option("--max-tokens", options.max_tokens);
  app.add_option("--prefix", options.prefix);
  app.add_option("--expect", options.expect);
  app.add_option("--question", raw.question);
  app.add_option("--compare", raw.compare);
  app.add_flag("--own-settings", raw.own_settings);
  app.add_flag("--raw", options.raw);
  app.add_flag("--ignore-eos", options.ignore_eos);
  app.add_flag("--json", options.json);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return InvalidArgument(std::string(error.what()) + " (dropkv run --help lists the flags)");
  }
  if (help) return std::optional<RunOptions>();
  if (options.model.empty()) return InvalidArgument("--model: expected a GGUF file, got nothing");
  DROPKV_RETURN_IF_ERROR(Understand(raw, &options));
  return std::optional(std::move(options));
}

std::string RunHelp() {
  return R"(usage: dropkv run -m MODEL.gguf [-f FILE|-] [-p QUESTION]... [flags]
Reads a document, keeps the part of its KV cache that matters, and answers from it.

  -m, --model FILE        GGUF model           -f, --file FILE|-      document; - is standard input
  -p, --prompt TEXT       question; again for further turns (without it, on a terminal: you are asked)
      --prefix TEXT       begins the assistant's turn;   --expect TEXT  says whether the answer contains it
      --question WHEN     seen (default): the question ends the prompt, further ones are further turns
                          hidden: the document is compressed first, every question starts from that
      --budget LIST       share of the tokens KEPT, or tokens per KV head: 10%,5%,512   (10%)
      --policy NAME       (dropkv-ahead) )" +
         Wrapped(baseline::RecipeNames(), 38, 92) + R"(
                          also ada-NAME, critical-NAME, chunk-NAME
      --compare LIST      policies to run beside it, from the same prefill: full,snapkv; tier1, all
      --own-settings      compared policies keep their own window, pooling and sinks
      --window W          prompt rows that judge the tokens, 1..128; always kept
      --rows LIST         whose queries judge, joined by +: window:W, draft:M[@BUDGET] (M tokens decoded from a small
                          cache and thrown away), delay:M (the answer's first M tokens; the cut comes after them)
      --pool K|B,F        mean pooling: K wide (odd), or B tokens before and F after a hit; max:K, max:B,F
      --sink S            first tokens that are always kept
      --heads RULE        uniform, ada, ada-o: how the KV heads of a layer share the budget;   --alpha A (0.2)
      --decode WAY        auto, native (llama.cpp's attention, uniform heads), ragged (ours)
      --kv TYPE           cache type f16, f32, q8_0 (f16);    --fa on|off  flash attention (on)
      --ctx N             most tokens in all;   --threads N;   --max-tokens N (128);   --ignore-eos
      --gpu-layers N      layers that libllama puts on a GPU; -1: all where it finds one (-1)
      --temp T            0: greedy (0);        --seed N (0)
      --raw               no chat template;     --json  one object on standard output, nothing else
)";
}

}  // namespace dropkv::cli
