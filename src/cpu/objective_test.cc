// The whole objective against the float64 oracle: random combinations of every option, mode, dtype and ragged shape.
#include <gtest/gtest.h>

#include "src/cpu/objective_case.h"
#include "src/cpu/test_problem.h"

namespace cutloss {
namespace {

using testing::Objective;

class EveryTargetsObjective : public ::testing::TestWithParam<std::string> {};

Objective draw(unsigned seed) {
  std::mt19937 random(seed);
  const auto chance = [&](double share) { return std::uniform_real_distribution<>()(random) < share; };
  const auto dtype = [&] { return std::vector{DType::f32, DType::bf16, DType::f16}[random() % 3]; };
  Objective out;
  Problem& p = out.problem;
  p.tokens = 1 + random() % 40;
  p.vocab = 1 + random() % (chance(0.3) ? 500 : 60);
  p.hidden = 1 + random() % 40;
  p.e_dtype = dtype();
  p.c_dtype = dtype();
  if (chance(0.5)) p.label_dtype = DType::i32;
  if (chance(0.5)) p.head_layout = HeadLayout::dv;
  p.reduction = std::vector{Reduction::mean, Reduction::sum, Reduction::none}[random() % 3];
  if (chance(0.5)) p.bias_dtype = dtype();
  if (chance(0.3)) p.logit_scale = 0.7f;
  if (chance(0.3)) p.softcap = 3.0f;
  p.token_weights = chance(0.3);
  p.lse_cotangent = chance(0.3);
  if (chance(0.3)) p.z_loss = 0.01f;
  if (chance(0.3)) {
    p.soft_targets = 1 + random() % 5;
  } else {
    p.class_weights = chance(0.3);
    if (chance(0.3)) p.label_smoothing = 0.2f;
  }
  if (chance(0.3)) p.shift = random() % (p.tokens + 1);
  p.vocab_order = chance(0.2);
  p.metrics = {chance(0.4), chance(0.4), chance(0.4), chance(0.4) ? std::int64_t(1 + random() % 8) : 0, chance(0.4)};
  p.want_d_e = chance(0.7);
  p.want_d_c = chance(0.6);
  p.want_d_bias = p.bias_dtype && chance(0.6);
  p.accumulate_d_e = p.want_d_e && chance(0.3);
  p.accumulate_d_c = p.want_d_c && chance(0.3);
  p.accumulate_d_bias = p.want_d_bias && chance(0.3);
  out.fill(random, 3.0f);
  return out;
}

void check(const std::string& target, unsigned seed) {
  Objective test = draw(seed);
  const Problem& p = test.problem;
  std::vector<Mode> modes = {Mode::automatic};
  if (p.want_d_c || p.want_d_bias) modes = {Mode::chunk, Mode::recompute};
  for (const Mode mode : modes) {
    Limits limits;
    limits.mode = mode;
    const Result<Plan> plan = make_plan(p, limits, testing::machine_for(target));
    ASSERT_TRUE(plan.ok()) << "seed " << seed << ": " << plan.status().message();
    testing::Results before(p), got(p);
    std::vector<std::byte> workspace(plan->workspace_bytes, std::byte{0xFF});
    const Status status = run(plan.value(), test.inputs(), got.outputs(), workspace);
    ASSERT_TRUE(status.ok()) << "seed " << seed << ": " << status.message();
    EXPECT_TRUE(got.intact()) << "seed " << seed;
    const auto want = reference::linear_cross_entropy(
        p, test.inputs(),
        {testing::additions_of(plan.value()), before.d_e.or_null(), before.d_c.or_null(), before.d_bias.or_null()});
    EXPECT_EQ(testing::Difference(p, got, want).find(), "")
        << "seed " << seed << " mode " << name(mode) << " N=" << p.tokens << " V=" << p.vocab << " D=" << p.hidden
        << " softcap " << p.softcap.has_value() << " smoothing " << p.label_smoothing << " soft " << p.soft_targets
        << " class weights " << p.class_weights << " bias " << p.bias_dtype.has_value() << " shift " << p.shift;
  }
}

TEST_P(EveryTargetsObjective, RandomCombinationsOfOptions) {
  for (unsigned seed = 0; seed < 300; ++seed) check(GetParam(), seed);
}

TEST_P(EveryTargetsObjective, LongRandomCombinationsOfOptions) {
  for (unsigned seed = 1000; seed < 6000; ++seed) check(GetParam(), seed);
}

// The oracle's own gradients are the slopes of its own loss: central differences in float64.
TEST(Oracle, GradientsAreTheSlopesOfItsLoss) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    Objective test = draw(seed);
    Problem& p = test.problem;
    p.tokens = std::min<std::int64_t>(p.tokens, 6);
    p.shift = std::min(p.shift, p.tokens);
    p.vocab_order = p.accumulate_d_e = p.accumulate_d_c = p.accumulate_d_bias = false;
    p.e_dtype = p.c_dtype = DType::f32;
    if (p.bias_dtype) p.bias_dtype = DType::f32;
    Objective wide = test;
    std::mt19937 random(seed);
    wide.labels.clear(), wide.cotangent.clear(), wide.lse_cotangent.clear(), wide.soft_ids.clear();
    wide.soft_probabilities.clear(), wide.order.clear(), wide.token_weights.clear(), wide.class_weights.clear();
    wide.fill(random, 2.0f);
    const auto total = [&] {
      const auto r = reference::linear_cross_entropy(p, wide.inputs());
      double sum = p.reduction == Reduction::none ? 0 : r.loss * wide.cotangent[0];
      for (std::size_t i = 0; i < r.lse.size(); ++i) {
        if (p.reduction == Reduction::none) sum += wide.cotangent[i] * r.row_loss[i];
        if (p.lse_cotangent && r.counts[i] != 0) sum += wide.lse_cotangent[i] * r.lse[i];
      }
      return sum;
    };
    if (!std::isfinite(total())) continue;
    const auto want = reference::linear_cross_entropy(p, wide.inputs());
    const auto slope = [&](testing::Buffer& of, std::int64_t at) {
      const float x = of.get(at), up = x + 0x1p-12f, down = x - 0x1p-12f;
      of.set(at, up);
      const double above = total();
      of.set(at, down);
      const double below = total();
      of.set(at, x);
      return (above - below) / (static_cast<double>(up) - down);
    };
    // Third derivatives times 2^-24 / 6, of logits that are elements of size 1 times elements of size 2.
    const auto tolerance = [](double value) { return 1e-5 * (1 + std::abs(value)); };
    for (std::int64_t at = 0; at < wide.e.size(); at += 7) {
      const double value = want.d_e[static_cast<std::size_t>(at)];
      EXPECT_NEAR(slope(wide.e, at), value, tolerance(value)) << "d_e[" << at << "], seed " << seed;
    }
    for (std::int64_t at = 0; at < wide.c.size(); at += 1 + wide.c.size() / 9) {
      const double value = want.d_c[static_cast<std::size_t>(at)];
      EXPECT_NEAR(slope(wide.c, at), value, tolerance(value)) << "d_c[" << at << "], seed " << seed;
    }
    for (std::int64_t at = 0; p.bias_dtype && at < p.vocab; at += 1 + p.vocab / 9) {
      if (std::isinf(wide.bias.get(at))) continue;
      const double value = want.d_bias[static_cast<std::size_t>(at)];
      EXPECT_NEAR(slope(wide.bias, at), value, tolerance(value)) << "d_bias[" << at << "], seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryTargetsObjective, ::testing::ValuesIn(available_targets()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace cutloss
