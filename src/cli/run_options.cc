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

namespace dropkv::cli {
namespace {

// Flags as typed, before they are understood.
struct Raw {
  std::string file;
  std::string budget = "10%";
  std::string policy = "adadropkv";
  std::string compare;
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

// The library names its own argument in front of a message ("budget: ...", "policy.window: ..."); the flag takes its
// place.
Status FlagStatus(const std::string& flag, const Status& status) {
  const size_t colon = status.message().find(": ");
  const bool named = colon != std::string::npos && status.message().find(' ') > colon;
  const std::string argument = named ? status.message().substr(0, colon) : "";
  const std::string text = named ? status.message().substr(colon + 2) : status.message();
  const size_t dot = argument.rfind('.');
  return {status.code(), (flag.empty() ? "--" + argument.substr(dot + 1) : flag) + ": " + text};
}

// A comma at the end leaves an empty last part, which no list accepts.
std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  if (text.ends_with(',')) parts.emplace_back();
  return parts;
}

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

// One of a fixed set of words.
template <typename T>
Status Choose(const std::string& flag, const std::string& value,
              std::initializer_list<std::pair<const char*, T>> choices, T* target) {
  std::string names;
  for (const auto& [name, choice] : choices) {
    if (value == name) {
      *target = choice;
      return Status::Ok();
    }
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return InvalidArgument(flag + ": expected one of " + names + ", got '" + value + "'");
}

// Flags first, then the settings that the compared policies share: window, pooling and sinks of the first policy named,
// so that only the score differs. StreamingLLM is its sinks, so it keeps its own unless --sink says otherwise.
Status Settle(const Raw& raw, std::vector<Policy>* policies) {
  std::optional<Pooling> pool;
  if (!raw.pool.empty()) {
    const Result<Pooling> parsed = ParsePooling(raw.pool);
    if (!parsed.ok()) return FlagStatus("--pool", parsed.status());
    pool = *parsed;
  }
  std::optional<HeadRule> heads;
  if (!raw.heads.empty()) {
    HeadRule rule = HeadRule::kUniform;
    DROPKV_RETURN_IF_ERROR(Choose<HeadRule>(
        "--heads", raw.heads, {{"uniform", HeadRule::kUniform}, {"ada", HeadRule::kAda}, {"ada-o", HeadRule::kAdaO}},
        &rule));
    heads = rule;
  }
  const auto first = std::find_if(policies->begin(), policies->end(),
                                  [](const Policy& policy) { return policy.signal != Signal::kFull; });
  const std::optional<Policy> shared =
      raw.own_settings || first == policies->end() ? std::nullopt : std::optional(*first);
  for (Policy& policy : *policies) {
    if (policy.signal == Signal::kFull) continue;
    const bool scored = policy.needs_queries();
    if (shared && shared->needs_queries() && scored) {
      policy.window = shared->window;
      policy.pool.kind = shared->pool.kind;
      policy.pool.before = shared->pool.before;
      policy.pool.after = shared->pool.after;
    }
    if (shared && policy.signal != Signal::kRecency) policy.sink = shared->sink;
    if (raw.window) policy.window = *raw.window;
    if (raw.sink) policy.sink = *raw.sink;
    if (raw.alpha) policy.alpha = *raw.alpha;
    if (heads) policy.heads = *heads;
    if (pool && scored) {
      policy.pool.kind = pool->kind;
      policy.pool.before = pool->before;
      policy.pool.after = pool->after;
    }
    const Status checked = CheckPolicy(policy);
    if (!checked.ok()) return FlagStatus("", checked);
  }
  return Status::Ok();
}

Status ChoosePolicies(const Raw& raw, uint32_t seed, RunOptions* options) {
  std::vector<std::string> names = {raw.policy};
  for (const std::string& name : SplitList(raw.compare)) names.push_back(name);
  for (size_t i = 0; i < names.size(); ++i) {
    Result<Policy> policy = FindPreset(names[i]);
    if (!policy.ok()) return FlagStatus(i == 0 ? "--policy" : "--compare", policy.status());
    const auto same = [&](const Policy& other) { return other.name == policy->name; };
    if (std::any_of(options->policies.begin(), options->policies.end(), same)) continue;
    policy->seed = seed;
    options->policies.push_back(std::move(*policy));
  }
  DROPKV_RETURN_IF_ERROR(Settle(raw, &options->policies));
  std::stable_partition(options->policies.begin(), options->policies.end(),
                        [](const Policy& policy) { return policy.signal == Signal::kFull; });
  return Status::Ok();
}

// Budgets that can be refused before a model is loaded: wrong text, counts below window + sink.
Status CheckBudgets(const Raw& raw, RunOptions* options) {
  options->budgets = SplitList(raw.budget);
  if (options->budgets.empty()) return InvalidArgument("--budget: expected a percentage or a count, got nothing");
  for (const std::string& text : options->budgets) {
    const Result<Budget> budget = ParseBudget(text);
    if (!budget.ok()) return FlagStatus("--budget", budget.status());
    for (const Policy& policy : options->policies) {
      if (policy.signal == Signal::kFull || budget->fraction) continue;
      const Result<KeepCount> count = ResolveBudget(*budget, policy, 1 << 20);
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
  app.add_option("--pool", raw.pool);
  app.add_option("--sink", raw.sink);
  app.add_option("--heads", raw.heads);
  app.add_option("--alpha", raw.alpha);
  app.add_option("--decode", raw.decode);
  app.add_option("--kv", raw.kv);
  app.add_option("--fa", raw.fa);
  app.add_option("--ctx", options.context);
  app.add_option("--threads", options.threads);
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
      --policy NAME       )" +
         PresetNames() + R"(
                          (adadropkv)
      --compare LIST      policies to run beside it, from the same prefill: full,snapkv
      --own-settings      compared policies keep their own window, pooling and sinks
      --window W          prompt rows that judge the tokens, 1..128; always kept
      --pool K|B,F        mean pooling: K wide (odd), or B tokens before and F after a hit; max:K, max:B,F
      --sink S            first tokens that are always kept
      --heads RULE        uniform, ada, ada-o: how the KV heads of a layer share the budget;   --alpha A (0.2)
      --decode WAY        auto, native (llama.cpp's attention, uniform heads), ragged (ours)
      --kv TYPE           cache type f16, f32, q8_0 (f16);    --fa on|off  flash attention (on)
      --ctx N             most tokens in all;   --threads N;   --max-tokens N (128);   --ignore-eos
      --temp T            0: greedy (0);        --seed N (0)
      --raw               no chat template;     --json  one object on standard output, nothing else
)";
}

}  // namespace dropkv::cli
