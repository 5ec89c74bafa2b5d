// The whole objective with what objective_test.cc leaves out: strides, weights of any sign, sequences, bad labels, a
// denominator of 0, logits far apart or far from 0, budgets that make many chunks, compensated sums, filters.
#include <gtest/gtest.h>

#include "src/cpu/objective_draw.h"

namespace cutloss {
namespace {

class EveryTargetsEdges : public ::testing::TestWithParam<std::string> {
 protected:
  void check(std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t seed = begin; seed < end; ++seed) {
      testing::Draw draw(seed);
      testing::DrawnCase test = testing::draw_case(draw, GetParam());
      ASSERT_TRUE(validate(test.objective.problem).ok()) << validate(test.objective.problem).message();
      EXPECT_EQ(testing::check_modes(test), "") << "seed " << seed;
    }
  }
};

TEST_P(EveryTargetsEdges, RandomCombinationsOfLayoutsWeightsAndLabels) { check(0, 500); }

TEST_P(EveryTargetsEdges, LongRandomCombinationsOfLayoutsWeightsAndLabels) { check(1000, 11000); }

INSTANTIATE_TEST_SUITE_P(Kernels, EveryTargetsEdges, ::testing::ValuesIn(available_targets()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace cutloss
