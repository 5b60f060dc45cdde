#include "cli/eval_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "cli/flags.h"
#include "cli/run_settings.h"
#include "llama/evict.h"
#include "llama/look_ahead.h"

namespace dropkv::cli {
namespace {

using baseline::Recipe;
using baseline::Scorer;

constexpr int32_t kTextContinuation = 64;

// Flags as typed, before they are understood.
struct Raw {
  std::string tasks;
  std::string length = "4096";
  std::string policies = "adadropkv,dropkv,snapkv";
  std::string budgets = "5%,10%,30%";
  std::string heads;
  std::string question = "seen";
  std::vector<std::string> rows;
  std::vector<std::string> pools;
  std::string kv = "f16";
  std::string fa = "on";
  std::optional<int32_t> window;
  std::optional<int32_t> sink;
  std::optional<int32_t> samples;
  std::optional<int32_t> fidelity;
  bool own_settings = false;
};

bool IsText(const std::string& suite) { return suite != "ruler" && suite != "longbench" && !suite.ends_with(".jsonl"); }

template <typename T>
bool Contains(const std::vector<T>& list, const T& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

Status ReadLengths(const std::string& text, std::vector<int32_t>* lengths) {
  for (const std::string& part : SplitList(text)) {
    int32_t length = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), length);
    if (error != std::errc() || end != part.data() + part.size() || length < 1)
      return InvalidArgument("--length: expected numbers of tokens, got '" + part + "'");
    if (!Contains(*lengths, length)) lengths->push_back(length);
  }
  return lengths->empty() ? InvalidArgument("--length: expected a number of tokens, got nothing") : Status::Ok();
}

Status ReadQuestions(const Raw& raw, EvalOptions* options) {
  for (const std::string& part : SplitList(raw.question)) {
    bool hidden = false;
    DROPKV_RETURN_IF_ERROR(Choose<bool>("--question", part, {{"seen", false}, {"hidden", true}}, &hidden));
    if (!Contains(options->hidden, hidden)) options->hidden.push_back(hidden);
  }
  if (options->hidden.empty()) return InvalidArgument("--question: expected seen, hidden or both, got nothing");
  if (IsText(options->suite) && Contains(options->hidden, true))
    return InvalidArgument("--question hidden: expected a suite of questions, got the text " + options->suite);
  return Status::Ok();
}

// What the flags make of every policy: one of each head rule, row sources and pooling that are asked for.
Result<std::vector<PolicyFlags>> ReadVariants(const Raw& raw, const std::vector<std::optional<HeadRule>>& rules) {
  PolicyFlags common;
  common.window = raw.window;
  common.sink = raw.sink;
  common.own_settings = raw.own_settings;
  std::vector<PolicyFlags> of_rows;
  for (const std::string& list : raw.rows) {
    for (const std::string& text : SplitList(list)) {
      of_rows.push_back(common);
      DROPKV_RETURN_IF_ERROR(ReadRows(text, &of_rows.back()));
    }
  }
  if (of_rows.empty()) of_rows.push_back(common);
  std::vector<std::optional<Pooling>> pools;
  for (const std::string& text : raw.pools) {
    const Result<Pooling> parsed = ParsePooling(text);
    if (!parsed.ok()) return FlagStatus("--pool", parsed.status());
    pools.emplace_back(*parsed);
  }
  if (pools.empty()) pools.emplace_back();  // each policy's own
  std::vector<PolicyFlags> variants;
  for (const PolicyFlags& rows : of_rows) {
    for (const std::optional<Pooling>& pool : pools) {
      for (const std::optional<HeadRule>& rule : rules) {
        PolicyFlags& flags = variants.emplace_back(rows);
        flags.pool = pool;
        flags.heads = rule;
      }
    }
  }
  return variants;
}

Status ReadHeads(const Raw& raw, std::vector<std::optional<HeadRule>>* rules) {
  for (const std::string& part : SplitList(raw.heads)) {
    HeadRule rule = HeadRule::kUniform;
    DROPKV_RETURN_IF_ERROR(Choose<HeadRule>(
        "--heads", part, {{"uniform", HeadRule::kUniform}, {"ada", HeadRule::kAda}, {"ada-o", HeadRule::kAdaO}},
        &rule));
    rules->emplace_back(rule);
  }
  if (rules->empty()) rules->emplace_back();  // each policy's own
  return Status::Ok();
}

bool OwnHeads(const Recipe& recipe) {
  const Result<Recipe> preset = baseline::FindRecipe(recipe.name());
  return preset.ok() && preset->policy.heads == recipe.policy.heads;
}

// Every policy in every variant that it takes. What a head rule makes of one policy and another one is anyway runs
// once, under the other's name: dropkv with adaptive heads is adadropkv.
void AddSettings(const std::vector<std::vector<Recipe>>& variants, std::vector<eval::Setting>* settings) {
  std::vector<Recipe> own;
  for (const std::vector<Recipe>& recipes : variants)
    std::copy_if(recipes.begin(), recipes.end(), std::back_inserter(own), OwnHeads);
  for (size_t i = 0; i < variants.front().size(); ++i) {
    for (const std::vector<Recipe>& recipes : variants) {
      const Recipe& recipe = recipes[i];
      const std::string name = eval::SettingName(recipe);
      const auto named = [&](const eval::Setting& setting) { return setting.name == name; };
      const auto same = [&](const Recipe& other) { return eval::SameEviction(recipe, other); };
      if (std::any_of(settings->begin(), settings->end(), named)) continue;
      if (!OwnHeads(recipe) && std::any_of(own.begin(), own.end(), same)) continue;
      settings->push_back({name, recipe});
    }
  }
}

// The answer's own tokens judge nothing before its question is there, and of a text something must be left to compare.
Status CheckSources(const EvalOptions& options) {
  for (const eval::Setting& setting : options.settings) {
    const baseline::RowSources& rows = setting.recipe.rows;
    if (IsText(options.suite) && rows.delay > 0 && rows.delay >= options.fidelity)
      return InvalidArgument(fmt::format("--rows: expected a delay below the {} tokens of --fidelity, got {}: {}",
                                         options.fidelity, rows.delay, setting.name));
    if (Contains(options.hidden, true) && rows.delay + rows.oracle > 0)
      return InvalidArgument("--rows: expected window or draft with --question hidden, got the answer's own rows: " +
                             setting.name);
  }
  return Status::Ok();
}

Status ReadPolicies(const Raw& raw, EvalOptions* options) {
  std::vector<Recipe> policies;
  for (const std::string& name : SplitList(raw.policies))
    DROPKV_RETURN_IF_ERROR(AddPolicies("--policies", name, options->seed, &policies));
  std::erase_if(policies, [](const Recipe& recipe) { return recipe.scorer == Scorer::kFull; });  // runs anyway
  std::vector<std::optional<HeadRule>> rules;
  DROPKV_RETURN_IF_ERROR(ReadHeads(raw, &rules));
  const Result<std::vector<PolicyFlags>> variants = ReadVariants(raw, rules);
  if (!variants.ok()) return variants.status();
  if (policies.empty()) return Status::Ok();
  std::vector<std::vector<Recipe>> settled;
  for (const PolicyFlags& flags : *variants) {
    std::vector<Recipe>& recipes = settled.emplace_back(policies);
    const Status status = Settle(flags, &recipes);
    if (!status.ok()) return FlagStatus("", status);
  }
  AddSettings(settled, &options->settings);
  return CheckSources(*options);
}

Status ReadBudgets(const Raw& raw, EvalOptions* options) {
  for (const std::string& text : SplitList(raw.budgets)) {
    const Result<Budget> budget = ParseBudget(text);
    if (!budget.ok()) return FlagStatus("--budgets", budget.status());
    if (Contains(options->budgets, text)) continue;
    options->budgets.push_back(text);
    for (const eval::Setting& setting : options->settings) {
      const Status draft = llama::CheckDraftBudget(setting.recipe, *budget);
      if (!draft.ok()) return FlagStatus("--budgets", draft);
      if (budget->fraction) continue;
      const int32_t smallest = llama::ProtectedTokens(setting.recipe);
      const Result<KeepCount> count = llama::ResolveBudget(*budget, setting.recipe, smallest, 1 << 20);
      if (!count.ok()) return FlagStatus("--budgets", count.status());
    }
  }
  if (options->budgets.empty() && !options->settings.empty())
    return InvalidArgument("--budgets: expected percentages or counts, got nothing");
  return Status::Ok();
}

Status CheckNumbers(const Raw& raw, const EvalOptions& options) {
  const std::pair<const char*, int32_t> numbers[] = {{"--samples", options.samples},
                                                     {"--threads", options.threads},
                                                     {"--ctx", options.context},
                                                     {"--max-length", options.max_length},
                                                     {"--fidelity", options.fidelity}};
  for (const auto& [flag, value] : numbers)
    if (value < 0) return InvalidArgument(fmt::format("{}: expected 0 or more, got {}", flag, value));
  if (options.batch < 1) return InvalidArgument(fmt::format("--batch: expected at least 1, got {}", options.batch));
  if (raw.samples == 0 && options.suite == "ruler")
    return InvalidArgument("--samples: expected at least 1 for --suite ruler, got 0");
  if (IsText(options.suite) && options.fidelity == 0)
    return InvalidArgument("--fidelity: expected at least 1 token of a text, got 0");
  if (!(options.time_limit >= 0) || std::isinf(options.time_limit))
    return InvalidArgument(fmt::format("--time: expected seconds, got {}", options.time_limit));
  if (options.kv_type == DType::kQ8_0 && !options.flash_attention)
    return InvalidArgument("--kv q8_0: libllama needs flash attention for a quantised cache, got --fa off");
  return Status::Ok();
}

Status Understand(const Raw& raw, EvalOptions* options) {
  if (options->model.empty()) return InvalidArgument("--model: expected a GGUF file, got nothing");
  if (options->suite.empty()) return InvalidArgument("--suite: expected ruler, longbench or a file, got nothing");
  if (options->out.empty()) return InvalidArgument("--out: expected a folder for the results, got nothing");
  options->tasks = SplitList(raw.tasks);
  if (options->tasks == std::vector<std::string>{"all"}) options->tasks.clear();
  options->samples = raw.samples.value_or(options->suite == "ruler" ? 10 : 0);
  options->fidelity = raw.fidelity.value_or(IsText(options->suite) ? kTextContinuation : 0);
  if (const char* folder = std::getenv("DROPKV_DATA"); options->data.empty() && folder != nullptr)
    options->data = folder;
  DROPKV_RETURN_IF_ERROR(Choose<DType>(
      "--kv", raw.kv, {{"f16", DType::kF16}, {"f32", DType::kF32}, {"q8_0", DType::kQ8_0}}, &options->kv_type));
  DROPKV_RETURN_IF_ERROR(Choose<bool>("--fa", raw.fa, {{"on", true}, {"off", false}}, &options->flash_attention));
  DROPKV_RETURN_IF_ERROR(CheckNumbers(raw, *options));
  DROPKV_RETURN_IF_ERROR(ReadLengths(raw.length, &options->lengths));
  DROPKV_RETURN_IF_ERROR(ReadQuestions(raw, options));
  DROPKV_RETURN_IF_ERROR(ReadPolicies(raw, options));
  return ReadBudgets(raw, options);
}

// As a shell takes it back.
std::string CommandLine(const std::vector<std::string>& arguments) {
  std::string command = "dropkv eval";
  for (const std::string& argument : arguments) {
    const bool plain = !argument.empty() && argument.find_first_of(" \t\n\"'\\$`*?[]()<>|&;~#!") == std::string::npos;
    std::string quoted = argument;
    for (size_t at = 0; (at = quoted.find('\'', at)) != std::string::npos; at += 4) quoted.replace(at, 1, "'\\''");
    command += plain ? " " + argument : " '" + quoted + "'";
  }
  return command;
}

}  // namespace

