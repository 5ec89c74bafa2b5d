// cutloss_combine_shards against a softmax over the whole vocabulary, in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cutloss/cutloss.h"

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Parts {
  std::int64_t shards = 0, rows = 0;
  std::vector<float> max, sum, target;

  cutloss_status combine(std::vector<float>& lse, std::vector<float>& nll) const {
    lse.assign(static_cast<std::size_t>(rows), -7);
    nll.assign(static_cast<std::size_t>(rows), -7);
    return cutloss_combine_shards(shards, rows, max.data(), sum.data(), target.data(), lse.data(), nll.data());
  }
};

// One row's logits split at `ends`.
Parts split(const std::vector<double>& z, std::size_t label, const std::vector<std::size_t>& ends) {
  Parts parts;
  parts.rows = 1;
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    double max = -kInf, sum = 0;
    for (std::size_t v = begin; v < end; ++v) {
      if (v != label) max = std::max(max, z[v]);
    }
    for (std::size_t v = begin; v < end; ++v) {
      if (v != label) sum += std::exp(z[v] - max);
    }
    parts.max.push_back(static_cast<float>(max));
    parts.sum.push_back(static_cast<float>(sum));
    parts.target.push_back(label >= begin && label < end ? static_cast<float>(z[label]) : -kInf);
    ++parts.shards;
    begin = end;
  }
  return parts;
}

TEST(CombineShards, TheSplitChangesTheLoss) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> lse, nll;
  for (const float spread : {0.1f, 3.0f, 100.0f}) {
    std::vector<double> z(10);
    for (double& x : z) x = spread * normal(random);  // f32 values, so that nothing is lost on the way in
    for (std::size_t label = 0; label < z.size(); ++label) {
      const double max = *std::max_element(z.begin(), z.end());
      double all = 0;
      for (const double x : z) all += std::exp(x - max);
      const double want = max + std::log(all);
      for (const std::vector<std::size_t>& ends :
           {std::vector<std::size_t>{10}, {5, 10}, {4, 7, 10}, {1, 9, 10}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}) {
        ASSERT_EQ(split(z, label, ends).combine(lse, nll), CUTLOSS_OK) << cutloss_last_error();
        // Two roundings of each partial sum and one of the result, in f32.
        EXPECT_NEAR(lse[0], want, 4 * 0x1p-24 * (1 + std::abs(want)));
        EXPECT_NEAR(nll[0], want - z[label], 4 * 0x1p-24 * (1 + std::abs(want - z[label])));
      }
    }
  }
}

TEST(CombineShards, AConfidentRowLosesItsDigits) {
  // 1 - p is 9e-7 and 9e-13, of which lse - target in f32 would keep nothing.
  for (const double gap : {16.0, 30.0}) {
    std::vector<double> z(10, 0.0);
    z[3] = gap;
    std::vector<float> lse, nll;
    ASSERT_EQ(split(z, 3, {5, 10}).combine(lse, nll), CUTLOSS_OK);
    const double want = std::log1p(9 * std::exp(-gap));
    EXPECT_NEAR(nll[0], want, 4 * 0x1p-24 * want);
  }
}

TEST(CombineShards, PartsOfARunDoNotFit) {
  // As the header says to make them from lse and nll.
  std::vector<float> lse, nll;
  const double other = 3, own = std::log(4.0);
  for (const double own_nll : {0.01, 1.0, 90.0}) {
    const Parts parts{2,
                      1,
                      {static_cast<float>(other), static_cast<float>(own)},
                      {1, static_cast<float>(-std::expm1(-own_nll))},
                      {-kInf, static_cast<float>(own - own_nll)}};
    ASSERT_EQ(parts.combine(lse, nll), CUTLOSS_OK);
    const double want = std::log(std::exp(other) + std::exp(own));
    // The logits 3, log 4 and the label's come in rounded to f32, and the result is.
    EXPECT_NEAR(lse[0], want, 8 * 0x1p-24 * want) << own_nll;
    EXPECT_NEAR(nll[0], want - own + own_nll, 8 * 0x1p-24 * (want + own_nll)) << own_nll;
  }
}

