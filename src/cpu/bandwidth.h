// The memory bandwidth of this machine, measured.
#ifndef CUTLOSS_SRC_CPU_BANDWIDTH_H_
#define CUTLOSS_SRC_CPU_BANDWIDTH_H_

#include <cstddef>

#include "cutloss/cutloss.hpp"

namespace cutloss::cpu {

// Best of several passes that add to an array of four times the last cache (at least 64 MiB, at most 1 GiB) in place on
// `threads` threads, in bytes per second: what is read and what is written back both count.
Result<double> measure_bandwidth(std::size_t cache_bytes, int threads);

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_BANDWIDTH_H_
