#include "src/cpu/bandwidth.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>

#include "src/problem/text.h"

namespace cutloss::cpu {

Result<double> measure_bandwidth(std::size_t cache_bytes, int threads) {
  const std::size_t bytes = std::clamp<std::size_t>(4 * cache_bytes, std::size_t{64} << 20, std::size_t{1} << 30);
  const auto count = static_cast<std::int64_t>(bytes / sizeof(std::uint64_t));
  const std::unique_ptr<std::uint64_t[]> array(new (std::nothrow) std::uint64_t[static_cast<std::size_t>(count)]);
  const auto executor = make_thread_executor(threads);
  if (array == nullptr || executor == nullptr) return out_of_memory();
  std::fill_n(array.get(), count, std::uint64_t{0});
  double best = 0;
  for (std::uint64_t repeat = 1; repeat <= 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    executor->parallel_for(threads, [&](std::int64_t part, int) {
      std::uint64_t* const end = array.get() + (part + 1) * count / threads;
      for (std::uint64_t* at = array.get() + part * count / threads; at != end; ++at) *at += repeat;
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * static_cast<double>(bytes) / seconds.count());
  }
  volatile std::uint64_t used = array[static_cast<std::size_t>(count) / 2];
  (void)used;
  return best;
}

}  // namespace cutloss::cpu
