// run.json: what the results of a folder were made from, and whether a further run may add to them.
#pragma once

#include <optional>
#include <string>

#include "dropkv/status.h"
#include "eval/row.h"

namespace dropkv::eval {

// "0.1.0 (1a2b3c4d5e6f)", "+" behind the revision where the tree had changes; without one outside a git checkout.
std::string DropKvVersion();

// "0.5.0, ggml 0.9.4 (0c1e570)", of the libraries that are loaded.
std::string LlamaVersion();

// CPU, cores, memory and the devices that ggml found.
std::string Machine();

// UTC now, ISO 8601.
std::string Now();

// Nothing where the folder has no run.json.
Result<std::optional<RunRecord>> ReadRecord(const std::string& folder);

// Replaces the file in one step.
Status WriteRecord(const std::string& folder, const RunRecord& record);

// The record of both runs: lists are united, the first start stays. An error that names the first field whose
// difference would change results: model, libllama, cache, template, data, ...; machine, threads and revision may
// differ.
Result<RunRecord> MergeRecords(const std::string& folder, const RunRecord& before, const RunRecord& now);

}  // namespace dropkv::eval
