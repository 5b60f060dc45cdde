// The person in front: progress on standard error, Ctrl-C, and how much memory the process holds.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace dropkv::cli {

// Set by the first Ctrl-C (SIGINT) or SIGTERM; the second one ends the process at once.
const std::atomic<bool>& StopFlag();
void InstallStopHandler();

bool StdinIsTerminal();

// "prefill 1024 / 4096 tokens" on standard error: one line that is redrawn on a terminal, a line per quarter elsewhere.
class Progress {
 public:
  Progress(std::string what, int32_t total, bool quiet);
  void Update(int32_t done);
  void Finish();

 private:
  std::string what_;
  int32_t total_;
  bool quiet_;
  bool terminal_;
  int32_t last_quarter_ = 0;
};

// Resident set in bytes, after handing free memory back to the system.
int64_t ResidentBytes();

}  // namespace dropkv::cli
