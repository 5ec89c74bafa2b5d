// What `cutloss analyze` prints.
#ifndef CUTLOSS_SRC_CLI_ANALYZE_H_
#define CUTLOSS_SRC_CLI_ANALYZE_H_

#include "src/analysis/analysis.h"
#include "src/cli/cli.h"

namespace cutloss::cli {

Json analysis_json(const analysis::Report& report, const analysis::Options& options, const Problem& problem);
void print_analysis(const analysis::Report& report, const analysis::Options& options);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_ANALYZE_H_
