// Names of recipes: prefixes that wrap ("critical-", "ada0.2."), the name of a preset, and settings behind points.
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "baseline/presets.h"
#include "baseline/recipe.h"

namespace dropkv::baseline {
namespace {

constexpr double kCriticalEpsilon = 1e-4;
constexpr int32_t kChunk = 20;

// Reads the whole of `text`, or nothing.
template <typename T>
std::optional<T> ReadAll(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || text.front() == '-')
    return std::nullopt;
  return value;
}

// Takes digits, and a point with digits behind it, off the front: "0.2.knorm" leaves ".knorm".
std::optional<double> TakeNumber(std::string_view* text) {
  const auto digits = [&](size_t from) {
    size_t end = from;
    while (end < text->size() && (*text)[end] >= '0' && (*text)[end] <= '9') ++end;
    return end;
  };
  size_t end = digits(0);
  if (end > 0 && end < text->size() && (*text)[end] == '.' && digits(end + 1) > end + 1) end = digits(end + 1);
  const std::optional<double> value = ReadAll<double>(text->substr(0, end));
  if (value) text->remove_prefix(end);
  return value;
}

// What the prefixes of a name ask for.
struct Wrapping {
  bool critical = false;
  std::optional<HeadRule> heads;
  double alpha = 0.2;
  int32_t chunk = 0;
};

bool TakePrefix(std::string_view prefix, std::string_view* text) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

// "ada0.2." and "criticalada0.2.", which carry alpha.
bool TakeAlpha(std::string_view word, std::string_view* text, double* alpha) {
  std::string_view rest = *text;
  if (!TakePrefix(word, &rest)) return false;
  const std::optional<double> value = TakeNumber(&rest);
  if (!value || !TakePrefix(".", &rest)) return false;
  *alpha = *value;
  *text = rest;
  return true;
}

bool TakeChunk(std::string_view* text, int32_t* chunk) {
  std::string_view rest = *text;
  if (!TakePrefix("chunkkv.", &rest)) return false;
  const size_t point = rest.find('.');
  const std::optional<int32_t> tokens = ReadAll<int32_t>(rest.substr(0, point));
  if (!tokens || point == std::string_view::npos) return false;
  *chunk = *tokens;
  *text = rest.substr(point + 1);
  return true;
}

bool TakeWrapping(std::string_view* text, Wrapping* wrapping) {
  if (TakePrefix("criticalada-", text) || TakeAlpha("criticalada", text, &wrapping->alpha)) {
    wrapping->critical = true;
    wrapping->heads = HeadRule::kAda;
  } else if (TakePrefix("critical-", text) || TakePrefix("critical.", text)) {
    wrapping->critical = true;
  } else if (TakePrefix("ada-o-", text)) {
    wrapping->heads = HeadRule::kAdaO;
  } else if (TakePrefix("ada-", text) || TakeAlpha("ada", text, &wrapping->alpha)) {
    wrapping->heads = HeadRule::kAda;
  } else if (TakePrefix("chunk-", text)) {
    wrapping->chunk = kChunk;
  } else if (!TakeChunk(text, &wrapping->chunk)) {
    return false;
  }
  return true;
}

void Wrap(const Wrapping& wrapping, Recipe* recipe) {
  if (wrapping.critical) {
    recipe->critical = true;
    // The second stage has its own norm of the values, and its own epsilon.
    recipe->value_norm = recipe->value_norm && recipe->scorer != Scorer::kExpected;
    if (recipe->scorer != Scorer::kDropKvCompat) recipe->epsilon = kCriticalEpsilon;
  }
  if (wrapping.heads) {
    recipe->policy.heads = *wrapping.heads;
    recipe->policy.alpha = wrapping.alpha;
  }
  if (wrapping.chunk > 0) recipe->chunk = wrapping.chunk;
}

void SetCompat(Recipe* recipe) {
  recipe->scorer = Scorer::kDropKvCompat;
  recipe->epsilon = 1e-6;
}

// A part without a number. False: it means nothing to this recipe.
bool ApplyWord(std::string_view word, Recipe* recipe) {
  const bool cur = recipe->scorer == Scorer::kCur;
  const bool obcache = recipe->scorer == Scorer::kObCache;
  if (word == "raw") {
    recipe->policy.pool = kNoPooling;
  } else if (word == "exact" && recipe->scorer == Scorer::kDropKv) {
    return true;
  } else if (word == "compat" && recipe->scorer == Scorer::kDropKv) {
    SetCompat(recipe);
  } else if (word == "cross" && recipe->scorer == Scorer::kLag) {
    recipe->cross = true;
  } else if (word == "nocov" && recipe->scorer == Scorer::kExpected) {
    recipe->covariance = false;
  } else if (word == "novnorm" && recipe->scorer == Scorer::kExpected) {
    recipe->value_norm = false;
  } else if (word == "exactbias" && recipe->scorer == Scorer::kDefensive) {
    recipe->exact_bias = true;
  } else if (word == "key" && cur) {
    recipe->cur = CurForm::kKey;
  } else if (word == "value" && cur) {
    recipe->cur = CurForm::kValue;
  } else if (word == "key" && obcache) {
    recipe->obcache = ObCacheForm::kKey;
  } else if (word == "value" && obcache) {
    recipe->obcache = ObCacheForm::kValue;
  } else if (word == "kv_avg" && cur) {
    recipe->cur = CurForm::kMean;
  } else if (word == "global" && cur) {
    recipe->block = 0;
  } else {
    return false;
  }
  return true;
}

// "7" or "5+31" behind k, mean or max.
bool ReadReach(std::string_view text, Pooling* pool) {
  const size_t plus = text.find('+');
  if (plus == std::string_view::npos) {
    const std::optional<int32_t> width = ReadAll<int32_t>(text);
    if (!width || *width % 2 == 0) return false;
    pool->before = pool->after = (*width - 1) / 2;
    return true;
  }
  const std::optional<int32_t> before = ReadAll<int32_t>(text.substr(0, plus));
  const std::optional<int32_t> after = ReadAll<int32_t>(text.substr(plus + 1));
  if (!before || !after) return false;
  pool->before = *before;
  pool->after = *after;
  return true;
}

bool ApplyPooling(std::string_view part, Recipe* recipe) {
  Pooling pool = recipe->policy.pool;
  if (TakePrefix("mean", &part)) {
    pool.kind = PoolKind::kMean;
  } else if (TakePrefix("max", &part)) {
    pool.kind = PoolKind::kMax;
  } else if (!TakePrefix("k", &part)) {
    return false;
  }
  if (!ReadReach(part, &pool)) return false;
  recipe->policy.pool = pool;
  return true;
}

// Where "lag16", "chunk64" or "block128" goes; null: nowhere.
int32_t* BlockField(std::string_view word, Recipe* recipe) {
  const Scorer scorer = recipe->scorer;
  if (word == "lag" && scorer == Scorer::kLag) return &recipe->block;
  if (word == "block" && (scorer == Scorer::kKeyDiff || scorer == Scorer::kCur)) return &recipe->block;
  if (word == "rows" && scorer == Scorer::kVatp) return &recipe->block;
  if (word != "chunk") return nullptr;
  if (scorer == Scorer::kCompactor || scorer == Scorer::kLocalAttention) return &recipe->block;
  return scorer == Scorer::kProjectionCode || recipe->chunk > 0 ? &recipe->chunk : nullptr;
}

bool ApplyCount(std::string_view word, int32_t value, Recipe* recipe) {
  int32_t* field = BlockField(word, recipe);
  if (word == "w") field = &recipe->policy.window;
  if (word == "sink") field = &recipe->policy.sink;
  if (word == "recent") field = &recipe->recent;
  if (word == "future" && (recipe->scorer == Scorer::kExpected || recipe->scorer == Scorer::kCapKv))
    field = &recipe->future;
  if (word == "sketch" && recipe->scorer == Scorer::kCompactor) field = &recipe->sketch;
  if (field == nullptr) return false;
  *field = value;
  return true;
}

bool ApplyReal(std::string_view word, double value, Recipe* recipe) {
  double* field = nullptr;
  if (word == "eps" &&
      (recipe->critical || recipe->scorer == Scorer::kExpected || recipe->scorer == Scorer::kDropKvCompat))
    field = &recipe->epsilon;
  if (word == "gamma" && recipe->scorer == Scorer::kVariance) field = &recipe->gamma;
  if (word == "beta" && (recipe->layers == LayerRule::kPyramid || recipe->layers == LayerRule::kPyramidOriginal))
    field = &recipe->pyramid_beta;
  if (field == nullptr) return false;
  *field = value;
  return true;
}

bool ApplyPart(std::string_view part, Recipe* recipe) {
  if (ApplyWord(part, recipe) || ApplyPooling(part, recipe)) return true;
  const size_t digit = part.find_first_of("0123456789");
  if (digit == 0 || digit == std::string_view::npos) return false;
  const std::string_view word = part.substr(0, digit);
  const std::string_view number = part.substr(digit);
  if (const std::optional<int32_t> count = ReadAll<int32_t>(number); count && ApplyCount(word, *count, recipe))
    return true;
  if (word == "seed" && (recipe->scorer == Scorer::kRandom || recipe->scorer == Scorer::kCompactor)) {
    const std::optional<uint64_t> seed = ReadAll<uint64_t>(number);
    if (seed) recipe->policy.seed = *seed;
    return seed.has_value();
  }
  const std::optional<double> real = ReadAll<double>(number);
  return real && ApplyReal(word, *real, recipe);
}

const Recipe* FindPresetRecipe(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kAliases = {
      {{"cap", "capkv"}, {"pyramid", "pyramidkv"}}};  // as the comparison data call them
  for (const auto& [alias, meant] : kAliases)
    if (name == alias) name = meant;
  for (const Recipe& recipe : Recipes())
    if (recipe.name() == name) return &recipe;
  return nullptr;
}

Status NotFound(std::string_view name, const std::string& reason) {
  return {Code::kNotFound, "policy: expected " + reason + ", got \"" + std::string(name) + "\""};
}

// A point inside a number ("eps0.5") is no separator: the part goes on where the next one is digits only.
std::string_view TakePart(std::string_view* rest) {
  size_t end = rest->find('.');
  while (end != std::string_view::npos && end + 1 < rest->size()) {
    const size_t next = rest->find('.', end + 1);
    const std::string_view behind = rest->substr(end + 1, next == std::string_view::npos ? next : next - end - 1);
    if (behind.find_first_not_of("0123456789") != std::string_view::npos) break;
    end = next;
  }
  const std::string_view part = rest->substr(0, end);
  *rest = end == std::string_view::npos ? std::string_view() : rest->substr(end + 1);
  return part;
}

}  // namespace