TEST(CombineShards, AShardWithoutTheTargetBreaksTheRow) {
  std::vector<float> lse, nll;
  ASSERT_EQ((Parts{2, 1, {1, 2}, {1, 1}, {-kInf, -kInf}}.combine(lse, nll)), CUTLOSS_OK);
  EXPECT_NEAR(lse[0], std::log(std::exp(1.0) + std::exp(2.0)), 4 * 0x1p-24);
  EXPECT_EQ(nll[0], kInf);
  // A shard that holds the label and nothing else.
  ASSERT_EQ((Parts{2, 1, {-kInf, 2}, {0, 1}, {2, -kInf}}.combine(lse, nll)), CUTLOSS_OK);
  EXPECT_NEAR(nll[0], std::log(2.0), 0x1p-24);
  // Nothing else anywhere.
  ASSERT_EQ((Parts{1, 1, {-kInf}, {0}, {5}}.combine(lse, nll)), CUTLOSS_OK);
  EXPECT_EQ(nll[0], 0);
  EXPECT_EQ(lse[0], 5);
  // Every id masked.
  ASSERT_EQ((Parts{2, 1, {-kInf, -kInf}, {0, 0}, {-kInf, -kInf}}.combine(lse, nll)), CUTLOSS_OK);
  EXPECT_EQ(nll[0], kInf);
  EXPECT_EQ(lse[0], -kInf);
}

TEST(CombineShards, NanOrInfinityIsLost) {
  std::vector<float> lse, nll;
  for (const Parts& parts :
       {Parts{2, 1, {NAN, 1}, {1, 1}, {-kInf, 1}}, Parts{2, 1, {1, 1}, {1, NAN}, {-kInf, 1}},
        Parts{2, 1, {1, 1}, {1, 1}, {-kInf, NAN}}, Parts{2, 1, {1, 1}, {1, 1}, {-kInf, kInf}},
        Parts{2, 1, {kInf, 1}, {1, 1}, {-kInf, 1}}, Parts{2, 1, {NAN, 1}, {1, 1}, {-kInf, -kInf}}}) {
    ASSERT_EQ(parts.combine(lse, nll), CUTLOSS_OK);
    EXPECT_TRUE(std::isnan(lse[0]) && std::isnan(nll[0])) << lse[0] << " " << nll[0];
  }
}

TEST(CombineShards, RowsAreMixedUp) {
  std::vector<float> lse, nll;
  ASSERT_EQ(
      (Parts{2, 3, {0, 10, 20, 0, 10, 20}, {1, 1, 1, 1, 1, 1}, {0, -kInf, 20, -kInf, 10, -kInf}}.combine(lse, nll)),
      CUTLOSS_OK);
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(nll[static_cast<std::size_t>(i)], std::log(3.0), 4 * 0x1p-24);
    EXPECT_NEAR(lse[static_cast<std::size_t>(i)], 10 * i + std::log(3.0), 32 * 0x1p-24);
  }
}

TEST(CombineShards, RowsBeforeABadOneAreWritten) {
  for (const Parts& parts : {Parts{2, 2, {1, 1, 1, 1}, {1, 1, 1, -1}, {0, 0, -kInf, -kInf}},
                             Parts{2, 2, {1, 1, 1, 1}, {1, 1, 1, 1}, {0, 0, -kInf, 0}}}) {
    float lse[] = {77, 77}, nll[] = {77, 77};
    EXPECT_EQ(cutloss_combine_shards(2, 2, parts.max.data(), parts.sum.data(), parts.target.data(), lse, nll),
              CUTLOSS_INVALID_ARGUMENT);
    EXPECT_TRUE(lse[0] == 77 && nll[0] == 77 && lse[1] == 77 && nll[1] == 77) << cutloss_last_error();
  }
}

TEST(CombineShards, BadCallsCrashOrPass) {
  float x[4] = {1, 1, 1, 1};
  const auto refusal = [&](std::int64_t shards, std::int64_t rows, const float* max, const float* sum,
                           const float* target) {
    EXPECT_EQ(cutloss_combine_shards(shards, rows, max, sum, target, nullptr, nullptr), CUTLOSS_INVALID_ARGUMENT);
    return std::string(cutloss_last_error());
  };
  EXPECT_EQ(refusal(0, 1, x, x, x), "shards is 0; it must be 1 or more");
  EXPECT_EQ(refusal(1, -1, x, x, x), "rows is -1; it must be 0 or more");
  EXPECT_EQ(refusal(std::int64_t{1} << 40, std::int64_t{1} << 40, x, x, x),
            "shards x rows is 1099511627776 x 1099511627776, more than 2^46 values");
  EXPECT_EQ(refusal(1, 1, nullptr, x, x), "max is null");
  EXPECT_EQ(refusal(1, 1, x, nullptr, x), "sum is null");
  EXPECT_EQ(refusal(1, 1, x, x, nullptr), "target_logit is null");
  EXPECT_EQ(
      refusal(2, 1, x, x, x),
      "target_logit of row 0 is given by shard 0 and by shard 1; one shard holds the label, the others have -inf");
  const float negative[] = {1, -2};
  EXPECT_EQ(refusal(1, 2, x, negative, x), "sum[0, 1] is -2; a sum of exponentials is 0 or more");
  EXPECT_EQ(cutloss_combine_shards(1, 0, nullptr, nullptr, nullptr, nullptr, nullptr), CUTLOSS_OK);
}

}  // namespace
