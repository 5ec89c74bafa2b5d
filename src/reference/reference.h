// The oracle: the objective of cutloss.hpp, its metrics and its gradients in plain float64, unfused, with the N x V
// logits stored. Every mode, kernel, dtype and front end is checked against it. Values are those without a filter; what
// one may leave out only widens the gradients' bounds.
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
  // Where the problem accumulates: what the gradients' buffers hold before the call.
  const void* d_e_before = nullptr;
  const void* d_c_before = nullptr;
  const void* d_bias_before = nullptr;
  // Plan::epsilon, and whether a row may be redone: dC and dbias are then rounded to their dtypes once more, in
  // between.
  double epsilon = 0;
  bool rounds_twice = false;
};

// Values, and for each the largest |f32 result - value| that rounding can explain (derivation in reference.cc).
// Gradients are contiguous, in the layout of the outputs they mirror; all of them are always computed. Rows that are
// ignored or of weight 0 hold 0.
struct Reference {
  double loss = 0, loss_bound = 0;                     // mean or sum; for Reduction::none their sum over rows
  std::vector<double> row_loss, row_loss_bound;        // [N], before the reduction
  std::vector<double> nll, nll_bound;                  // [N]; with soft targets of the likeliest id, 0 if all padding
  std::vector<double> lse, lse_bound;                  // [N]
  std::vector<double> entropy, entropy_bound;          // [N]
  std::vector<double> d_e, d_e_bound;                  // [N, D]
  std::vector<double> d_c, d_c_bound;                  // [V, D] or [D, V]
  std::vector<double> d_bias, d_bias_bound;            // [V]
  std::vector<double> mean_logits, mean_logits_bound;  // [V]
  std::int64_t valid_count = 0;

  // What arg-max, rank and top k are judged by: only a gap above logit_error[i] + logit_error[i] decides an order.
  std::vector<double> logits;       // [N, V]
  std::vector<double> logit_error;  // [N], the largest of the row
  std::vector<std::int64_t> label;  // [N]; below 0 for a label outside [0, V), or soft targets that are all padding
  std::vector<char> counts;         // [N]; 0 for rows that are ignored or of weight 0
};

// The problem must be valid; a label outside [0, V) gives NaN for its row.
Reference linear_cross_entropy(const Problem& problem, const Inputs& inputs, const Options& options = {});

}  // namespace cutloss::reference

#endif  // CUTLOSS_SRC_REFERENCE_REFERENCE_H_
