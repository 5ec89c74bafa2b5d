// The metrics where the sweep's oracle is lenient or silent: ties, NaN, k beyond V, masked rows, logits far from 0.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cpu/test_problem.h"

namespace cutloss {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Measured {
  std::vector<float> loss, nll, lse, entropy, logprobs, d_c;
  std::vector<std::int64_t> argmax, rank, ids;
  std::vector<std::uint8_t> correct;
};

class EveryTargetsMetrics : public ::testing::TestWithParam<std::string> {
 protected:
  // Logits as given, exactly: hidden size 1, hidden state 1, and rows that differ by their labels alone.
  Measured measure(const std::vector<float>& z, const std::vector<std::int64_t>& labels, std::int64_t k, float e = 1.0f,
                   bool masked = false, std::optional<float> softcap = {},
                   const std::vector<std::int64_t>& order = {}) {
    Problem p;
    p.tokens = static_cast<std::int64_t>(labels.size());
    p.vocab = static_cast<std::int64_t>(z.size());
    p.hidden = 1;
    p.reduction = Reduction::none;
    p.bad_labels = BadLabels::nan;
    p.metrics = {true, true, true, k, false};
    p.softcap = softcap;
    p.vocab_order = !order.empty();
    p.want_d_c = true;
    if (masked) p.bias_dtype = DType::f32;
    const std::vector<float> states(labels.size(), e), bias(z.size(), masked ? -kInf : 0.0f);
    const auto n = labels.size();
    Measured m{std::vector<float>(n),
               std::vector<float>(n),
               std::vector<float>(n),
               std::vector<float>(n),
               std::vector<float>(n * static_cast<std::size_t>(k)),
               std::vector<float>(z.size()),
               std::vector<std::int64_t>(n),
               std::vector<std::int64_t>(n),
               std::vector<std::int64_t>(n * static_cast<std::size_t>(k)),
               std::vector<std::uint8_t>(n)};
    Inputs in{states.data(), z.data(), labels.data()};
    if (masked) in.bias = bias.data();
    if (!order.empty()) in.vocab_order = order.data();
    Outputs out{m.loss.data(), m.nll.data(), m.lse.data()};
    out.d_c = m.d_c.data();
    out.entropy = m.entropy.data();
    out.argmax = m.argmax.data();
    out.correct = m.correct.data();
    out.rank = m.rank.data();
    out.top_k_ids = k > 0 ? m.ids.data() : nullptr;
    out.top_k_logprobs = k > 0 ? m.logprobs.data() : nullptr;
    const Status status = run(make_plan(p, {}, testing::machine_for(GetParam())).value(), in, out);
    EXPECT_TRUE(status.ok()) << status.message();
    return m;
  }
};

TEST_P(EveryTargetsMetrics, OfEqualLogitsAHigherIdIsTaken) {
  // Ties within a tile and across tiles (of at most 224 ids), with the label at either end of them.
  std::vector<float> z(700, 0.0f);
  for (const std::size_t v : {3u, 4u, 250u, 699u}) z[v] = 5.0f;
  const Measured m = measure(z, {3, 4, 250, 699, 0}, 6);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(m.argmax[i], 3) << i;
    EXPECT_EQ(m.correct[i], i == 0) << i;
    EXPECT_EQ(m.rank[i], i == 4 ? 4 : 0) << "equals are not larger; row " << i;
    const std::vector<std::int64_t> want{3, 4, 250, 699, 0, 1};
    for (std::size_t k = 0; k < 6; ++k) EXPECT_EQ(m.ids[i * 6 + k], want[k]) << i << " " << k;
  }
}

