// The executor as the passes use it: never more workers than there is scratch for, each task in the floating-point
// environment of the kernels, and no allocation, so that a call which has begun to write cannot run out of memory.
#ifndef CUTLOSS_SRC_CPU_WORKERS_H_
#define CUTLOSS_SRC_CPU_WORKERS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

#include "cutloss/cutloss.hpp"
#include "src/cpu/float_env.h"

namespace cutloss::cpu {

class Workers {
 public:
  Workers(Executor& inner, int limit) : inner_(inner), limit_(limit) {}

  // body(task, worker) for every task in [0, tasks), 0 <= worker < limit.
  template <typename Body>
  void parallel_for(std::int64_t tasks, const Body& body) const {
    const auto run = [&body](std::int64_t task, int worker) {
      const KernelFloatEnv float_env;
      body(task, worker);
    };
    // std::function keeps a reference in place, where it would copy a larger closure to the heap.
    if (inner_.concurrency() <= limit_) return inner_.parallel_for(tasks, std::cref(run));
    // Fewer tasks than workers is the one way to bound worker ids that every Executor offers.
    std::atomic<std::int64_t> next{0};
    const auto lane = [&](std::int64_t worker, int) {
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        run(task, static_cast<int>(worker));
      }
    };
    inner_.parallel_for(std::min<std::int64_t>(limit_, tasks), std::cref(lane));
  }

 private:
  Executor& inner_;
  int limit_;
};

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_WORKERS_H_
