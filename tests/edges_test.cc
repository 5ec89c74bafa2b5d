// Inputs at the edge of what is meant: nothing to do, ids masked out, NaN where nobody looks, a vocabulary in parts.
#include "cutloss/cutloss.h"
#include "tests/fixtures.h"

namespace cutloss {
namespace {

using testing::Objective;
using testing::Results;

constexpr float kInf = std::numeric_limits<float>::infinity();

class Edges : public ::testing::TestWithParam<std::string> {};

TEST_P(Edges, NothingToDoDividesByZero) {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
    for (const std::int64_t n : {0, 7}) {
      Objective f = testing::fixture(n, 11, 5);
      testing::add_bias(f);
      f.problem.reduction = reduction;
      f.problem.metrics = {true, true, true, 2, true};
      f.labels.assign(static_cast<std::size_t>(n), -100);
      for (const Mode mode : testing::modes_of(f.problem)) {
        const Results got = testing::run_in(f, mode, GetParam());
        ASSERT_TRUE(got.status.ok()) << got.status.message();
        EXPECT_EQ(got.valid_count, 0);
        for (const testing::Buffer* b : {&got.loss, &got.nll, &got.lse, &got.d_e, &got.d_c, &got.d_bias, &got.entropy,
                                         &got.mean_logits, &got.top_logprobs}) {
          EXPECT_TRUE(testing::all_zero(*b)) << name(mode) << " " << name(reduction) << " N=" << n;
        }
        EXPECT_EQ(got.loss.size(), reduction == Reduction::none ? n : 1);
      }
    }
  }
}

// Weights that add up to 0, by token, by class and by a denominator: a mean over nothing.
TEST_P(Edges, AMeanOverNoWeightDividesByZero) {
  for (const int kind : {0, 1, 2}) {
    Objective f = testing::fixture(7, 11, 5);
    f.problem.token_weights = kind == 0;
    f.problem.class_weights = kind == 1;
    f.token_weights.assign(7, 0.0f);
    f.class_weights.assign(11, 0.0f);
    if (kind == 2) f.denominator = 0.0;
    for (const Mode mode : testing::modes_of(f.problem)) {
      const Results got = testing::run_in(f, mode, GetParam());
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      EXPECT_EQ(got.loss.get(0), 0.0f);
      EXPECT_TRUE(testing::all_zero(got.d_e) && testing::all_zero(got.d_c)) << name(mode) << " kind " << kind;
    }
  }
}

// The lse is no mean of anything: its cotangent counts whatever the loss is divided by.
TEST_P(Edges, AMeanOverNoWeightDropsTheLsesGradient) {
  for (const bool by_class : {false, true}) {
    Objective f = testing::fixture(7, 11, 5);
    f.problem.lse_cotangent = true;
    for (int i = 0; i < 7; ++i) f.lse_cotangent.push_back(static_cast<float>(i) - 2.5f);
    f.problem.class_weights = by_class;
    f.class_weights.assign(11, by_class ? 0.0f : 1.0f);
    if (!by_class) f.denominator = 0.0;
    for (const Mode mode : testing::modes_of(f.problem)) {
      const Plan plan = testing::plan_in(f.problem, mode, GetParam()).value();
      const Results got = testing::run_planned(f, plan);
      EXPECT_EQ(got.loss.get(0), 0.0f);
      EXPECT_GT(testing::total(got.d_e), 0.1) << name(mode);
      EXPECT_EQ(testing::off(f, plan, got), "") << name(mode) << (by_class ? " by class" : "");
    }
  }
}

// With z_loss or a cotangent of the lse such a row is looked at, and must not pass for one of id 0.
TEST_P(Edges, SoftTargetsOfPaddingAloneAreTakenForId0) {
  for (const int kind : {0, 1, 2, 3}) {  // nothing looks at them; z_loss; an lse cotangent; both, softcapped, in an order
    Objective f = testing::fixture(7, 11, 5);
    Problem& p = f.problem;
    p.soft_targets = 2;
    p.metrics = {true, true, true, 3, true};
    p.z_loss = kind == 1 || kind == 3 ? 0.01f : 0.0f;
    p.lse_cotangent = kind >= 2;
    if (kind == 3) p.softcap = 2.0f, p.vocab_order = true;
    for (std::int64_t v = 0; v < 11; ++v) f.order.push_back(10 - v);
    for (int i = 0; i < 7; ++i) {
      const bool padding = i == 1 || i == 4;
      f.lse_cotangent.push_back(0.5f);
      f.soft_ids.insert(f.soft_ids.end(), {padding ? -100 : i, padding ? -100 : i + 2});
      f.soft_probabilities.insert(f.soft_probabilities.end(), {0.75f, 0.25f});
    }
    for (const bool id_0_is_best : {false, true}) {
      if (id_0_is_best) {
        for (std::int64_t d = 0; d < 5; ++d) f.c.set(d, 3 * f.e.get(5 + d));  // along row 1
      }
      for (const Mode mode : testing::modes_of(p)) {
        const Plan plan = testing::plan_in(p, mode, GetParam()).value();
        const Results got = testing::run_planned(f, plan);
        EXPECT_EQ(testing::off(f, plan, got), "") << name(mode) << " kind " << kind;
        for (const std::size_t i : {1u, 4u}) {
          EXPECT_EQ(got.nll.get(static_cast<std::int64_t>(i)), 0.0f) << name(mode) << " kind " << kind;
          EXPECT_EQ(got.correct[i], 0) << name(mode) << " kind " << kind;
          EXPECT_EQ(got.rank[i], -1) << name(mode) << " kind " << kind;
          EXPECT_EQ(got.argmax[i] >= 0, kind > 0) << name(mode) << " kind " << kind;
          EXPECT_EQ(got.lse.get(static_cast<std::int64_t>(i)) != 0, kind > 0) << name(mode) << " kind " << kind;
        }
      }
    }
  }
}

// A weight of infinity (or one that a conversion made infinite): the mean is inf / inf.
TEST_P(Edges, AnInfiniteWeightLooksLikeNone) {
  for (const bool by_class : {false, true}) {
    Objective f = testing::fixture(7, 11, 5);
    (by_class ? f.problem.class_weights : f.problem.token_weights) = true;
    f.token_weights.assign(7, 1.0f);
    f.class_weights.assign(11, 1.0f);
    f.token_weights[2] = f.class_weights[5] = std::numeric_limits<float>::infinity();  // 5 is the first row's label
    for (const Mode mode : testing::modes_of(f.problem)) {
      const Results got = testing::run_in(f, mode, GetParam());
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      EXPECT_TRUE(std::isnan(got.loss.get(0))) << name(mode) << " by class " << by_class << ": " << got.loss.get(0);
    }
  }
}

// Lanes without a row form exp(z - max) too: with a bias of 1e9 it is infinite where their max is 0.
TEST_P(Edges, ALargeBiasMakesNanInLanesWithoutARow) {
  for (const std::int64_t n : {1, 7, 33}) {
    Objective f = testing::fixture(n, 11, 5);
    testing::add_bias(f);
    f.bias.set(4, 1e9f);
    for (const Mode mode : testing::modes_of(f.problem)) {
      const Results got = testing::run_in(f, mode, GetParam());
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      EXPECT_TRUE(testing::all_finite(got.d_e) && testing::all_finite(got.d_c) && testing::all_finite(got.d_bias))
          << name(mode) << " N=" << n;
    }
  }
}

TEST(EdgesOfShape, EmptyVocabularyOrHiddenSizeIsASignalOrALoss) {
  for (const auto& [n, v, d, text] :
       {std::tuple{7, 0, 5, "vocab (V) is 0; it must be 1 or more: is the table empty or not yet gathered?"},
        std::tuple{7, 11, 0, "hidden (D) is 0; it must be 1 or more"},
        std::tuple{0, 0, 0, "hidden (D) is 0; it must be 1 or more"},
        std::tuple{7, -1, 5, "vocab (V) is -1; it must be 1 or more: is the table empty or not yet gathered?"}}) {
    for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
      Problem p;
      p.tokens = n, p.vocab = v, p.hidden = d;
      p.reduction = reduction;
      p.want_d_e = p.want_d_c = reduction != Reduction::sum;
      EXPECT_EQ(make_plan(p, {}, testing::machine_for(available_targets()[0])).status().message(), text);
      EXPECT_EQ(learn_vocab_order(p, {}, nullptr).message(), text);
    }
  }
}

