#include "cli/terminal.h"

#include <malloc.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <utility>

namespace dropkv::cli {
namespace {

std::atomic<bool> stop{false};

void OnSignal(int signal_number) {
  if (stop.exchange(true)) _exit(128 + signal_number);
}

}  // namespace

const std::atomic<bool>& StopFlag() { return stop; }

void InstallStopHandler() {
  struct sigaction action {};
  action.sa_handler = OnSignal;  // without SA_RESTART: a read from the terminal returns
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool StdinIsTerminal() { return isatty(STDIN_FILENO) == 1; }

Progress::Progress(std::string what, int32_t total, bool quiet)
    : what_(std::move(what)), total_(total), quiet_(quiet), terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::Update(int32_t done) {
  if (quiet_ || total_ <= 0) return;
  if (terminal_) {
    std::fprintf(stderr, "\r%s %d / %d tokens", what_.c_str(), done, total_);
    std::fflush(stderr);
    return;
  }
  const auto quarter = static_cast<int32_t>(4LL * done / total_);
  if (quarter > last_quarter_) std::fprintf(stderr, "%s %d / %d tokens\n", what_.c_str(), done, total_);
  last_quarter_ = quarter;
}

void Progress::Finish() {
  if (!quiet_ && terminal_) std::fputs("\r\033[K", stderr);
}

int64_t ResidentBytes() {
  malloc_trim(0);
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace dropkv::cli
