// Rows for the tests of the report, written by hand.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eval/report/report.h"

namespace dropkv::eval {

inline Row MadeRow(const std::string& task, const std::string& id, const std::string& setting,
                   const std::string& budget, double score) {
  Row row;
  row.suite = "ruler";
  row.task = task;
  row.id = id;
  row.length = 4096;
  row.prompt_hash = "hash of " + id;
  row.prompt_tokens = 1000;
  row.setting = setting;
  row.policy = setting;
  row.budget = budget;
  row.answer = "answer";
  row.score = score;
  row.kept = setting == "full" ? std::vector<KeptTokens>{{1000, 1000, 1000}} : std::vector<KeptTokens>{{90, 100, 110}};
  return row;
}

inline RunRecord MadeRun(const std::string& model, const std::string& hash) {
  RunRecord run;
  run.model = model;
  run.model_file = model + ".gguf";
  run.model_sha256 = hash;
  return run;
}

inline Results MadeResults(std::vector<Row> rows) {
  Results results;
  results.runs = {MadeRun("model", "aa")};
  results.run_of.assign(rows.size(), 0);
  results.rows = std::move(rows);
  return results;
}

// Two folders of one model that differ in tasks, data and command, as one process a task leaves them; the second is
// unfinished.
inline Results MadeTwoFolders() {
  Results results = MadeResults({MadeRow("vt", "1", "full", "100%", 0.8), MadeRow("vt", "2", "full", "100%", 0.8),
                                 MadeRow("cwe", "1", "full", "100%", 0.4)});
  RunRecord& first = results.runs.front();
  first.kv_type = "f16";
  first.seed = 42;
  first.questions = {"seen"};
  first.haystack = "none";
  RunRecord second = first;
  first.tasks = {"vt"};
  first.data = "words/a.txt " + std::string(64, 'a') + " 10\nwords/b.txt " + std::string(64, 'b') + " 20\n";
  first.threads = 1;
  first.command = "dropkv eval -m /a/model.gguf --tasks vt --out /r/vt";
  second.tasks = {"cwe"};
  second.data = "words/b.txt " + std::string(64, 'b') + " 20\nessay.txt " + std::string(64, 'e') + " 30\n";
  second.haystack = "essay.txt";
  second.threads = 4;
  second.command = "dropkv eval -m /a/model.gguf --tasks cwe --out /r/cwe";
  results.runs.push_back(second);
  results.run_of.back() = 1;
  return results;
}

}  // namespace dropkv::eval
