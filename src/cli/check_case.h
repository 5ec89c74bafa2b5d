// One random problem of `cutloss check`: everything about it follows from a seed and the options that fix parts of it.
#ifndef CUTLOSS_SRC_CLI_CHECK_CASE_H_
#define CUTLOSS_SRC_CLI_CHECK_CASE_H_

#include <optional>
#include <string>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cli/check_terms.h"

namespace cutloss::cli {

struct CheckOptions {
  std::uint64_t seed = 1;
  std::int64_t cases = 100;
  std::optional<std::int64_t> n, v, d;
  std::int64_t max_n = 200, max_v = 1200, max_d = 300;
  std::int64_t max_work = 4'000'000;                     // N * V * D; float64 takes about 10 ms for it
  std::string e_dtype, c_dtype, head_layout, reduction;  // empty: any
  std::optional<float> softcap;                          // 0: none
  std::string target = "all", mode = "all";
  int threads = 3;
};

// A problem and data for it. Inputs are strided in all the ways the library allows, what lies between their elements
// is NaN, and so are the hidden states of rows that do not count.
struct CheckCase {
  Problem problem;
  Machine machine;                     // cache sizes drawn, so that tiles differ; target and threads to be set
  std::optional<double> budget_share;  // of what the mode would take with no budget
  std::string values;                  // what the data is like
  std::vector<std::byte> e_memory, c_memory, label_memory;
  std::vector<float> cotangents;
  CheckTerms terms;
  Inputs inputs;

  std::vector<Mode> modes() const;  // that the wanted gradients allow
  std::string text() const;         // in words, for a failure
};

// target: a kernel target, used to find where tiles end.
CheckCase make_case(const CheckOptions& options, std::uint64_t seed, const std::string& target);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_CHECK_CASE_H_