// Ids with a bias of -inf: two of four; a whole tile, the first one and the last; all but the label; all.
TEST_P(Edges, MaskedIdsGiveNan) {
  for (const std::int64_t v : {4, 40}) {
    for (const int masked : {0, 1, 2, 3}) {
      Objective f = testing::fixture(3, v, 1);
      Problem& p = f.problem;
      testing::add_bias(f);
      p.reduction = Reduction::sum;
      p.metrics = {true, true, true, 3, false};
      for (std::int64_t i = 0; i < 3; ++i) f.e.set(i, 1);
      const auto open = [&](std::int64_t id) {
        switch (masked) {
          case 0: return id < v / 2;
          case 1: return id >= v / 2;
          case 2: return id == v / 2;
          default: return false;
        }
      };
      std::int64_t count = 0, label = v / 2;
      for (std::int64_t i = 0; i < v; ++i) {
        f.c.set(i, 0);
        f.bias.set(i, open(i) ? 0.0f : -kInf);
        if (open(i)) label = i, ++count;
      }
      f.labels.assign(3, label);
      for (const Mode mode : testing::modes_of(p)) {
        // The smallest budget has tiles of one group of ids, and a masked one among them.
        const std::vector<Plan> plans = testing::plans_by_budget(p, mode, GetParam());
        for (const Plan* plan : {&plans.front(), &plans.back()}) {
          const std::string what = std::string(name(mode)) + " V=" + std::to_string(v) + " kind " +
                                   std::to_string(masked) + " tile " + std::to_string(plan->vocab_tile);
          const Results got = testing::run_planned(f, *plan);
          ASSERT_TRUE(got.status.ok()) << what;
          if (count == 0) {
            EXPECT_EQ(got.loss.get(0), kInf) << what;
          } else {
            EXPECT_NEAR(got.loss.get(0), 3 * std::log(static_cast<double>(count)), 2e-6) << what;
          }
          EXPECT_TRUE(testing::all_finite(got.d_e) && testing::all_finite(got.d_c)) << what;
          EXPECT_EQ(testing::off(f, *plan, got), "") << what;
          for (std::int64_t i = 0; i < v; ++i) {
            if (open(i)) continue;
            EXPECT_EQ(got.d_c.get(i), 0.0f) << what;
            EXPECT_EQ(got.d_bias.get(i), 0.0f) << what;
          }
        }
      }
      if (masked == 3) continue;
      f.labels.assign(3, masked == 0 ? v - 1 : 0);  // a masked one
      for (const Mode mode : testing::modes_of(p)) {
        const Results got = testing::run_in(f, mode, GetParam());
        EXPECT_EQ(got.loss.get(0), kInf) << name(mode);
        EXPECT_TRUE(testing::all_finite(got.d_e) && testing::all_finite(got.d_c)) << name(mode);
      }
    }
  }
}

