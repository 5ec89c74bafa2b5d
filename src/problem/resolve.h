// A validated Problem with its defaults filled in: what the layers below read instead of repeating the rules.
#ifndef CUTLOSS_SRC_PROBLEM_RESOLVE_H_
#define CUTLOSS_SRC_PROBLEM_RESOLVE_H_

#include <cstdint>
#include <span>
#include <string>

#include "cutloss/cutloss.hpp"

namespace cutloss {

// Element strides by meaning rather than by axis: the [D, V] layout is [V, D] with the two exchanged.
struct HeadStrides {
  std::int64_t v;
  std::int64_t d;
};

Strides e_strides(const Problem& problem);
HeadStrides c_strides(const Problem& problem);
HeadStrides d_c_strides(const Problem& problem);  // of the contiguous output
inline DType d_e_dtype(const Problem& problem) { return problem.d_e_dtype.value_or(problem.e_dtype); }
inline DType d_c_dtype(const Problem& problem) { return problem.d_c_dtype.value_or(problem.c_dtype); }
inline float softcap_or_zero(const Problem& problem) { return problem.softcap.value_or(0.0f); }

// Sorts the labels by what becomes of their rows.
struct LabelScan {
  std::int64_t valid = 0;           // not ignore_index; BadLabels::nan rows are among them
  std::int64_t first_bad_row = -1;  // a label outside [0, V) that is not ignore_index, -1 if there is none
  std::int64_t first_bad_label = 0;
};
constexpr std::int64_t kBadLabel = -1;  // what a bad label becomes in `labels` below: matches no vocabulary entry

// Writes the rows to compute and their labels, in order; both spans hold at least problem.tokens values.
LabelScan scan_labels(const Problem& problem, const void* labels, std::span<std::int64_t> rows,
                      std::span<std::int64_t> row_labels);

// The checks that need the buffers themselves: presence, overlap.
Status validate_buffers(const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        std::span<const std::byte> workspace);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PROBLEM_RESOLVE_H_
