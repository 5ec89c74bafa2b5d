// Threads of our own, started for one parallel_for and joined at its end.
//
// Starting a thread takes about 20 us; the planner gives work a second thread only where a pass takes milliseconds.
// In return nothing survives a call: no idle threads, no state for fork() to break, nothing to shut down.
#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "cutloss/cutloss.hpp"

namespace cutloss {
namespace {

class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads < 1 ? 1 : threads) {}

  int concurrency() const override { return threads_; }

  void parallel_for(std::int64_t tasks, const Body& body) override {
    std::atomic<std::int64_t> next{0};
    const auto work = [&](int worker) {
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, worker);
    };
    std::vector<std::thread> helpers;
    const int wanted = static_cast<int>(std::min<std::int64_t>(threads_, tasks)) - 1;
    try {
      helpers.reserve(static_cast<std::size_t>(std::max(wanted, 0)));
      for (int worker = 1; worker <= wanted; ++worker) helpers.emplace_back(work, worker);
    } catch (const std::exception&) {
      // A thread or memory limit: the threads there are do the work.
    }
    work(0);
    for (std::thread& helper : helpers) helper.join();
  }

 private:
  int threads_;
};

}  // namespace

std::unique_ptr<Executor> make_thread_executor(int threads) {
  return std::unique_ptr<Executor>(new (std::nothrow) ThreadExecutor(threads));
}

}  // namespace cutloss