// In an ignored row, one of weight 0, and one whose target the shift takes away: all as if the row were not there.
TEST_P(Edges, NanInRowsNobodyReadsSpreads) {
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf}) {
    Objective clean = testing::fixture(7, 11, 5);
    clean.labels[2] = -100;
    clean.problem.token_weights = true;
    clean.token_weights = {1, 1, 1, 1, 0, 1, 1};
    Objective poisoned = clean;
    for (std::int64_t i = 0; i < 5; ++i) {
      poisoned.e.set(2 * 5 + i, poison);
      poisoned.e.set(4 * 5 + i, poison);
    }
    Objective without = testing::fixture(5, 11, 5);
    for (std::int64_t i = 0, from = 0; i < 5; ++i, ++from) {
      if (from == 2 || from == 4) ++from;
      for (std::int64_t k = 0; k < 5; ++k) without.e.set(i * 5 + k, clean.e.get(from * 5 + k));
      without.labels[static_cast<std::size_t>(i)] = clean.labels[static_cast<std::size_t>(from)];
    }
    for (const Mode mode : testing::modes_of(clean.problem)) {
      const Results got = testing::run_in(poisoned, mode, GetParam());
      const Results want = testing::run_in(without, mode, GetParam());
      EXPECT_EQ(got.loss.get(0), want.loss.get(0)) << name(mode);
      EXPECT_TRUE(testing::all_finite(got.d_e) && testing::all_finite(got.d_c)) << name(mode);
      for (std::int64_t k = 0; k < 5; ++k) {
        EXPECT_EQ(got.d_e.get(2 * 5 + k), 0.0f);
        EXPECT_EQ(got.d_e.get(4 * 5 + k), 0.0f);
        EXPECT_EQ(got.d_e.get(6 * 5 + k), want.d_e.get(4 * 5 + k)) << name(mode);
      }
      EXPECT_NEAR(testing::total(got.d_c), testing::total(want.d_c), 1e-6 * testing::total(want.d_c)) << name(mode);
      poisoned.token_weights[4] = 1;
      EXPECT_FALSE(std::isfinite(testing::run_in(poisoned, mode, GetParam()).loss.get(0))) << name(mode);
      poisoned.token_weights[4] = 0;
    }
  }
}

