#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "eval/ruler/corpus.h"

namespace dropkv::eval {
namespace {

using Json = nlohmann::json;

// Documents by their text, those of earlier files included.
class Documents {
 public:
  explicit Documents(std::vector<std::string>& texts) : texts_(texts) {
    for (uint32_t i = 0; i < texts.size(); ++i) index_.emplace(texts[i], i);
  }

  uint32_t Add(const std::string& text) {
    const auto [found, added] = index_.emplace(text, static_cast<uint32_t>(texts_.size()));
    if (added) texts_.push_back(text);
    return found->second;
  }

 private:
  std::vector<std::string>& texts_;
  std::unordered_map<std::string, uint32_t> index_;
};

void AddOnce(std::vector<uint32_t>& documents, uint32_t document) {
  if (std::find(documents.begin(), documents.end(), document) == documents.end()) documents.push_back(document);
}

void AddSquadQuestion(const Json& json, uint32_t gold, uint32_t group, QaSet& set) {
  if (json.value("is_impossible", false)) return;
  QaQuestion question{FoldWhiteSpace(json.at("question").get<std::string>()), {}, {gold}, group};
  for (const Json& answer : json.at("answers")) {
    std::string text = answer.at("text").get<std::string>();
    if (!text.empty() && std::find(question.answers.begin(), question.answers.end(), text) == question.answers.end()) {
      question.answers.push_back(std::move(text));
    }
  }
  if (!question.answers.empty() && !question.text.empty()) set.questions.push_back(std::move(question));
}

void AddHotpotQuestion(const Json& json, Documents& documents, QaSet& set) {
  QaQuestion question{FoldWhiteSpace(json.at("question").get<std::string>()),
                      {json.at("answer").get<std::string>()},
                      {},
                      static_cast<uint32_t>(set.groups.size())};
  std::vector<std::string> supporting;
  if (json.contains("supporting_facts")) {
    for (const Json& fact : json.at("supporting_facts")) supporting.push_back(fact.at(0).get<std::string>());
  }
  std::vector<uint32_t> group;
  for (const Json& paragraph : json.at("context")) {
    const auto title = paragraph.at(0).get<std::string>();
    std::string text = title + "\n";
    for (const Json& sentence : paragraph.at(1)) text += sentence.get<std::string>();
    const uint32_t document = documents.Add(text);
    AddOnce(group, document);
    if (std::find(supporting.begin(), supporting.end(), title) != supporting.end()) AddOnce(question.gold, document);
  }
  if (question.gold.empty()) question.gold = group;
  set.groups.push_back(std::move(group));
  const bool usable = !question.answers[0].empty() && !question.text.empty() && !question.gold.empty();
  if (usable) set.questions.push_back(std::move(question));
}

Status NotInForm(const std::string& name, const std::string& form, const std::string& where, const std::string& why) {
  return InvalidArgument(fmt::format("{}: expected {}; {}: {}", name, form, where, why));
}

}  // namespace

Status AddSquad(const std::string& name, const std::string& json, QaSet& set) {
  size_t article = 0;
  size_t paragraph = 0;
  try {
    Documents documents(set.documents);
    const Json root = Json::parse(json);
    for (const Json& each_article : root.at("data")) {
      const auto group = static_cast<uint32_t>(set.groups.size());
      set.groups.emplace_back();
      paragraph = 0;
      for (const Json& each : each_article.at("paragraphs")) {
        const uint32_t gold = documents.Add(each.at("context").get<std::string>());
        AddOnce(set.groups[group], gold);
        for (const Json& question : each.at("qas")) AddSquadQuestion(question, gold, group, set);
        ++paragraph;
      }
      ++article;
    }
  } catch (const Json::exception& error) {
    return NotInForm(name, R"(SQuAD's form {"data": [{"paragraphs": [{"context", "qas": [...]}]}]})",
                     fmt::format("data[{}].paragraphs[{}]", article, paragraph), error.what());
  }
  return {};
}

Status AddHotpotQa(const std::string& name, const std::string& json, QaSet& set) {
  size_t question = 0;
  const std::string form = R"(HotpotQA's form [{"question", "answer", "supporting_facts", "context"}])";
  try {
    Documents documents(set.documents);
    const Json root = Json::parse(json);
    if (!root.is_array()) return NotInForm(name, form, "the file", "not a list");
    for (const Json& each : root) {
      AddHotpotQuestion(each, documents, set);
      ++question;
    }
  } catch (const Json::exception& error) {
    return NotInForm(name, form, fmt::format("question {}", question), error.what());
  }
  return {};
}

}  // namespace dropkv::eval
