#include "src/cpu/peak.h"

#include <algorithm>
#include <chrono>

#include "src/cpu/kernels.h"

namespace cutloss::cpu {

double measure_peak_gflops(std::string_view target, int threads) {
  const Kernels& kernels = *find_kernels(target);
  const auto executor = make_thread_executor(threads);
  const double flops_per_iteration = 2.0 * kernels.rows * kernels.panel;
  // 20 ms at 100 GFLOP/s a thread.
  const auto iterations = static_cast<std::int64_t>(2e9 / flops_per_iteration);
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    executor->parallel_for(threads, [&](std::int64_t, int) {
      alignas(64) float sink[64] = {1e-3f};
      kernels.multiply_add_chains(iterations, sink);
      volatile float used = sink[0];
      (void)used;
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, flops_per_iteration * static_cast<double>(iterations) * threads / seconds.count() * 1e-9);
  }
  return best;
}

}  // namespace cutloss::cpu
