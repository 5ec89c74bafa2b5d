// The rows of a gradient (tokens of dE, ids of dC: owners) in float64, split by the epsilon at which an entry is
// dropped: one addition of each entry serves every epsilon. What epsilon j drops are the slots beyond j.
#ifndef CUTLOSS_SRC_ANALYSIS_OWNER_SUMS_H_
#define CUTLOSS_SRC_ANALYSIS_OWNER_SUMS_H_

#include <cstdint>
#include <vector>

#include "src/analysis/analysis.h"
#include "src/analysis/levels.h"
#include "src/analysis/variants.h"

namespace cutloss::analysis {

// Sums over owners, of one gradient made in one way.
struct ErrorSum {
  double error2 = 0, dot = 0;  // of the error, and of error and exact gradient
  double worst = 0, nothing = 0, nothing2 = 0, of_bound = 0, bound2 = 0;
  std::vector<double> sum;  // of the errors, if asked for

  // An owner's error and exact gradient [D], the latter's square norm, and what bounds the error; 0: nothing known.
  void add(const double* error, const double* exact, std::int64_t hidden, double exact2, bool got_nothing, double bound,
           bool rms);
};

struct ErrorTable {
  ErrorTable(int levels, std::int64_t hidden, bool with_sum);
  std::vector<ErrorSum> methods;   // [method][level]
  std::vector<ErrorSum> variants;  // [kVariants]
  double exact2 = 0;
  std::vector<double> exact_sum;
  double owners = 0;

  void merge(const ErrorTable& other);
  GradientError result(const ErrorSum& sum, bool rms_bound) const;
};

// What bounds the error of an owner; all 0: nothing known.
struct Bounds {
  const double* mass = nullptr;  // [slot], of the owner's softmax
  double largest = 0;            // |logit_scale| max ||c||
  double radius = 0;             // |logit_scale| max ||c - mean of its block||
};

class OwnerSums {
 public:
  // Slot 0: the label's entry and what reaches the largest epsilon; slot k: what reaches epsilon k, but not k - 1.
  OwnerSums(std::int64_t owners, std::int64_t hidden, const Levels& levels, bool with_tail, bool with_variants);

  // An owner's part of a tile: factors[u] * others[u][D] for u < count. tile_slot: the level of the tile's largest |G|.
  void add_tile(std::int64_t owner, const double* factors, const std::uint8_t* slots, std::int64_t count,
                const float* others, int tile_slot, bool variant_keeps);
  void add_sampled(std::int64_t owner, int level, double factor, const float* other);
  double* tail(std::int64_t owner, int slot) { return at(owner, tail_ + slot); }

  // tail: [slot][D], what stands for the dropped slots; null: the owner's own.
  void finish(std::int64_t owner, const double* tail, const Bounds& bounds, ErrorTable& table);
  const double* exact(std::int64_t owner) { return at(owner, exact_); }

 private:
  double* at(std::int64_t owner, int part) { return sums_.data() + (owner * parts_ + part) * hidden_; }

  std::int64_t hidden_;
  const Levels& levels_;
  int exact_, tile_, sampled_, tail_, parts_;
  std::vector<double> sums_, local_, scratch_;
  std::vector<int> first_slot_, first_tile_;  // of each owner: the least there is
  std::vector<std::uint64_t> sampled_levels_;
  std::vector<VariantSums> variants_;
};

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_OWNER_SUMS_H_
