// The kernels by themselves: the functions under the epilogues, the table, forcing a target.
#include "src/cpu/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "cutloss/cutloss.hpp"

namespace cutloss::cpu {
namespace {

// 64-byte aligned floats, as the kernels take them.
class Aligned {
 public:
  explicit Aligned(const std::vector<float>& values) : values_(values.size() + 16), count_(values.size()) {
    std::copy(values.begin(), values.end(), data());
  }
  float* data() {
    const auto at = reinterpret_cast<std::uintptr_t>(values_.data());
    return values_.data() + (64 - at % 64) % 64 / sizeof(float);
  }
  std::vector<float> values() { return {data(), data() + count_}; }

 private:
  std::vector<float> values_;
  std::size_t count_;
};

class EveryKernel : public ::testing::TestWithParam<std::string> {
 protected:
  const Kernels& kernels() { return *find_kernels(GetParam()); }
};

TEST_P(EveryKernel, ExpIsWithinOneUnitInTheLastPlace) {
  std::vector<float> x, y;
  for (float value = 0; value > -87.3f; value -= 0.00137f) x.push_back(value);
  while (x.size() % 64 != 0) x.push_back(0);
  y.resize(x.size());
  kernels().exp_for_test(x.data(), x.size(), y.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    const float rounded = static_cast<float>(want);
    EXPECT_LE(std::abs(y[i] - want), 1.01 * (std::nextafter(rounded, 2.0f) - rounded)) << x[i];
  }
}

TEST_P(EveryKernel, ExpOfSpecialValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> x(64, -inf), y(64);
  x[0] = 0.0f;
  x[1] = -0.0f;
  x[2] = nan;
  x[3] = -100.0f;
  x[4] = std::numeric_limits<float>::lowest();
  kernels().exp_for_test(x.data(), x.size(), y.data());
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], 1.0f);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[3], 0.0f);
  EXPECT_EQ(y[4], 0.0f);
  EXPECT_EQ(y[63], 0.0f);
}

TEST_P(EveryKernel, SoftcapAndItsSlopeKeepRelativeAccuracy) {
  for (const float cap : {0.5f, 2.0f, 30.0f}) {
    std::vector<float> x;
    for (float u = -20; u < 20; u += 0.0173f) x.push_back(u * cap);
    for (float u = 1e-6f; u < 1; u *= 1.7f) x.push_back(u * cap);
    while (x.size() % 64 != 0) x.push_back(0);
    std::vector<float> y(x.size()), slope(x.size());
    const auto panel = static_cast<std::size_t>(kernels().panel);
    Aligned in(x), z(y), d(slope);
    kernels().softcap(in.data(), static_cast<std::int64_t>(x.size() / panel), cap, z.data(), d.data());
    y = z.values();
    slope = d.values();
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double u = static_cast<double>(x[i]) / cap;
      const double want = cap * std::tanh(u);
      const double want_slope = 1 / (std::cosh(u) * std::cosh(u));
      // x / cap is rounded twice (1/cap, the product): 1.5 eps, which the slope amplifies by up to 2 |u|.
      EXPECT_LE(std::abs(y[i] - want), 4 * 0x1p-23 * std::abs(want)) << x[i] << " cap " << cap;
      EXPECT_LE(std::abs(slope[i] - want_slope), (6 + 4 * std::abs(u)) * 0x1p-23 * want_slope)
          << x[i] << " cap " << cap;
    }
  }
}

TEST_P(EveryKernel, ScaledRowsAreAddedInOrderWhateverTheirLength) {
  constexpr std::int64_t kRows = 7, kStride = 333;
  const std::vector<std::int64_t> index = {3, 0, 6, 3, 5, 1, 2, 4};
  std::vector<float> rows(kRows * kStride), factor(index.size());
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = std::sin(static_cast<float>(i));
  for (std::size_t k = 0; k < factor.size(); ++k) factor[k] = std::ldexp(1.1f, static_cast<int>(9 * (k % 3)));
  for (std::int64_t n = 1; n < kStride; n += n < 40 ? 1 : 13) {
    for (std::int64_t count = 0; count <= static_cast<std::int64_t>(index.size()); ++count) {
      std::vector<float> y(n + 1, 0.25f);
      kernels().add_rows(rows.data(), kStride, index.data(), factor.data(), count, n, y.data());
      for (std::int64_t i = 0; i < n; ++i) {
        double want = 0.25, magnitude = 0.25;
        for (std::int64_t k = 0; k < count; ++k) {
          const double term = static_cast<double>(factor[k]) * rows[index[k] * kStride + i];
          want += term;
          magnitude += std::abs(term);
        }
        // Each step rounds a sum below `magnitude`, and without FMA its product.
        ASSERT_LE(std::abs(y[i] - want), 2 * static_cast<double>(count) * 0x1p-24 * magnitude) << n << ' ' << i;
      }
      ASSERT_EQ(y[n], 0.25f) << "wrote beyond " << n;
    }
  }
}

TEST_P(EveryKernel, ForcedTargetIsTheOneThatIsPlanned) {
  ASSERT_EQ(setenv("CUTLOSS_TARGET", GetParam().c_str(), 1), 0);
  const Result<Machine> machine = Machine::detect();
  unsetenv("CUTLOSS_TARGET");
  ASSERT_TRUE(machine.ok());
  Problem problem;
  problem.tokens = problem.hidden = problem.vocab = 5;
  EXPECT_EQ(make_plan(problem, {}, machine.value())->target, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryKernel, ::testing::ValuesIn(available_targets()),
                         [](const auto& param) { return param.param; });

TEST(KernelTable, UnknownForcedTargetIsRefusedNotReplaced) {
  ASSERT_EQ(setenv("CUTLOSS_TARGET", "avx9000", 1), 0);
  const Result<Machine> machine = Machine::detect();
  unsetenv("CUTLOSS_TARGET");
  EXPECT_EQ(machine.status().code(), StatusCode::unavailable);
  EXPECT_NE(machine.status().message().find("avx9000"), std::string::npos);
}

TEST(KernelTable, HeadGroupsStartOnDifferentCacheSets) {
  for (std::int64_t hidden = 1; hidden <= 8192; ++hidden) {
    for (const int rows : {6, 14}) {
      const std::int64_t padded = (hidden + rows - 1) / rows * rows;
      const std::size_t stride = head_stride(padded, rows);
      EXPECT_GE(stride, static_cast<std::size_t>(padded * rows + 2));  // packing runs two floats over
      EXPECT_EQ(stride / 16 % 2, 1u) << hidden;
      EXPECT_EQ(stride % 16, 0u) << hidden;
    }
  }
}

}  // namespace
}  // namespace cutloss::cpu
