// Sums of scaled rows where the terms of many sums come mixed: each sum keeps a short list of its terms and adds them
// in one go, in registers, instead of reading and writing all of its columns once a term.
#ifndef CUTLOSS_SRC_CPU_ROW_SUMS_H_
#define CUTLOSS_SRC_CPU_ROW_SUMS_H_

#include <algorithm>

#include "src/cpu/kernels.h"
#include "src/plan/workspace.h"

namespace cutloss::cpu {

// y[0, n) += factor * x[0, n)
inline void add_row(const Kernels& kernels, float factor, const float* x, std::int64_t n, float* y) {
  const std::int64_t first = 0;
  kernels.add_rows(x, 0, &first, &factor, 1, n, y);
}

// Sum `target` < targets is to + target * to_stride, of n columns; row i of the terms is from + i * from_stride. Terms
// are added in the order they came in, the last ones by flush().
class RowSums {
 public:
  struct Rows {
    const float* from;
    std::int64_t from_stride;
    float* to;
    std::int64_t to_stride;
    std::int64_t columns;
  };
  RowSums(const Kernels& kernels, const TermLists& lists, std::int64_t targets, const Rows& rows)
      : kernels_(kernels), lists_(lists), targets_(targets), rows_(rows) {
    std::fill_n(lists_.count, targets, 0);
  }

  void add(std::int64_t target, float factor, std::int64_t row) const {
    std::int32_t& count = lists_.count[target];
    lists_.factor[target * kTerms + count] = factor;
    lists_.row[target * kTerms + count] = row;
    if (++count == kTerms) flush_list(target);
  }

  void flush() const {
    for (std::int64_t target = 0; target < targets_; ++target) {
      if (lists_.count[target] != 0) flush_list(target);
    }
  }

 private:
  void flush_list(std::int64_t target) const {
    kernels_.add_rows(rows_.from, rows_.from_stride, lists_.row + target * kTerms, lists_.factor + target * kTerms,
                      lists_.count[target], rows_.columns, rows_.to + target * rows_.to_stride);
    lists_.count[target] = 0;
  }

  const Kernels& kernels_;
  const TermLists& lists_;
  std::int64_t targets_;
  Rows rows_;
};

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_ROW_SUMS_H_
