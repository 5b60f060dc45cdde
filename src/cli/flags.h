// What the commands share in reading their flags.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::cli {

// The library names its own argument in front of a message ("budget: ...", "policy.window: ..."); the flag takes its
// place. flag empty: the argument's last part becomes the flag ("--window").
Status FlagStatus(const std::string& flag, const Status& status);

// The parts between commas. A comma at the end leaves an empty last part, which no list accepts.
std::vector<std::string> SplitList(const std::string& text);

// One of a fixed set of words.
template <typename T>
Status Choose(const std::string& flag, const std::string& value,
              std::initializer_list<std::pair<const char*, T>> choices, T* target) {
  std::string names;
  for (const auto& [name, choice] : choices) {
    if (value == name) {
      *target = choice;
      return Status::Ok();
    }
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return InvalidArgument(flag + ": expected one of " + names + ", got '" + value + "'");
}

}  // namespace dropkv::cli
