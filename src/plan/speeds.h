// Machines for the cost model: known ones by name, this one measured, or a description in a file.
#ifndef CUTLOSS_SRC_PLAN_SPEEDS_H_
#define CUTLOSS_SRC_PLAN_SPEEDS_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/plan/cost.h"

namespace cutloss {

std::vector<std::string> machine_names();  // without "here"
std::optional<Speeds> known_machine(std::string_view name);

// Measures the peak of multiply-adds and the streaming bandwidth on so many threads: half a second.
Result<Speeds> measure_machine(const Machine& machine, int threads);

// Lines "key = value", # begins a comment. `what` names the text in errors.
Result<Speeds> parse_machine(std::string_view text, const std::string& what);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_SPEEDS_H_
