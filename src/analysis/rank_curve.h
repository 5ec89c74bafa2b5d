// Sorted probabilities of a token without sorting them: the largest 256 exactly, the others from a histogram of
// 1/16 octave, in which a probability is known to within 4.4 %.
#ifndef CUTLOSS_SRC_ANALYSIS_RANK_CURVE_H_
#define CUTLOSS_SRC_ANALYSIS_RANK_CURVE_H_

#include <array>
#include <cstdint>
#include <vector>

#include "src/analysis/analysis.h"
#include "src/analysis/levels.h"

namespace cutloss::analysis {

class RankCurve {
 public:
  static constexpr std::size_t kExact = 256;

  void add(double log2_p);
  // Adds this token's probability and cumulative mass at each rank (rising, at most the number of entries) to the sums.
  void finish(const std::vector<std::int64_t>& ranks, std::vector<double>& probability,
              std::vector<double>& cumulative);

 private:
  static constexpr int kPerOctave = 16;
  std::vector<float> top_;  // min-heap of log2 p
  std::array<std::uint32_t, kLowest * kPerOctave + 1> count_{};
  std::array<double, kLowest * kPerOctave + 1> mass_{};
};

// 1, 2, 3, ... in steps of about a quarter octave, the last one `vocab`.
std::vector<std::int64_t> rank_grid(std::int64_t vocab);

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_RANK_CURVE_H_
