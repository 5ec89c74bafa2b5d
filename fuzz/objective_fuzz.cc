// Bytes -> a problem over all options, layouts, modes, filters and budgets -> the float64 oracle with its bounds.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "src/cpu/objective_draw.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<std::string> targets = cutloss::available_targets();
  cutloss::testing::Draw draw(std::span(data, size));
  const std::string target = draw.pick(targets);
  cutloss::testing::DrawnCase test = cutloss::testing::draw_case(draw, target, 300);
  const cutloss::Status valid = validate(test.objective.problem);
  const std::string failure = valid.ok() ? check_modes(test) : "a drawn problem is refused: " + valid.message();
  if (failure.empty()) return 0;
  std::fprintf(stderr, "%s: %s\n", target.c_str(), failure.c_str());
  std::abort();
}
