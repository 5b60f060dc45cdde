// A chain of variable assignments hidden in noise; an example with its answer goes before it.
#include <fmt/format.h>

#include <algorithm>

#include "eval/ruler/make_sample.h"
#include "eval/ruler/random_stream.h"

namespace dropkv::eval {
namespace {

constexpr uint32_t kVariables = 5;      // one value and four hops
constexpr uint32_t kExampleLines = 10;  // about 400 tokens with what goes around them
constexpr int kNameLetters = 5;
constexpr int kExampleNameLetters = 3;

struct Chain {
  std::vector<std::string> names;
  uint32_t value = 0;
};

Chain DrawChain(RandomStream& random, int letters) {
  Chain chain;
  while (chain.names.size() < kVariables) {
    std::string name;
    for (int i = 0; i < letters; ++i) name += static_cast<char>('A' + random.Below(26));
    if (std::find(chain.names.begin(), chain.names.end(), name) == chain.names.end()) chain.names.push_back(name);
  }
  chain.value = 10000 + random.Below(90000);
  return chain;
}

// Fills context (appended to), question and prefix; positions: before which line of noise each assignment stands.
void WriteTask(const Chain& chain, const std::vector<uint32_t>& positions, int64_t lines, Sample& sample) {
  sample.context += "Follow the chain(s) of variable assignments that are hidden in the text below.\n\n";
  size_t next = 0;
  for (int64_t line = 0; line < lines; ++line) {
    if (next < positions.size() && positions[next] == line) {
      sample.context += next == 0 ? fmt::format("VAR {} = {}\n", chain.names[0], chain.value)
                                  : fmt::format("VAR {} = VAR {}\n", chain.names[next], chain.names[next - 1]);
      ++next;
    }
    sample.context += kNoiseLine;
    sample.context += '\n';
  }
  sample.question = fmt::format("{}Find all variables that are assigned the value {} in the text above.",
                                shape::kQuestion, chain.value);
  sample.prefix = fmt::format(
      " {} According to the chain(s) of variable assignment in the text above, {} variables are assigned the value {}, "
      "they are:",
      shape::kAnswer, kVariables, chain.value);
}

std::vector<uint32_t> DrawPositions(uint64_t key, int64_t lines) {
  std::vector<uint32_t> positions = RandomStream(key).Distinct(kVariables, static_cast<uint32_t>(lines));
  std::sort(positions.begin(), positions.end());
  return positions;
}

}  // namespace

Result<Sample> MakeVariables(const SampleRequest& request) {
  RandomStream random(DeriveKey(request.key, "chains"));
  const Chain chain = DrawChain(random, kNameLetters);
  Chain example = DrawChain(random, kExampleNameLetters);
  if (example.value == chain.value) example.value = chain.value == 99999 ? 10000 : chain.value + 1;
  Sample shot;
  WriteTask(example, DrawPositions(DeriveKey(request.key, "example"), kExampleLines), kExampleLines, shot);
  std::string opening = shot.context + shot.question + shot.prefix;
  for (const std::string& name : example.names) opening += " " + name;
  opening += "\n\n";

  const auto render = [&](int64_t lines) {
    Sample sample = StartSample(request);
    sample.context = opening;
    const std::vector<uint32_t> positions = DrawPositions(DeriveKey(request.key, "positions"), lines);
    WriteTask(chain, positions, lines, sample);
    for (const uint32_t position : positions) sample.depths.push_back(100.0 * position / static_cast<double>(lines));
    sample.references = chain.names;
    return sample;
  };
  FitLimits limits = StartLimits(request);
  limits.smallest = kVariables;
  limits.largest = request.length;
  Result<Fitted> fitted = FitToLength(limits, render, request.count);
  if (!fitted.ok()) return fitted.status();
  return std::move(fitted->sample);
}

}  // namespace dropkv::eval
