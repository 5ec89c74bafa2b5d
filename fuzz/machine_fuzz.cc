// Bytes -> the description of a machine -> a refusal that says why, or speeds that a prediction can be made with.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "src/plan/speeds.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto speeds = cutloss::parse_machine({reinterpret_cast<const char*>(data), size}, "file");
  cutloss::Problem problem;
  problem.tokens = problem.vocab = problem.hidden = 64;
  const bool good = speeds.ok()
                        ? std::isfinite(cutloss::predict_on(problem, cutloss::Mode::loss, speeds.value()).seconds())
                        : !speeds.status().message().empty();
  if (good) return 0;
  std::fprintf(stderr, "neither refused with a reason nor of use\n");
  std::abort();
}
