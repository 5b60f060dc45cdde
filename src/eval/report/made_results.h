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

}  // namespace dropkv::eval
