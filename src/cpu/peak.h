// The arithmetic peak of this machine, measured: what a GFLOP/s figure is a share of.
#ifndef CUTLOSS_SRC_CPU_PEAK_H_
#define CUTLOSS_SRC_CPU_PEAK_H_

#include <string_view>

namespace cutloss::cpu {

// Best of several runs of about 20 ms of register-only multiply-adds on `threads` threads at once, in 10^9 FLOP/s of
// f32 (a multiply-add is 2). `target` must be one of available_targets().
double measure_peak_gflops(std::string_view target, int threads);

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_PEAK_H_