TEST_P(EveryTargetsMetrics, OfEqualLogitsTheFirstInTheOrderIsTaken) {
  std::vector<float> z(700, 0.0f);
  for (const std::size_t v : {3u, 4u, 250u, 699u}) z[v] = 5.0f;
  std::vector<std::int64_t> order(700);
  for (std::size_t i = 0; i < 700; ++i) order[i] = static_cast<std::int64_t>(699 - i);
  std::swap(order[699 - 3], order[2]);  // 3 is at place 2, behind 699 in the same tile
  const Measured m = measure(z, {3, 4, 250, 699, 0}, 4, 1.0f, false, {}, order);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(m.argmax[i], 3) << i;
    EXPECT_EQ(m.correct[i], i == 0) << i;
    EXPECT_EQ(m.ids[i * 4], 3) << i;
  }
}

TEST_P(EveryTargetsMetrics, MoreAreAskedForThanThereAre) {
  const Measured m = measure({1, 3, 2}, {0, 2}, 128);
  const double lse = std::log(std::exp(1.0) + std::exp(2.0) + std::exp(3.0));
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::size_t k = 0; k < 128; ++k) {
      const std::int64_t id = k < 3 ? std::vector<std::int64_t>{1, 2, 0}[k] : -1;
      EXPECT_EQ(m.ids[i * 128 + k], id);
      if (k < 3) {
        EXPECT_NEAR(m.logprobs[i * 128 + k], 3.0 - static_cast<double>(k) - lse, 4 * 0x1p-24 * lse);
      } else {
        EXPECT_EQ(m.logprobs[i * 128 + k], -kInf);
      }
    }
  }
}

// Nothing of such a row has an order: its best logit might be the NaN, and its label look like rank 0.
TEST_P(EveryTargetsMetrics, ANanOrAnInfinityHidesInARowsMetrics) {
  for (const float broken : {NAN, kInf}) {
    for (const std::size_t size : {300u, 1u}) {
      std::vector<float> z(size, 0.0f);
      z[size > 1 ? 7 : 0] = broken;
      z[size > 1 ? 9 : 0] += 2.0f;
      for (const std::int64_t label : {0, 7, 9}) {
        if (static_cast<std::size_t>(label) >= size) continue;
        const Measured m = measure(z, {label}, 2);
        EXPECT_TRUE(std::isnan(m.nll[0]) && std::isnan(m.lse[0]) && std::isnan(m.loss[0])) << broken << " " << label;
        EXPECT_TRUE(std::isnan(m.entropy[0])) << broken << " " << label;
        EXPECT_EQ(m.argmax[0], -1) << broken << " " << label;
        EXPECT_EQ(m.correct[0], 0) << broken << " " << label;
        EXPECT_EQ(m.rank[0], -1) << broken << " " << label;
        for (std::size_t k = 0; k < 2; ++k) {
          EXPECT_EQ(m.ids[k], -1) << broken << " " << label;
          EXPECT_TRUE(std::isnan(m.logprobs[k])) << broken << " " << label;
        }
      }
    }
  }
}

TEST_P(EveryTargetsMetrics, AMaskedRowHasAnArgmaxOrANanEntropy) {
  const Measured m = measure(std::vector<float>(20, 1.0f), {0, 19}, 3, 1.0f, true);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(m.loss[i], kInf);
    EXPECT_EQ(m.lse[i], -kInf);
    EXPECT_EQ(m.entropy[i], 0.0f);
    EXPECT_EQ(m.argmax[i], -1);
    EXPECT_EQ(m.correct[i], 0);
    EXPECT_EQ(m.rank[i], 0);
    for (std::size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(m.ids[i * 3 + k], -1);
      EXPECT_EQ(m.logprobs[i * 3 + k], -kInf);
    }
  }
}

// Under a softcap the formula holds to the letter: cap * tanh(-inf / cap) is -cap, and no id can be masked by a bias.
TEST_P(EveryTargetsMetrics, ABiasOfMinusInfinityMasksUnderASoftcap) {
  const Measured m = measure({1, 2, 3, 4}, {2}, 1, 1.0f, true, 2.0f);
  EXPECT_NEAR(m.lse[0], -2.0 + std::log(4.0), 4 * 0x1p-24);
  EXPECT_NEAR(m.nll[0], std::log(4.0), 4 * 0x1p-24);
  for (const float value : m.d_c) EXPECT_EQ(value, 0.0f);  // tanh is flat there
}

