// The epsilons, and random numbers.
#ifndef CUTLOSS_SRC_ANALYSIS_LEVELS_H_
#define CUTLOSS_SRC_ANALYSIS_LEVELS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace cutloss::analysis {

// Probabilities below 2^-64 are one and the same: what they come to, 262144 of them, is 1e-14.
constexpr int kLowest = 64;

// Epsilons 2^-k for rising exponents k. Values are told by their log2, so that every comparison is the same one.
class Levels {
 public:
  explicit Levels(const std::vector<int>& exponents) : exponents_(exponents) {
    for (int need = 0; need <= kLowest; ++need) {
      const auto first = std::lower_bound(exponents_.begin(), exponents_.end(), need);
      table_[need] = static_cast<int>(first - exponents_.begin());
    }
  }

  int count() const { return static_cast<int>(exponents_.size()); }
  double epsilon(int level) const { return std::ldexp(1.0, -exponents_[static_cast<std::size_t>(level)]); }

  // The first epsilon that the value reaches; count() if it reaches none.
  int of(double log2_value) const {
    if (log2_value >= 0) return 0;
    if (!(log2_value > -kLowest)) return count();
    return table_[static_cast<int>(std::ceil(-log2_value))];
  }

 private:
  std::vector<int> exponents_;
  int table_[kLowest + 1];
};

// The finalizer of splitmix64 (Steele, Lea, Flood 2014).
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// In (0, 1), for an entry of G: the same whichever pass asks.
inline double uniform(std::uint64_t seed, std::int64_t row, std::int64_t id) {
  const std::uint64_t bits = mix(mix(mix(seed) ^ static_cast<std::uint64_t>(row)) ^ static_cast<std::uint64_t>(id));
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_LEVELS_H_
