#include "eval/ruler/corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "eval/ruler/prose.h"
#include "io/sha256.h"

namespace dropkv::eval {
namespace {

namespace fs = std::filesystem;

constexpr size_t kFewestKeys = 1000;  // pairs of an adjective and a noun
constexpr size_t kFewestWords = 100;  // that cwe's example and list are made of
constexpr const char* kEssayFile = "PaulGrahamEssays.json";

// The data folder, and what was read of it. A part may lie in the folder or in its folder "ruler".
class DataFolder {
 public:
  explicit DataFolder(const std::string& root) : root_(root) {}

  bool given() const { return !root_.empty(); }
  const std::string& files() const { return files_; }

  // The first of these files that exists; empty: none.
  fs::path File(const std::vector<std::string>& names) const {
    for (const fs::path& base : Bases()) {
      for (const std::string& name : names) {
        std::error_code error;
        if (fs::is_regular_file(base / name, error)) return base / name;
      }
    }
    return {};
  }

  // Files of that extension below a folder, sorted by path.
  std::vector<fs::path> Files(const std::string& folder, const std::string& extension) const {
    std::vector<fs::path> files;
    for (const fs::path& base : Bases()) {
      std::error_code error;
      fs::recursive_directory_iterator it(base / folder, error);
      for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
        if (it->path().extension() == extension && it->is_regular_file(error)) files.push_back(it->path());
      }
      if (!files.empty()) break;
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  std::string Name(const fs::path& path) const { return path.lexically_relative(root_).generic_string(); }

  // The bytes of a file, which is noted as read.
  Result<std::string> Read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file.good() && !file.eof()) return Status(Code::kIo, fmt::format("{}: cannot be read", path.string()));
    files_ += fmt::format("{} {} {}\n", Name(path), io::Sha256Text(bytes), bytes.size());
    return bytes;
  }

 private:
  std::vector<fs::path> Bases() const {
    if (!given()) return {};
    return {root_, root_ / "ruler"};
  }

