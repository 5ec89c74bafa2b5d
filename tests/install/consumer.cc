// One token, two words of vocabulary, logits 0 and 1, label 0: the loss is log(1 + e).
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "cutloss/cutloss.hpp"

int main() {
  const float e[] = {1.0f};
  const float c[] = {0.0f, 1.0f};
  const std::int64_t labels[] = {0};
  float loss = 0;

  cutloss::Problem problem;
  problem.tokens = 1;
  problem.hidden = 1;
  problem.vocab = 2;
  const auto machine = cutloss::Machine::detect();
  if (!machine.ok()) return std::fprintf(stderr, "%s\n", machine.status().message().c_str()), 1;
  const auto plan = cutloss::make_plan(problem, {}, machine.value());
  if (!plan.ok()) return std::fprintf(stderr, "%s\n", plan.status().message().c_str()), 1;
  const cutloss::Status status = cutloss::run(plan.value(), {.e = e, .c = c, .labels = labels}, {.loss = &loss});
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  std::printf("loss %.7f, wanted 1.3132617\n", static_cast<double>(loss));
  return std::abs(loss - 1.3132617f) < 1e-6f ? 0 : 1;
}