// z-loss of rows that are left out, or over their number; smoothing over ignored rows.
TEST_P(Edges, ZLossAndSmoothingCountIgnoredRows) {
  Objective f = testing::fixture(10, 100, 1);
  for (std::int64_t i = 0; i < 10; ++i) f.e.set(i, 0);
  for (std::int64_t i = 0; i < 100; ++i) f.c.set(i, 0);
  for (std::size_t i = 3; i < 10; ++i) f.labels[i] = -100;
  for (const Mode mode : testing::modes_of(f.problem)) {
    f.problem.z_loss = 0;
    EXPECT_NEAR(testing::run_in(f, mode, GetParam()).loss.get(0), 4.605170, 5e-6);
    f.problem.z_loss = 1e-4f;
    EXPECT_NEAR(testing::run_in(f, mode, GetParam()).loss.get(0), 4.605170 + 0.00212076, 5e-6);
  }
  for (const std::int64_t ignored : {-100, -1}) {
    Objective s = testing::softplus_fixture({0, 2, 4, 1});
    s.problem.ignore_index = ignored;
    s.problem.label_smoothing = 0.2f;
    s.labels = {0, ignored, 0, ignored};
    for (const Mode mode : testing::modes_of(s.problem)) {
      EXPECT_NEAR(testing::run_in(s, mode, GetParam()).loss.get(0), 2.155649, 2e-6) << name(mode);
    }
  }
}

