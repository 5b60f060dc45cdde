// A small thread pool with one operation: run f(i) for i in [0, count). Which thread takes which index is left open, so
// work items must write to places of their own; results then do not depend on the thread count.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace dropkv {

class ThreadPool {
 public:
  // threads <= 0: one per core. The calling thread works too, so threads - 1 are started.
  explicit ThreadPool(int32_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t threads() const;

  // Calls f(item, worker) for every item in [0, count); worker in [0, threads()). Returns when all are done. Not to be
  // called from inside f. Allocates nothing.
  template <typename F>
  void For(int64_t count, F&& f) {
    struct Call {
      static void Invoke(void* context, int64_t item, int32_t worker) {
        (*static_cast<std::remove_reference_t<F>*>(context))(item, worker);
      }
    };
    Run(count, const_cast<void*>(static_cast<const void*>(&f)), &Call::Invoke);
  }

 private:
  using Function = void (*)(void* context, int64_t item, int32_t worker);
  void Run(int64_t count, void* context, Function function);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dropkv
