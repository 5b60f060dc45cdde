#include "eval/longbench/tasks.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "eval/longbench/longbench.h"

namespace dropkv::eval {
namespace {

constexpr std::string_view kSingle = "single-document QA";
constexpr std::string_view kMulti = "multi-document QA";
constexpr std::string_view kSummary = "summarisation";
constexpr std::string_view kFewShot = "few-shot";
constexpr std::string_view kSynthetic = "synthetic";
constexpr std::string_view kCode = "code";

// Prompts for where the official templates are missing: their structure (instruction, context, the instruction again,
// input), not their words.
constexpr std::string_view kStory =
    "Below is a story (a book or a film script). Afterwards a question about it is asked.\n\nStory: {context}\n\n"
    "Give the shortest answer to the question that the story allows, without reasons.\n\nQuestion: {input}\n\nAnswer:";
constexpr std::string_view kPaper =
    "Below is a research paper. Afterwards a question about it is asked.\n\nPaper: {context}\n\n"
    "Give a short answer to the question from the paper alone, without reasons. Where the paper does not answer it, "
    "say "
    "\"unanswerable\"; to a question of yes or no say \"yes\", \"no\" or \"unanswerable\".\n\nQuestion: {input}\n\n"
    "Answer:";
constexpr std::string_view kText =
    "Read this text; a question about it follows.\n\n{context}\n\nAnswer the question from the text. Write the answer "
    "and nothing else.\n\nQuestion: {input}\nAnswer:";
constexpr std::string_view kPassages =
    "Read these passages; a question about them follows. Write its answer and nothing else.\n\nPassages:\n{context}\n\n"
    "Answer the question from the passages. Write the answer and nothing else.\n\nQuestion: {input}\nAnswer:";
constexpr std::string_view kReport =
    "Below is a government report. Summarise it on one page.\n\nReport:\n{context}\n\nSummarise the report on one "
    "page.\n\nSummary:";
constexpr std::string_view kMeeting =
    "Below is the transcript of a meeting. Afterwards something about it is asked.\n\nTranscript:\n{context}\n\n"
    "Answer from the transcript, in one sentence or a few.\n\nQuery: {input}\nAnswer:";
constexpr std::string_view kNews =
    "Below are news articles on one event. Summarise them on one page.\n\nNews:\n{context}\n\nSummarise all the news "
    "on "
    "one page.\n\nSummary:";
constexpr std::string_view kQuestionTypes =
    "Name the type of the last question. The questions before it show how.\n\n{context}\n{input}";
constexpr std::string_view kTrivia =
    "Answer the last question from its passage. Write the answer and nothing else, as these examples "
    "do.\n\n{context}\n\n"
    "{input}";
constexpr std::string_view kDialogue =
    "Sum up the last dialogue in a few short sentences, as these examples do.\n\n{context}\n\n{input}";
constexpr std::string_view kDistinct =
    "Below are numbered paragraphs; some are repeated. Count how many different paragraphs there are.\n\n{context}\n\n"
    "Write the number of different paragraphs, as digits and nothing else.\n\nThe final answer is: ";
constexpr std::string_view kAbstract =
    "Below are 30 numbered paragraphs, and after them the abstract of one. Find out of which.\n\n{context}\n\n"
    "Abstract:\n\n{input}\n\nWrite the number of the abstract's paragraph like this: \"Paragraph 1\".\n\nThe answer "
    "is: ";
constexpr std::string_view kNextLine = "Go on with this code. \n{context}Next line of code:\n";
constexpr std::string_view kNextLineAcross = "Go on with this code. \n{context}{input}Next line of code:\n";

using enum Metric;
constexpr auto kTasks = std::to_array<LongBenchTask>({
    // name, category, metric, tokens, chat template, first line, stop at newline, samples, of LongBench-E, template
    {"narrativeqa", kSingle, kF1, 128, true, false, false, 200, 0, kStory},
    {"qasper", kSingle, kF1, 128, true, false, false, 200, 224, kPaper},
    {"multifieldqa_en", kSingle, kF1, 64, true, false, false, 150, 150, kText},
    {"hotpotqa", kMulti, kF1, 32, true, false, false, 200, 300, kPassages},
    {"2wikimqa", kMulti, kF1, 32, true, false, false, 200, 300, kPassages},
    {"musique", kMulti, kF1, 32, true, false, false, 200, 0, kPassages},
    {"gov_report", kSummary, kRougeL, 512, true, false, false, 200, 300, kReport},
    {"qmsum", kSummary, kRougeL, 512, true, false, false, 200, 0, kMeeting},
    {"multi_news", kSummary, kRougeL, 512, true, false, false, 200, 294, kNews},
    {"trec", kFewShot, kClassification, 64, false, true, false, 200, 300, kQuestionTypes},
    {"triviaqa", kFewShot, kF1, 32, false, true, false, 200, 300, kTrivia},
    {"samsum", kFewShot, kRougeL, 128, false, true, true, 200, 300, kDialogue},
    {"passage_count", kSynthetic, kCount, 32, true, false, false, 200, 300, kDistinct},
    {"passage_retrieval_en", kSynthetic, kRetrieval, 32, true, false, false, 200, 300, kAbstract},
    {"lcc", kCode, kEditSimilarity, 64, false, false, false, 500, 300, kNextLine},
    {"repobench-p", kCode, kEditSimilarity, 64, false, false, false, 500, 300, kNextLineAcross},
});

constexpr auto kNames = [] {
  std::array<std::string_view, kTasks.size()> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kTasks[i].name;
  return names;
}();

}  // namespace

std::span<const LongBenchTask> LongBenchTaskTable() { return kTasks; }

std::span<const std::string_view> LongBenchTasks() { return kNames; }

const LongBenchTask* FindLongBenchTask(std::string_view name) {
  const auto* task = std::find_if(kTasks.begin(), kTasks.end(), [&](const auto& t) { return t.name == name; });
  return task == kTasks.end() ? nullptr : task;
}

}  // namespace dropkv::eval