// Logits that are exact in f32 but share a large part: entropy from lse - z would keep 2 to 5 digits fewer.
TEST_P(EveryTargetsMetrics, WhatAllLogitsShareCostsTheEntropyDigits) {
  for (const float offset : {0.0f, 1024.0f, -4096.0f, 1048576.0f}) {
    std::vector<float> z(600);
    for (std::size_t v = 0; v < z.size(); ++v) z[v] = offset + static_cast<float>(v * 37 % 101) / 8 - 6.0f;
    // The running maximum climbs late, from far below and from near.
    for (std::size_t v = 0; v < 300; ++v) z[v] = offset - 20.0f + static_cast<float>(v % 16) / 8;
    double sum = 0, weighted = 0;
    for (const float value : z) {
      const double gap = static_cast<double>(value) - offset;
      sum += std::exp(gap);
      weighted += std::exp(gap) * gap;
    }
    const double want = std::log(sum) - weighted / sum;
    const Measured m = measure(z, {5, 400, -3}, 0);
    for (std::size_t i = 0; i < 3; ++i) {
      // A weight has 128 units of its last place (exp and its argument), the sum over 600 no more than that again; they
      // weigh terms that add up to the entropy and 12, the largest gap that counts.
      EXPECT_NEAR(m.entropy[i], want, 2 * 128 * 0x1p-24 * (want + 12)) << "offset " << offset << ", row " << i;
    }
  }
}

TEST_P(EveryTargetsMetrics, ABadLabelTakesTheSoftmaxWithIt) {
  const Measured m = measure({1, 3, 2}, {-3, 0}, 1);
  EXPECT_TRUE(std::isnan(m.loss[0]) && std::isnan(m.nll[0]));
  EXPECT_EQ(m.lse[0], m.lse[1]);
  EXPECT_NEAR(m.entropy[0], m.entropy[1], 0x1p-20);
  EXPECT_EQ(m.argmax[0], 1);
  EXPECT_EQ(m.correct[0], 0);
  EXPECT_EQ(m.rank[0], -1);
  EXPECT_EQ(m.ids[0], 1);
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryTargetsMetrics, ::testing::ValuesIn(available_targets()),
                         [](const auto& param) { return param.param; });

// A label outside the vocabulary has no class: its weight is 1 in the mean's denominator, not that of class 0, and a
// class weight of 0 must not hide it.
TEST(BadLabel, CountsAsClassZero) {
  for (const float class_0 : {0.0f, 5.0f}) {
    for (const float smoothing : {0.0f, 0.1f, 1.0f}) {
      Problem p;
      p.tokens = 3;
      p.vocab = 4;
      p.hidden = 1;
      p.bad_labels = BadLabels::nan;
      p.class_weights = true;
      p.label_smoothing = smoothing;
      p.want_d_e = true;
      const std::vector<float> e{1, 2, -1}, c{1, 0, 2, -1}, weights{class_0, 1, 1, 1};
      const auto run_with = [&](std::int64_t label, float& loss, std::vector<float>& d_e) {
        const std::vector<std::int64_t> labels{1, label, 3};
        Inputs in{e.data(), c.data(), labels.data()};
        in.class_weights = weights.data();
        d_e.assign(3, 0);
        Outputs out{&loss};
        out.d_e = d_e.data();
        EXPECT_TRUE(run(make_plan(p, {}, Machine::detect().value()).value(), in, out).ok());
      };
      float loss = 0, good_loss = 0;
      std::vector<float> d_e, good;
      run_with(4, loss, d_e);
      run_with(2, good_loss, good);  // another label of weight 1
      EXPECT_TRUE(std::isnan(loss));
      EXPECT_TRUE(std::isnan(d_e[1]));
      EXPECT_EQ(d_e[0], good[0]);
      EXPECT_EQ(d_e[2], good[2]);
    }
  }
}

}  // namespace
}  // namespace cutloss
