// cutloss plan --costs: what every mode would cost, by the planner's own model.
#ifndef CUTLOSS_SRC_CLI_PLAN_COSTS_H_
#define CUTLOSS_SRC_CLI_PLAN_COSTS_H_

#include <optional>
#include <string>
#include <vector>

#include "src/cli/options.h"

namespace cutloss::cli {

struct CostOptions {
  bool costs = false, measure = false;
  std::string machine = "here";
  std::optional<double> kept_share, redone_share;
  std::vector<double> infer;
  std::int64_t reps = 3;

  void add(CLI::App& command);
  bool wanted() const { return costs || !infer.empty(); }
};

int print_costs(const ProblemOptions& problem, const CostOptions& options, bool json);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_PLAN_COSTS_H_
