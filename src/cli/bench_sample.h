// A sample of a result against float64, cheap enough to go before every benchmark.
#ifndef CUTLOSS_SRC_CLI_BENCH_SAMPLE_H_
#define CUTLOSS_SRC_CLI_BENCH_SAMPLE_H_

#include <vector>

#include "cutloss/cutloss.hpp"

namespace cutloss::cli {

constexpr std::int64_t kSampledRows = 16;

// Inputs and outputs of one contiguous problem without ignored rows.
struct BenchArrays {
  std::vector<std::byte> e, c, d_e, d_c, workspace;
  std::vector<std::int64_t> labels;
  std::vector<float> nll, lse;
  float loss = 0;
  std::vector<float> losses;  // reduction none
};

// Largest over the sampled rows: of nll absolute, of gradients relative to the row's norm. NaN if any is.
struct SampledErrors {
  double nll = 0, d_e = 0, d_c = 0;
};

SampledErrors sampled_errors(const Problem& problem, const BenchArrays& arrays, int threads);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_BENCH_SAMPLE_H_