  fs::path root_;
  std::string files_;
};

Result<std::string> ReadText(DataFolder& data, const fs::path& path) {
  Result<std::string> text = data.Read(path);
  if (!text.ok()) return text;
  if (text->starts_with("\xEF\xBB\xBF")) text->erase(0, 3);
  if (const size_t bad = FirstInvalidUtf8(*text); bad < text->size()) {
    return InvalidArgument(fmt::format("{}: expected UTF-8, byte {} is not", path.string(), bad));
  }
  return text;
}

Result<std::string> ReadEssayFile(DataFolder& data, const fs::path& path) {
  Result<std::string> bytes = data.Read(path);
  if (!bytes.ok()) return bytes;
  try {
    return nlohmann::json::parse(*bytes).at("text").get<std::string>();
  } catch (const nlohmann::json::exception& error) {
    return InvalidArgument(fmt::format("{}: expected {{\"text\": \"...\"}}: {}", path.string(), error.what()));
  }
}

Status LoadEssay(DataFolder& data, Corpus& corpus) {
  std::string text;
  const fs::path official = data.File({kEssayFile, fmt::format("haystack/{}", kEssayFile)});
  const std::vector<fs::path> files = data.Files("haystack", ".txt");
  if (!official.empty()) {
    Result<std::string> essays = ReadEssayFile(data, official);
    if (!essays.ok()) return essays.status();
    text = std::move(*essays);
    corpus.essay_name = data.Name(official);
  } else if (!files.empty()) {
    for (const fs::path& file : files) {
      Result<std::string> each = ReadText(data, file);
      if (!each.ok()) return each.status();
      text += *each + "\n";
      corpus.essay_name += (corpus.essay_name.empty() ? "" : ", ") + data.Name(file);
    }
  } else {
    text = BuiltInProse(kProseSentences);
    corpus.essay_name = fmt::format("built-in prose ({} generated sentences)", kProseSentences);
  }
  corpus.essay = Haystack(text);
  if (corpus.essay.sentences() == 0) return InvalidArgument(fmt::format("{}: no text in it", corpus.essay_name));
  return {};
}

// The words of a list that goes by several names.
Result<std::vector<std::string>> LoadList(DataFolder& data, const std::vector<std::string>& names) {
  const fs::path path = data.File(names);
  if (path.empty()) return std::vector<std::string>{};
  Result<std::string> text = data.Read(path);
  if (!text.ok()) return text.status();
  return ReadWords(*text);
}

Status LoadWords(DataFolder& data, Corpus& corpus) {
  const std::vector<std::vector<std::string>> names = {{"words/nouns.txt", "words/nounlist.txt"},
                                                       {"words/adjectives.txt", "words/adjectivelist.txt"},
                                                       {"words/verbs.txt", "words/verblist.txt"}};
  std::vector<std::vector<std::string>> lists;
  for (const std::vector<std::string>& each : names) {
    Result<std::vector<std::string>> list = LoadList(data, each);
    if (!list.ok()) return list.status();
    lists.push_back(std::move(*list));
  }
  std::vector<fs::path> others = data.Files("words", ".txt");
  std::erase_if(others, [&](const fs::path& path) {
    return std::any_of(names.begin(), names.end(), [&](const auto& each) { return data.File(each) == path; });
  });
  if (const fs::path single = data.File({"words.txt"}); !single.empty()) others.push_back(single);
  WordLists& words = corpus.words;
  for (const fs::path& path : others) {
    Result<std::string> text = data.Read(path);
    if (!text.ok()) return text.status();
    std::vector<std::string> more = ReadWords(*text);
    words.further.insert(words.further.end(), more.begin(), more.end());
  }
  words.nouns = lists[0].empty() ? words.further : std::move(lists[0]);
  words.adjectives = lists[1].empty() ? words.further : std::move(lists[1]);
  if (words.nouns.empty() && words.adjectives.empty()) {
    words = BuiltInWords();
    return {};
  }
  MergeWords(lists[2], words);
  if (words.nouns.size() * words.adjectives.size() < kFewestKeys || words.common.size() < kFewestWords) {
    return InvalidArgument(fmt::format(
        "the word lists of the data folder: expected {} words that make {} pairs of adjective and noun, got {} nouns, "
        "{} adjectives, {} words in all",
        kFewestWords, kFewestKeys, words.nouns.size(), words.adjectives.size(), words.common.size()));
  }
  return {};
}

struct QaSource {
  std::string task;
  std::string official;  // RULER's name of the file
  std::string what;
  Status (*add)(const std::string& name, const std::string& json, QaSet& set);
};

Status LoadQa(DataFolder& data, const std::string& folder, const QaSource& source, QaSet& set) {
  std::vector<fs::path> files = data.Files(source.task, ".json");
  if (const fs::path official = data.File({source.official}); !official.empty()) files = {official};
  if (files.empty()) {
    return Status(Code::kNotFound,
                  fmt::format("{} needs {}: expected {} or {}/*.json in the data folder (or in its folder ruler), {}",
                              source.task, source.what, source.official, source.task,
                              data.given() ? fmt::format("found neither in {}", folder) : "no data folder was given"));
  }
  for (const fs::path& file : files) {
    Result<std::string> json = data.Read(file);
    if (!json.ok()) return json.status();
    DROPKV_RETURN_IF_ERROR(source.add(file.string(), *json, set));
  }
  return {};
}

}  // namespace

Result<Corpus> LoadCorpus(const std::string& folder, const CorpusParts& parts) {
  std::error_code error;
  if (!folder.empty() && !fs::is_directory(folder, error)) {
    return Status(Code::kNotFound, fmt::format("data folder {}: not a folder", folder));
  }
  DataFolder data(folder);
  Corpus corpus;
  corpus.essay_name = "none";
  if (parts.essay) {
    corpus.essay_name.clear();
    DROPKV_RETURN_IF_ERROR(LoadEssay(data, corpus));
  }
  if (parts.words) DROPKV_RETURN_IF_ERROR(LoadWords(data, corpus));
  if (parts.qa_1) {
    DROPKV_RETURN_IF_ERROR(LoadQa(data, folder, {"qa_1", "squad.json", "SQuAD questions", &AddSquad}, corpus.qa_1));
  }
  if (parts.qa_2) {
    DROPKV_RETURN_IF_ERROR(
        LoadQa(data, folder, {"qa_2", "hotpotqa.json", "HotpotQA questions", &AddHotpotQa}, corpus.qa_2));
  }
  corpus.files = data.files();
  return corpus;
}

}  // namespace dropkv::eval