Result<std::optional<EvalOptions>> ParseEval(std::vector<std::string> arguments) {
  EvalOptions options;
  options.command = CommandLine(arguments);
  Raw raw;
  CLI::App app("dropkv eval");
  app.set_help_flag();
  app.allow_windows_style_options(false);
  bool help = false;
  app.add_flag("-h,--help", help);
  app.add_option("-m,--model", options.model);
  app.add_option("--suite", options.suite);
  app.add_option("--tasks", raw.tasks);
  app.add_option("--length", raw.length);
  app.add_option("--policies", raw.policies);
  app.add_option("--budgets", raw.budgets);
  app.add_option("--heads", raw.heads);
  app.add_option("--window", raw.window);
  app.add_option("--rows", raw.rows)->take_all()->allow_extra_args(false);
  app.add_option("--pool", raw.pools)->take_all()->allow_extra_args(false);
  app.add_option("--sink", raw.sink);
  app.add_flag("--own-settings", raw.own_settings);
  app.add_option("--question", raw.question);
  app.add_option("--samples", raw.samples);
  app.add_option("--seed", options.seed);
  app.add_option("--data", options.data);
  app.add_option("--out", options.out);
  app.add_option("--kv", raw.kv);
  app.add_option("--fa", raw.fa);
  app.add_option("--threads", options.threads);
  app.add_option("--gpu-layers", options.gpu_layers);
  app.add_option("--ctx", options.context);
  app.add_option("--max-length", options.max_length);
  app.add_option("--fidelity", raw.fidelity);
  app.add_option("--batch", options.batch);
  app.add_option("--time", options.time_limit);
  app.add_flag("--raw", options.raw);
  app.add_flag("--ignore-eos", options.ignore_eos);
  app.add_flag("--skip-too-long", options.skip_too_long);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return InvalidArgument(std::string(error.what()) + " (dropkv eval --help lists the flags)");
  }
  if (help) return std::optional<EvalOptions>();
  DROPKV_RETURN_IF_ERROR(Understand(raw, &options));
  return std::optional(std::move(options));
}

