#include "eval/ruler/ruler_test_case.h"
#include "io/sha256.h"

namespace dropkv::eval {
namespace {

// Every byte that a run depends on.
std::string Bytes(const Sample& sample) {
  std::string bytes = sample.suite + "|" + sample.task + "|" + sample.id + "|" + std::to_string(sample.length) + "|" +
                      sample.context + "|" + sample.question + "|" + sample.prefix;
  for (const std::string& reference : sample.references) bytes += "|" + reference;
  for (const double depth : sample.depths) bytes += "|" + std::to_string(depth);
  return bytes;
}

RulerOptions AllTasks(int32_t length) {
  RulerOptions options;
  options.tasks = WithoutQuestions();
  options.lengths = {length};
  options.samples = 2;
  return options;
}

// One task of every way to make a prompt.
std::vector<std::string> OneOfEachKind() {
  return {"niah_single_1", "niah_multivalue", "niah_multikey_2", "vt", "cwe", "fwe"};
}

TEST(Generate, TaskListIsTheOfficialOne) {
  EXPECT_EQ(RulerTasks().size(), 13U);
  EXPECT_EQ(RulerTasks().front(), "niah_single_1");
  EXPECT_EQ(RulerTasks().back(), "qa_2");
  for (const std::string_view task : RulerTasks()) EXPECT_EQ(FindRulerTask(task)->name, task);
  EXPECT_EQ(FindRulerTask("niah"), nullptr);
}

TEST(Generate, SampleFields) {
  const RulerSet set = Generate(AllTasks(2048));
  ASSERT_EQ(set.samples.size(), 22U);
  EXPECT_NE(set.haystack.find("built-in prose"), std::string::npos);
  EXPECT_EQ(set.data, "");
  for (size_t i = 0; i < set.samples.size(); ++i) {
    const Sample& sample = set.samples[i];
    EXPECT_EQ(sample.suite, "ruler");
    EXPECT_EQ(sample.task, WithoutQuestions()[i / 2]);
    EXPECT_EQ(sample.id, std::to_string(i % 2));
    EXPECT_EQ(sample.length, 2048);
    EXPECT_EQ(sample.metric, Metric::kStringMatchAll);
    const std::string& task = sample.task;
    EXPECT_EQ(sample.max_tokens, task == "vt" ? 30 : task == "cwe" ? 120 : task == "fwe" ? 50 : 128) << task;
    EXPECT_TRUE(sample.context.ends_with('\n')) << task;
    EXPECT_EQ(sample.question.find('\n'), std::string::npos) << task;
    EXPECT_TRUE(sample.prefix.starts_with(' ')) << task;
    EXPECT_TRUE(sample.chat_template);
    EXPECT_FALSE(sample.first_line);
  }
}

TEST(Generate, TheTemplatesTokensAreKeptFree) {
  RulerOptions options = AllTasks(2048);
  options.template_tokens = 300;
  for (const Sample& sample : Generate(options).samples) ExpectFits(sample, CountPieces, 300);
}

// A tokenizer by whose count a longer prompt may be the shorter one.
TEST(Generate, FitsByCountsThatJump) {
  RulerOptions options = AllTasks(3000);
  options.samples = 4;
  for (const Sample& sample : Generate(options, CountJumpily).samples) ExpectFits(sample, CountJumpily);
}

TEST(Generate, SameSeedSameBytes) {
  const RulerOptions options = AllTasks(2048);
  const RulerSet one = Generate(options);
  const RulerSet two = Generate(options);
  ASSERT_EQ(one.samples.size(), two.samples.size());
  for (size_t i = 0; i < one.samples.size(); ++i) EXPECT_EQ(Bytes(one.samples[i]), Bytes(two.samples[i]));
}

// Results of one version can be set beside those of another while this holds; a change of it belongs in the notes.
TEST(Generate, BytesOfThisVersion) {
  std::string bytes;
  for (const Sample& sample : Generate(AllTasks(2048)).samples) bytes += Bytes(sample);
  EXPECT_EQ(io::Sha256Text(bytes), "b37aa993e407130af6163f705b714216578d5977c1d41fa3327396f8783664ac");
}

TEST(Generate, AnotherSeedGivesOtherSamples) {
  RulerOptions options = AllTasks(2048);
  const RulerSet one = Generate(options);
  options.seed = 43;
  const RulerSet two = Generate(options);
  for (size_t i = 0; i < one.samples.size(); ++i) {
    EXPECT_NE(one.samples[i].context, two.samples[i].context);
    EXPECT_NE(one.samples[i].references, two.samples[i].references);
    if (i % 2 == 1) EXPECT_NE(one.samples[i].references, one.samples[i - 1].references);
  }
}

// A sample is the same whatever else is asked for.
TEST(Generate, SamplesDoNotDependOnEachOther) {
  RulerOptions all = AllTasks(2048);
  all.tasks = OneOfEachKind();
  all.lengths = {1500, 2048};
  all.samples = 3;
  const RulerSet set = Generate(all);
  for (const std::string& task : all.tasks) {
    RulerOptions one = all;
    one.tasks = {task};
    one.lengths = {2048};
    one.samples = 2;
    const RulerSet alone = Generate(one);
    for (const Sample& sample : alone.samples) {
      const auto same = std::find_if(set.samples.begin(), set.samples.end(), [&](const Sample& each) {
        return each.task == task && each.length == 2048 && each.id == sample.id;
      });
      ASSERT_NE(same, set.samples.end());
      EXPECT_EQ(Bytes(*same), Bytes(sample)) << task;
    }
  }
}

TEST(Generate, FewCountsOfTheWholeText) {
  RulerOptions options = AllTasks(kLongTest);
  options.samples = 1;
  for (const std::string& task : OneOfEachKind()) {
    options.tasks = {task};
    size_t bytes = 0;
    const RulerSet set = Generate(options, [&](std::string_view text) {
      bytes += text.size();
      return CountPieces(text);
    });
    EXPECT_LE(static_cast<double>(bytes), 6.5 * static_cast<double>(PromptOf(set.samples.at(0)).size())) << task;
  }
}

TEST(Generate, LengthsThatAreTooShortAreErrors) {
  for (const std::string& task : OneOfEachKind()) {
    RulerOptions options = AllTasks(160);
    options.tasks = {task};
    ExpectError(GenerateRuler(options, CountPieces), Code::kInvalidArgument, {"length 160", task, "tokens at least"});
  }
}

// The least length that the error names is enough.
TEST(Generate, TheLeastLengthIsEnough) {
  RulerOptions options = AllTasks(160);
  options.tasks = {"vt"};
  options.samples = 1;
  const std::string message = GenerateRuler(options, CountPieces).status().message();
  const size_t at = message.find("takes ");
  ASSERT_NE(at, std::string::npos) << message;
  const int32_t least = std::stoi(message.substr(at + 6));
  options.lengths = {least};
  EXPECT_TRUE(GenerateRuler(options, CountPieces).ok());
  options.lengths = {least - 1};
  EXPECT_FALSE(GenerateRuler(options, CountPieces).ok());
}

TEST(Generate, WrongOptionsAreErrors) {
  const auto error = [](auto change, Code code, const std::vector<std::string>& parts) {
    RulerOptions options = AllTasks(2048);
    change(options);
    ExpectError(GenerateRuler(options, CountPieces), code, parts);
  };
  error([](RulerOptions& o) { o.tasks = {"vt", "niah"}; }, Code::kNotFound, {"task niah", "niah_single_1", "qa_2"});
  error([](RulerOptions& o) { o.tasks = {"vt", "cwe", "vt"}; }, Code::kInvalidArgument, {"vt is named twice"});
  error([](RulerOptions& o) { o.tasks = {}; }, Code::kInvalidArgument, {"tasks"});
  error([](RulerOptions& o) { o.lengths = {}; }, Code::kInvalidArgument, {"lengths"});
  error([](RulerOptions& o) { o.lengths = {2048, -1}; }, Code::kInvalidArgument, {"length -1"});
  error([](RulerOptions& o) { o.lengths = {2048, 2048}; }, Code::kInvalidArgument, {"2048 is named twice"});
  error([](RulerOptions& o) { o.samples = 0; }, Code::kInvalidArgument, {"samples", "0"});
  error([](RulerOptions& o) { o.template_tokens = -5; }, Code::kInvalidArgument, {"template tokens", "-5"});
  error([](RulerOptions& o) { o.template_tokens = 2000; }, Code::kInvalidArgument, {"length 2048", "too short"});
  error([](RulerOptions& o) { o.data = "/no/such/folder"; }, Code::kNotFound, {"/no/such/folder"});
  ExpectError(GenerateRuler(AllTasks(2048), nullptr), Code::kInvalidArgument, {"token counter"});
  ExpectError(GenerateRuler(AllTasks(2048), [](std::string_view) { return -1; }), Code::kInternal, {"tokenizer"});
}

}  // namespace
}  // namespace dropkv::eval
