#include "src/analysis/rank_curve.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace cutloss::analysis {

void RankCurve::add(double log2_p) {
  const double below = std::max(0.0, -log2_p);
  const auto bin = below >= kLowest ? count_.size() - 1 : static_cast<std::size_t>(below * kPerOctave);
  ++count_[bin];
  mass_[bin] += std::exp2(log2_p);
  const auto value = static_cast<float>(log2_p);
  if (top_.size() < kExact) {
    top_.push_back(value);
    std::push_heap(top_.begin(), top_.end(), std::greater<>());
  } else if (value > top_.front()) {
    std::pop_heap(top_.begin(), top_.end(), std::greater<>());
    top_.back() = value;
    std::push_heap(top_.begin(), top_.end(), std::greater<>());
  }
}

void RankCurve::finish(const std::vector<std::int64_t>& ranks, std::vector<double>& probability,
                       std::vector<double>& cumulative) {
  std::sort(top_.begin(), top_.end(), std::greater<>());
  std::size_t bin = 0, exact = 0;
  std::int64_t before = 0;  // entries in bins before `bin`, and their mass
  double mass_before = 0, exact_mass = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r] <= static_cast<std::int64_t>(top_.size())) {
      while (exact < static_cast<std::size_t>(ranks[r])) exact_mass += std::exp2(static_cast<double>(top_[exact++]));
      probability[r] += std::exp2(static_cast<double>(top_[exact - 1]));
      cumulative[r] += exact_mass;
      continue;
    }
    while (bin + 1 < count_.size() && before + count_[bin] < ranks[r]) {
      before += count_[bin];
      mass_before += mass_[bin++];
    }
    const double mean = count_[bin] == 0 ? 0.0 : mass_[bin] / count_[bin];
    probability[r] += mean;
    cumulative[r] += mass_before + mean * static_cast<double>(ranks[r] - before);
  }
}

std::vector<std::int64_t> rank_grid(std::int64_t vocab) {
  std::vector<std::int64_t> ranks;
  for (std::int64_t rank = 1; rank < vocab;) {
    ranks.push_back(rank);
    rank = std::max(rank + 1, static_cast<std::int64_t>(static_cast<double>(rank) * 1.189207));
  }
  ranks.push_back(vocab);
  return ranks;
}

}  // namespace cutloss::analysis
