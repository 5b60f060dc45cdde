#include <nlohmann/json.hpp>

#include "eval/report/report.h"

namespace dropkv::eval {
namespace {

using Json = nlohmann::ordered_json;

Json EstimateJson(const std::optional<Estimate>& estimate) {
  if (!estimate) return nullptr;
  Json json = {{"value", estimate->value}, {"samples", estimate->samples}, {"interval", nullptr}};
  if (estimate->interval) json["interval"] = {estimate->interval->low, estimate->interval->high};
  return json;
}

Json CellJson(const Cell& cell) {
  Json tasks = Json::object();
  for (const auto& [task, score] : cell.tasks) tasks[task] = {{"score", score.score}, {"samples", score.samples}};
  return {{"setting", cell.setting},
          {"budget", cell.budget},
          {"score", EstimateJson(cell.score)},
          {"category_score", EstimateJson(cell.category_score)},
          {"minus_full", EstimateJson(cell.minus_full)},
          {"minus_against", EstimateJson(cell.minus_against)},
          {"kl", EstimateJson(cell.kl)},
          {"kl_minus_against", EstimateJson(cell.kl_minus_against)},
          {"top1", EstimateJson(cell.top1)},
          {"tasks", std::move(tasks)},
          {"kept", {{"min", cell.kept_min}, {"mean", cell.kept_mean}, {"max", cell.kept_max}}},
          {"kept_share", cell.kept_share},
          {"output_error", cell.output_error},
          {"prefill_s", cell.prefill_s},
          {"score_s", cell.score_s},
          {"compact_s", cell.compact_s},
          {"decode_s", cell.decode_s}};
}

Json SliceJson(const Slice& slice) {
  Json cells = Json::array();
  if (slice.full) cells.push_back(CellJson(*slice.full));
  for (const Cell& cell : slice.cells) cells.push_back(CellJson(cell));
  return {{"suite", slice.suite},
          {"length", slice.length},
          {"question", slice.hidden ? "hidden" : "seen"},
          {"samples", slice.samples},
          {"cells", std::move(cells)}};
}

}  // namespace

std::string JsonReport(const Summary& summary) {
  Json models = Json::array();
  for (const ModelSummary& model : summary.models) {
    Json slices = Json::array();
    for (const Slice& slice : model.slices) slices.push_back(SliceJson(slice));
    Json hashes = Json::array();
    for (const RunRecord& run : model.runs) hashes.push_back(run.model_sha256);
    models.push_back({{"model", model.label}, {"sha256", std::move(hashes)}, {"slices", std::move(slices)}});
  }
  const Json json = {{"against", summary.against}, {"models", std::move(models)}, {"remarks", summary.remarks}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace dropkv::eval
