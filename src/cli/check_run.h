// Runs one case in one mode on one target and compares it with float64.
#ifndef CUTLOSS_SRC_CLI_CHECK_RUN_H_
#define CUTLOSS_SRC_CLI_CHECK_RUN_H_

#include <optional>
#include <string>

#include "src/cli/check_case.h"
#include "src/reference/reference.h"

namespace cutloss::cli {

struct CheckReport {
  std::string failure;     // empty: all is well
  double worst_share = 0;  // largest error as a share of its bound
};

// What float64 makes of it, with bounds; epsilon and rounds_twice: of a run under a filter.
reference::Reference reference_of(const CheckCase& test, double epsilon = 0, bool rounds_twice = false);

// `exact`: reference_of(test), for those without a filter. Everything is compared that can be: loss, nll, lse,
// gradients, metrics and counts with their bounds; exact zeros of ignored rows; the same bits for one thread, several,
// and tasks run backwards; nothing written outside the outputs.
CheckReport run_check(const CheckCase& test, const reference::Reference& exact, Mode mode, const std::string& target,
                      int threads);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_CHECK_RUN_H_