Result<Recipe> FindRecipe(std::string_view name) {
  std::string_view rest = name;
  std::vector<Wrapping> wrappings;
  Wrapping wrapping;
  while (FindPresetRecipe(rest.substr(0, rest.find('.'))) == nullptr || rest.starts_with("chunkkv.")) {
    if (!TakeWrapping(&rest, &wrapping)) break;
    wrappings.push_back(std::exchange(wrapping, {}));
  }
  const std::string_view base = rest.substr(0, rest.find('.'));
  const Recipe* preset = FindPresetRecipe(base);
  if (preset == nullptr) {
    const bool part = base.size() != name.size();
    return NotFound(name, "one of " + RecipeNames() + (part ? "; \"" + std::string(base) + "\" is none of them" : ""));
  }
  Recipe recipe = *preset;
  for (auto outer = wrappings.rbegin(); outer != wrappings.rend(); ++outer) Wrap(*outer, &recipe);
  const bool ends_in_point = name.ends_with('.');
  rest.remove_prefix(base.size());
  if (!rest.empty()) rest.remove_prefix(1);
  while (!rest.empty()) {
    const std::string_view part = TakePart(&rest);
    if (!ApplyPart(part, &recipe))
      return NotFound(name, "settings that " + std::string(base) + " has, such as w32, k5 or sink4; \"" +
                                std::string(part) + "\" is none of them");
  }
  if (ends_in_point) return NotFound(name, "a setting behind the last point");
  if (name != base) recipe.policy.name = name;
  if (const Status status = CheckRecipe(recipe); !status.ok())
    return Status(status.code(), "policy " + std::string(name) + ": " + status.message());
  return recipe;
}

}  // namespace dropkv::baseline
