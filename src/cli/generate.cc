#include "cli/generate.h"

#include <span>

#include "core/clock.h"

namespace dropkv::cli {

size_t CompleteUtf8(std::string_view text) {
  // At most the last three bytes can belong to an unfinished character.
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0U) == 0x80U) continue;
    const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

Result<Answer> Generate(const llama::Model& model, const RunOptions& options, int32_t limit, std::vector<float> logits,
                        llama::Decoder* decoder, llama::Sampler* sampler, int32_t* position,
                        const std::function<void(std::string_view)>& stream) {
  Answer answer;
  std::string waiting;
  for (;;) {
    const llama::Token token = sampler->Next(logits);
    if (model.IsEndOfGeneration(token) && !options.ignore_eos) {
      answer.ended = true;
      break;
    }
    answer.tokens.push_back(token);
    waiting += model.Piece(token);
    const size_t complete = CompleteUtf8(waiting);
    if (stream && complete > 0) stream(std::string_view(waiting).substr(0, complete));
    answer.text += waiting.substr(0, complete);
    waiting.erase(0, complete);
    if (static_cast<int32_t>(answer.tokens.size()) == options.max_tokens || *position + 1 >= limit) break;
    const auto start = Clock::now();
    DROPKV_RETURN_IF_ERROR(decoder->Feed(std::span(&token, 1), *position));
    answer.seconds += SecondsSince(start);
    ++answer.steps;
    ++*position;
    logits.assign(decoder->logits().begin(), decoder->logits().end());
  }
  answer.text += waiting;
  if (stream && !waiting.empty()) stream(waiting);
  return answer;
}

}  // namespace dropkv::cli
