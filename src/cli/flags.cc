#include "cli/flags.h"

#include <sstream>

namespace dropkv::cli {

Status FlagStatus(const std::string& flag, const Status& status) {
  const size_t colon = status.message().find(": ");
  const bool named = colon != std::string::npos && status.message().find(' ') > colon;
  const std::string argument = named ? status.message().substr(0, colon) : "";
  const std::string text = named ? status.message().substr(colon + 2) : status.message();
  const size_t dot = argument.rfind('.');
  return {status.code(), (flag.empty() ? "--" + argument.substr(dot + 1) : flag) + ": " + text};
}

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  if (text.ends_with(',')) parts.emplace_back();
  return parts;
}

}  // namespace dropkv::cli
