// The oracle: the loss and its gradients in plain float64, unfused, with the N x V logits stored. Every mode, kernel,
// dtype and front end is checked against it.
#ifndef CUTLOSS_SRC_REFERENCE_REFERENCE_H_
#define CUTLOSS_SRC_REFERENCE_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "cutloss/cutloss.hpp"

namespace cutloss::reference {

struct Options {
  // Most additions in a row that the checked code makes in f32 beyond a dot product over D: rows of a tile plus
  // number of tiles plus tokens of a step plus number of steps, or anything larger.
  double additions = 0;
};

// Values, and for each the largest |f32 result - value| that rounding can explain (derivation in reference.cc).
// Gradients are contiguous, in the layout of the outputs they mirror; all of them are always computed.
struct Reference {
  double loss = 0, loss_bound = 0;     // mean or sum; for Reduction::none their sum over rows
  std::vector<double> nll, nll_bound;  // [N]; 0 at ignored rows
  std::vector<double> lse, lse_bound;  // [N]
  std::vector<double> d_e, d_e_bound;  // [N, D]
  std::vector<double> d_c, d_c_bound;  // [V, D] or [D, V]
  std::int64_t valid_count = 0;
};

// The problem must be valid; a label outside [0, V) gives NaN for its row.
Reference linear_cross_entropy(const Problem& problem, const Inputs& inputs, const Options& options = {});

}  // namespace cutloss::reference

#endif  // CUTLOSS_SRC_REFERENCE_REFERENCE_H_
