#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace dropkv {

struct ThreadPool::Impl {
  std::mutex mutex;
  std::condition_variable start;
  std::condition_variable done;
  uint64_t generation = 0;  // one more for every Run
  bool stop = false;
  int32_t busy = 0;  // helpers that have not finished the present Run

  std::atomic<int64_t> next{0};
  int64_t count = 0;
  void* context = nullptr;
  Function function = nullptr;

  std::vector<std::thread> helpers;

  void TakeItems(int32_t worker) {
    for (int64_t item = next.fetch_add(1); item < count; item = next.fetch_add(1)) function(context, item, worker);
  }

  void Loop(int32_t worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      start.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      lock.unlock();
      TakeItems(worker);
      lock.lock();
      if (--busy == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int32_t threads) : impl_(std::make_unique<Impl>()) {
  if (threads <= 0) threads = std::max(1U, std::thread::hardware_concurrency());
  impl_->helpers.reserve(threads - 1);
  for (int32_t worker = 1; worker < threads; ++worker)
    impl_->helpers.emplace_back([this, worker] { impl_->Loop(worker); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->start.notify_all();
  for (std::thread& helper : impl_->helpers) helper.join();
}

int32_t ThreadPool::threads() const { return static_cast<int32_t>(impl_->helpers.size()) + 1; }

void ThreadPool::Run(int64_t count, void* context, Function function) {
  if (count <= 0) return;
  if (count == 1 || impl_->helpers.empty()) {
    for (int64_t item = 0; item < count; ++item) function(context, item, 0);
    return;
  }
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->count = count;
    impl_->context = context;
    impl_->function = function;
    impl_->next = 0;
    impl_->busy = static_cast<int32_t>(impl_->helpers.size());
    ++impl_->generation;
  }
  impl_->start.notify_all();
  impl_->TakeItems(0);
  std::unique_lock lock(impl_->mutex);
  impl_->done.wait(lock, [&] { return impl_->busy == 0; });
}

}  // namespace dropkv