std::string RecordedOptions(const EvalOptions& options) {
  std::vector<std::string> parts;
  if (options.fidelity > 0) parts.push_back(fmt::format("--fidelity {}", options.fidelity));
  if (options.max_length > 0) parts.push_back(fmt::format("--max-length {}", options.max_length));
  if (options.ignore_eos) parts.emplace_back("--ignore-eos");
  if (options.skip_too_long)
    parts.push_back(options.context > 0 ? fmt::format("--skip-too-long --ctx {}", options.context) : "--skip-too-long");
  return fmt::format("{}", fmt::join(parts, " "));
}

std::string EvalHelp() {
  return R"(usage: dropkv eval -m MODEL.gguf --out DIR [flags]
       dropkv eval report DIR... [flags]            tables and a page of results: dropkv eval report --help
Answers the questions of a suite from the full cache and from every policy at every budget, one prefill a sample.
Rows go to DIR/results.jsonl; the same command again goes on where a stopped run was.

  -m, --model FILE        GGUF model
      --suite NAME        ruler (default): generated, the 13 tasks;   longbench: the official files (--data)
                          FILE.jsonl: samples in RULER's form;   any other file: a text, for fidelity alone
      --tasks LIST        tasks of the suite (all)
      --length LIST       ruler, texts: tokens of prompt and answer: 4096,8192   (4096)
      --samples N         of each task and length (ruler 10, else all that there are; 0: all)
      --seed S            of generated samples and of the random policy (42)
      --data DIR          texts, word lists and suites' files, layout in docs/eval.md (DROPKV_DATA)
      --policies LIST     names of `dropkv policies`; all, tier1 (adadropkv,dropkv,snapkv); full always runs
      --budgets LIST      shares of the tokens KEPT, or tokens per KV head (5%,10%,30%)
      --heads LIST        uniform, ada, ada-o: every policy that takes it with each (each policy's own)
      --window W, --pool K|B,F, --sink S              for every policy that has them; as in `dropkv run`
      --own-settings      each policy its own window, pooling and sinks; else those of the first one
      --question LIST     seen: the whole prompt is evicted;   hidden: the context alone, before the question (seen)
      --fidelity N        also forces up to N tokens of the full cache's answer: KL divergence and top-1 agreement
                          of a text: tokens of its continuation (64)
      --out DIR           folder of the results
      --batch N           keep lists of a sample that are decoded together (16; 1: one after the other)
      --time SECONDS      starts no sample that would end later
      --max-length N      longbench: longer prompts lose their middle (what the context holds, at most 31500)
      --ctx N             most tokens of prompt and answer (what the model was trained for)
      --skip-too-long     leaves samples out that the context does not hold; else they are an error
      --kv TYPE           cache type f16, f32, q8_0 (f16);    --fa on|off  flash attention (on)
      --gpu-layers N      as in `dropkv run`: all where there is a GPU (-1)
      --raw               no chat template;   --ignore-eos  answers go on to their longest;   --threads N
)";
}

}  // namespace dropkv::cli
