// Text for tests with real models.
#pragma once

#include <string>

namespace dropkv::llama {

// Sentences that never come again in the same words, so that the text reads on; about 27 tokens each.
inline std::string HarbourText(int sentences) {
  const char* who[] = {"the pilot", "a carter", "the weaver", "old Mr Lund", "the clerk", "a boy from the quay"};
  const char* did[] = {"mended", "carried home", "sold", "painted", "asked for", "lost", "weighed"};
  const char* what[] = {"a coil of rope", "two lamps", "the blue boat", "a barrel of salt", "the church key"};
  std::string text = "The week in the harbour. ";
  for (int i = 0; i < sentences; ++i)
    text += "On day " + std::to_string(i + 1) + " " + who[i % 6] + " " + did[i * 3 % 7] + " " + what[i * 7 % 5] +
            ", and nobody spoke of it until evening. ";
  return text;
}

}  // namespace dropkv::llama