// A table in shards, each a problem of its own in which rows of foreign labels have a weight of 0 and a cotangent of
// their lse: p within the shard is p of all times exp(lse of all - lse of the shard).
TEST_P(Edges, ShardsWithoutTheTargetGetNoGradient) {
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{5, 5}, {4, 3, 3}, {10}, {1, 8, 1}}) {
    Objective whole = testing::fixture(4, 10, 5);
    whole.e = testing::lattice_table(DType::f32, 4, 5, 3, 4);
    whole.c = testing::lattice_table(DType::f32, 10, 5, 1, 5);
    whole.labels = {9, 0, 4, 7};
    whole.problem.reduction = Reduction::none;
    const Results want = testing::run_in(whole, Mode::chunk, GetParam());

    const auto shards = static_cast<std::int64_t>(sizes.size());
    std::vector<float> max, sum, target, lse(4), nll(4);
    std::vector<Objective> parts;
    std::int64_t begin = 0;
    for (const std::int64_t size : sizes) {
      Objective part = testing::fixture(4, size, 5);
      part.problem.reduction = Reduction::none;
      part.problem.lse_cotangent = true;
      part.lse_cotangent.assign(4, 0.0f);
      part.e = whole.e;
      for (std::int64_t i = 0; i < size * 5; ++i) part.c.set(i, whole.c.get(begin * 5 + i));
      for (std::size_t i = 0; i < 4; ++i) {
        const std::int64_t label = whole.labels[i] - begin;
        const bool own = label >= 0 && label < size;
        part.labels[i] = own ? label : 0;
        part.cotangent[i] = own;
      }
      const Results got = testing::run_in(part, Mode::chunk, GetParam());
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      for (std::int64_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(std::isfinite(got.lse.get(i)));
        const bool own = part.cotangent[static_cast<std::size_t>(i)] != 0;
        max.push_back(got.lse.get(i));
        sum.push_back(own ? -std::expm1(-got.nll.get(i)) : 1);
        target.push_back(own ? got.lse.get(i) - got.nll.get(i) : -kInf);
      }
      parts.push_back(std::move(part));
      begin += size;
    }
    ASSERT_EQ(cutloss_combine_shards(shards, 4, max.data(), sum.data(), target.data(), lse.data(), nll.data()),
              CUTLOSS_OK);
    for (std::int64_t i = 0; i < 4; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_NEAR(nll[at], want.nll.get(i), 1e-5);
      EXPECT_NEAR(lse[at], want.lse.get(i), 1e-5);
    }
    std::vector<double> d_e(20);
    begin = 0;
    for (std::size_t s = 0; s < parts.size(); ++s) {
      for (std::size_t i = 0; i < 4; ++i) {
        // Loss and lse of the shard together: g (lse - z_y) + h lse has the softmax's factor g + h.
        parts[s].lse_cotangent[i] = std::exp(max[s * 4 + i] - lse[i]) - parts[s].cotangent[i];
      }
      const Results got = testing::run_in(parts[s], Mode::recompute, GetParam());
      for (std::size_t i = 0; i < 20; ++i) d_e[i] += got.d_e.get(static_cast<std::int64_t>(i));
      for (std::int64_t i = 0; i < sizes[s] * 5; ++i) {
        EXPECT_NEAR(got.d_c.get(i), want.d_c.get(begin * 5 + i), 1e-5) << "shard " << s;
      }
      EXPECT_FALSE(testing::all_zero(got.d_c)) << "shard " << s;
      begin += sizes[s];
    }
    for (std::size_t i = 0; i < 20; ++i) EXPECT_NEAR(d_e[i], want.d_e.get(static_cast<std::int64_t>(i)), 1e-5);
  }
}

// The same loss as the batch without its ignored rows, whatever their share.
TEST_P(Edges, IgnoredRowsChangeTheOthers) {
  const std::int64_t n = 160, v = 300, d = 8;
  for (const int share : {1, 2, 20}) {
    Objective sparse = testing::fixture(n, v, d);
    std::vector<std::int64_t> kept;
    for (std::int64_t i = 0; i < n; ++i) {
      if (i % share == 0) kept.push_back(i);
      if (i % share != 0) sparse.labels[static_cast<std::size_t>(i)] = -100;
    }
    Objective compact = testing::fixture(static_cast<std::int64_t>(kept.size()), v, d);
    for (std::size_t k = 0; k < kept.size(); ++k) {
      compact.labels[k] = sparse.labels[static_cast<std::size_t>(kept[k])];
      for (std::int64_t i = 0; i < d; ++i) {
        compact.e.set(static_cast<std::int64_t>(k) * d + i, sparse.e.get(kept[k] * d + i));
      }
    }
    for (const Mode mode : testing::modes_of(sparse.problem)) {
      const Results a = testing::run_in(sparse, mode, GetParam()), b = testing::run_in(compact, mode, GetParam());
      EXPECT_NEAR(a.loss.get(0), b.loss.get(0), 1e-6 * b.loss.get(0)) << name(mode);
      EXPECT_NEAR(testing::total(a.d_c), testing::total(b.d_c), 1e-5 * testing::total(b.d_c)) << name(mode);
      EXPECT_EQ(a.valid_count, static_cast<std::int64_t>(kept.size()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Edges, ::testing::ValuesIn(available_targets()), testing::target_name);

}  // namespace
}  // namespace cutloss
