// Random problems to be timed, and what counts as a right answer before it is.
#ifndef CUTLOSS_SRC_CLI_BENCH_DATA_H_
#define CUTLOSS_SRC_CLI_BENCH_DATA_H_

#include <cstdint>

#include "src/cli/bench_sample.h"

namespace cutloss::cli {

// Inputs of normal numbers (logits of variance 4: neither flat nor settled on one word), outputs; no workspace yet.
BenchArrays make_bench_arrays(const Problem& problem, std::uint64_t seed, int threads);

Status run_once(const Plan& plan, BenchArrays& arrays);

bool acceptable(const SampledErrors& errors, const Problem& problem);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_BENCH_DATA_H_
