// Filters: the certificate and the variance bound hold row by row, nothing is biased, and what cannot be certified is
// done exactly.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "src/cpu/kernels.h"
#include "src/cpu/test_problem.h"

namespace cutloss {
namespace {

using testing::Answer;
using testing::Case;

struct Filtered {
  Answer answer;
  FilterReport report;
  Plan plan;
};

class EveryTargetSparse : public ::testing::TestWithParam<std::string> {
 protected:
  Plan plan(const Problem& problem, std::optional<std::uint64_t> budget = {}, int threads = 2) {
    Limits limits;
    limits.budget_bytes = budget;
    limits.threads = threads;
    Result<Plan> made = make_plan(problem, limits, testing::machine_for(GetParam(), threads));
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? made.value() : Plan{};
  }

  Filtered run(Case& test, const Plan& made, std::uint64_t seed = 0, Executor* executor = nullptr) {
    Filtered result;
    result.plan = made;
    const Problem& p = test.problem;
    Answer& a = result.answer;
    a.loss.assign(p.reduction == Reduction::none ? static_cast<std::size_t>(p.tokens) : 1, NAN);
    a.nll.assign(static_cast<std::size_t>(p.tokens), NAN);
    a.lse = a.nll;
    Outputs out{a.loss.data(), a.nll.data(), a.lse.data()};
    if (p.want_d_e) {
      a.d_e = testing::Array(p.e_dtype, static_cast<std::size_t>(p.tokens * p.hidden), NAN);
      out.d_e = a.d_e.data();
    }
    if (p.want_d_c) {
      a.d_c = testing::Array(p.c_dtype, static_cast<std::size_t>(p.vocab * p.hidden), NAN);
      out.d_c = a.d_c.data();
    }
    out.filter_report = &result.report;
    out.valid_count = &a.valid_count;
    Inputs in = test.inputs();
    in.seed = seed;
    std::vector<std::byte> workspace(made.workspace_bytes + 64, std::byte{0xFF});
    a.status = cutloss::run(made, in, out, {workspace.data(), made.workspace_bytes}, executor);
    EXPECT_TRUE(a.status.ok()) << a.status.message();
    for (std::size_t i = made.workspace_bytes; i < workspace.size(); ++i) EXPECT_EQ(workspace[i], std::byte{0xFF});
    return result;
  }

  // Peaked rows, as of a trained model: some entries carry most of the mass, thousands share the rest.
  Case peaked(std::int64_t n, std::int64_t v, std::int64_t d, bool d_c, unsigned seed = 3) {
    Case test = Case::random(n, v, d, seed, 4.0f);
    test.problem.want_d_e = true;
    test.problem.want_d_c = d_c;
    return test;
  }

  // ||got - want|| of row i of dE.
  static double row_error(const Answer& got, const reference::Reference& want, std::int64_t i, std::int64_t d,
                          double* bound) {
    double sum = 0;
    double rounding = 0;
    for (std::int64_t k = i * d; k < (i + 1) * d; ++k) {
      const double difference = got.d_e.get(static_cast<std::size_t>(k)) - want.d_e[static_cast<std::size_t>(k)];
      sum += difference * difference;
      rounding += want.d_e_bound[static_cast<std::size_t>(k)] * want.d_e_bound[static_cast<std::size_t>(k)];
    }
    *bound = std::sqrt(rounding);
    return std::sqrt(sum);
  }
};

TEST_P(EveryTargetSparse, CertificateCoversTheErrorOfEveryRow) {
  for (const float epsilon : {1e-2f, 1e-3f, 1e-4f}) {
    Case test = peaked(37, 1000, 33, false);
    test.problem.filter = Filter::certified;
    test.problem.epsilon = epsilon;
    const Filtered got = run(test, plan(test.problem));
    ASSERT_EQ(got.plan.mode, Mode::sparse);
    const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {1300});
    EXPECT_EQ(got.report.rows, want.valid_count);
    EXPECT_EQ(got.report.rows_redone, 0);
    EXPECT_LT(got.report.kept_entries, 37 * 1000 * 0.9);
    EXPECT_GT(got.report.dropped_mass_max, 0);
    double worst = 0;
    for (std::int64_t i = 0; i < 37; ++i) {
      double rounding = 0;
      const double error = row_error(got.answer, want, i, 33, &rounding);
      EXPECT_LE(error, got.report.error_bound + rounding) << "row " << i << " epsilon " << epsilon;
      worst = std::max(worst, error);
    }
    // The check above must be able to fail: something is dropped, and it shows.
    if (epsilon >= 1e-3f) {
      EXPECT_GT(worst, got.report.error_bound * 1e-3);
    }
    EXPECT_NEAR(got.answer.loss[0], want.loss, want.loss_bound) << "the loss is exact under a filter";
  }
}

TEST_P(EveryTargetSparse, RowsOverTheToleranceAreDoneExactly) {
  for (const bool d_c : {false, true}) {
    Case test = peaked(40, 900, 20, d_c);
    test.problem.filter = Filter::certified;
    test.problem.tolerance = 0.02f;
    Plan made = plan(test.problem);
    made.epsilon = 1e-3f;  // larger than the planner takes, so that some rows fail and others do not
    const Filtered got = run(test, made);
    EXPECT_LE(got.report.dropped_mass_max, 0.02);
    EXPECT_GT(got.report.rows_redone, 0);
    EXPECT_LT(got.report.rows_redone, got.report.rows);
    const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {4000});
    std::int64_t exact = 0;
    for (std::int64_t i = 0; i < 40; ++i) {
      double rounding = 0;
      const double error = row_error(got.answer, want, i, 20, &rounding);
      EXPECT_LE(error, got.report.error_bound + rounding) << "row " << i;
      if (i % 5 != 3 && error <= rounding) ++exact;
    }
    EXPECT_GE(exact, got.report.rows_redone);
    // dC: the sum over rows of e_i times what the row's entries are off by, of l1 norm 2 |g| delta_i at most.
    double e_norm = 0;
    for (std::size_t i = 0; i < test.e.size(); ++i) e_norm = std::max<double>(e_norm, std::abs(test.e.get(i)));
    for (std::size_t i = 0; i < got.answer.d_c.size(); ++i) {
      EXPECT_NEAR(got.answer.d_c.get(i), want.d_c[i], 2 * 0.02 * e_norm + want.d_c_bound[i]);
    }
  }
}

TEST_P(EveryTargetSparse, FlatRowsFallBackToTheExactMode) {
  for (const bool d_c : {false, true}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Case test = Case::random(50, 40000, 8, 5, 0.1f, dtype);
      test.problem.want_d_e = true;
      test.problem.want_d_c = d_c;
      test.problem.filter = Filter::certified;
      test.problem.epsilon = 1e-7f;
      const Filtered got = run(test, plan(test.problem));
      EXPECT_EQ(got.report.rows_redone, got.report.rows);
      reference::Options options{60000};
      options.rounds_twice = true;
      const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), options);
      const auto worst = testing::compare(got.plan, got.answer, want);
      EXPECT_LE(worst.ratio, 1.0) << worst.where;
    }
  }
}

// Ids far below epsilon, then thousands above it, then likelier ones still: with a frozen head the rows are filtered
// until that shows, and end without a filter in the same pass.
TEST_P(EveryTargetSparse, RowsThatTurnFlatLoseWhatWasDroppedBefore) {
  const std::int64_t n = 520, v = 13000, d = 16;
  const auto level = [](std::int64_t id) { return id < 4700 ? -24.0f : id < 8700 ? 0.0f : 4.0f; };
  for (const std::optional<float> softcap : {std::optional<float>(), std::optional<float>(12.0f)}) {
    Case test = Case::random(n, v, d, 5, 0.1f, softcap ? DType::bf16 : DType::f32);
    test.problem.want_d_e = true;
    test.problem.softcap = softcap;
    test.problem.filter = Filter::certified;
    test.problem.epsilon = 1e-6f;
    const std::size_t last = d - 1;
    for (std::int64_t id = 0; id < v; ++id) test.c.set(static_cast<std::size_t>(id * d) + last, level(id));
    for (std::size_t i = 0; i < n; ++i) {
      test.e.set(i * d + last, 1.0f);
      if (test.labels[i] >= 0) test.labels[i] = v - 1 - static_cast<std::int64_t>(i);
    }
    const Filtered got = run(test, plan(test.problem));
    ASSERT_EQ(got.plan.vocab_slices, 1) << "each would turn by itself";
    EXPECT_EQ(got.report.rows_redone, got.report.rows);
    const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {v + 300});
    double most = 0;
    for (std::size_t i = 0; i < n; ++i) {
      double rounding = 0;
      const double error = row_error(got.answer, want, static_cast<std::int64_t>(i), d, &rounding);
      EXPECT_LE(error, got.report.error_bound + rounding) << "row " << i;
      if (test.labels[i] < 0) continue;
      double dropped = 0;
      for (std::size_t id = 0; id < 4700; ++id) {
        double z = 0;
        for (std::size_t k = 0; k < d; ++k) z += static_cast<double>(test.e.get(i * d + k)) * test.c.get(id * d + k);
        if (softcap) z = *softcap * std::tanh(z / *softcap);
        dropped += std::exp(z - want.lse[i]);
      }
      most = std::max(most, dropped);
    }
    EXPECT_NEAR(got.report.dropped_mass_max, 1.01 * most, 1e-3 * most);
  }
}

// A softmax that is no number drops nothing: every dz of its row is NaN.
TEST_P(EveryTargetSparse, ARowThatIsNaNLeavesIdsOfTheHeadFinite) {
  for (const Filter filter : {Filter::certified, Filter::unbiased, Filter::tile}) {
    for (const bool bad_label : {false, true}) {
      Case test = Case::random(6, 300, 8, 4, 300.0f);
      test.problem.want_d_e = test.problem.want_d_c = true;
      test.problem.bad_labels = BadLabels::nan;
      test.problem.filter = filter;
      test.problem.epsilon = 1e-3f;
      if (bad_label) {
        test.labels[2] = 300;
      } else {
        for (std::size_t k = 16; k < 24; ++k) test.e.set(k, NAN);
      }
      const Answer got = run(test, plan(test.problem)).answer;
      EXPECT_TRUE(std::isnan(got.loss[0]));
      for (std::size_t i = 0; i < got.d_c.size(); ++i) {
        ASSERT_TRUE(std::isnan(got.d_c.get(i))) << name(filter) << " d_c[" << i << "], label " << bad_label;
      }
      for (std::size_t i = 0; i < got.d_e.size(); ++i) {
        ASSERT_EQ(std::isnan(got.d_e.get(i)), i / 8 == 2) << name(filter) << " d_e[" << i << "], label " << bad_label;
      }
    }
  }
}

// Against their own running sum alone the entries of the first tiles would all be kept.
TEST_P(EveryTargetSparse, FirstTilesAreMeasuredAgainstALabelOfTheLast) {
  const std::int64_t v = 4000, d = 64;
  for (const Filter filter : {Filter::certified, Filter::unbiased}) {
    for (const std::optional<float> softcap : {std::optional<float>(), std::optional<float>(50.0f)}) {
      Case test = Case::random(30, v, d, 9, 1.0f);
      test.problem.want_d_e = true;
      test.problem.filter = filter;
      test.problem.epsilon = 1e-3f;
      test.problem.softcap = softcap;
      for (std::size_t i = 0; i < 30; ++i) {
        if (test.labels[i] < 0) continue;
        test.labels[i] = v - 1 - static_cast<std::int64_t>(i);
        double square = 0;
        const auto label = static_cast<std::size_t>(test.labels[i] * d);
        for (std::size_t k = 0; k < d; ++k) square += std::pow(test.c.get(label + k), 2);
        for (std::size_t k = 0; k < d; ++k) {
          test.e.set(i * d + k, static_cast<float>(30 / square * test.c.get(label + k)));
        }
      }
      const Filtered got = run(test, plan(test.problem));
      const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {v + 300});
      const auto confident =
          static_cast<double>(std::count_if(want.nll.begin(), want.nll.end(), [](double nll) { return nll < 1e-3; }));
      ASSERT_GT(confident, 15);
      EXPECT_LT(got.report.kept_entries, 2 * static_cast<double>(got.report.rows)) << name(filter);
      EXPECT_NEAR(got.answer.loss[0], want.loss, want.loss_bound);
    }
  }
}

// epsilon so small that everything is kept: the sparse path without its approximation.
TEST_P(EveryTargetSparse, KeepingEverythingIsExact) {
  for (const Filter filter : {Filter::certified, Filter::unbiased}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const HeadLayout layout : {HeadLayout::vd, HeadLayout::dv}) {
        for (const bool capped : {false, true}) {
          Case test = Case::random(45, 700, 21, 6, 2.0f, dtype);
          test.problem.want_d_e = test.problem.want_d_c = true;
          test.problem.head_layout = layout;
          if (capped) {
            test.problem.softcap = 3.0f;
          } else {
            test.problem.label_smoothing = 0.9f;  // together they leave nothing to filter
          }
          test.problem.filter = filter;
          test.problem.epsilon = 1e-12f;
          const Filtered got = run(test, plan(test.problem));
          EXPECT_EQ(got.report.rows_redone, 0);
          const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {1800});
          const auto worst = testing::compare(got.plan, got.answer, want);
          EXPECT_LE(worst.ratio, 1.0) << name(filter) << " " << name(dtype) << " " << name(layout) << capped << ": "
                                      << worst.where;
        }
      }
    }
  }
}

TEST_P(EveryTargetSparse, GroupsAndBudgetsChangeNothingThatMatters) {
  Case test = peaked(300, 2000, 16, true);
  test.problem.filter = Filter::certified;
  test.problem.epsilon = 1e-12f;
  const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {4000});
  for (const std::uint64_t budget : {std::uint64_t{64} << 20, std::uint64_t{4} << 20, std::uint64_t{1} << 20}) {
    const Plan made = plan(test.problem, budget);
    EXPECT_LE(made.workspace_bytes, budget);
    const Filtered got = run(test, made);
    const auto worst = testing::compare(made, got.answer, want);
    EXPECT_LE(worst.ratio, 1.0) << budget << " groups of " << made.group_tokens << ": " << worst.where;
  }
}

TEST_P(EveryTargetSparse, SameBitsForAnyNumberOfThreadsAndEachSeed) {
  for (const Filter filter : {Filter::certified, Filter::unbiased}) {
    Case test = peaked(150, 3000, 17, true);
    test.problem.filter = filter;
    test.problem.epsilon = 1e-3f;
    const Plan made = plan(test.problem, {}, 4);
    const std::string want = run(test, made, 7).answer.bits();
    for (const int threads : {1, 2, 3}) {
      const auto executor = make_thread_executor(threads);
      EXPECT_EQ(run(test, made, 7, executor.get()).answer.bits(), want) << threads << " threads";
      EXPECT_EQ(run(test, plan(test.problem, {}, threads), 7).answer.bits(), want) << "planned for " << threads;
    }
    if (filter == Filter::unbiased) {
      EXPECT_NE(run(test, made, 8).answer.bits(), want) << "the seed is not used";
    }
  }
}

// The mean over S seeds of dE and dC is off by their standard error: rms row error / sqrt(S).
TEST_P(EveryTargetSparse, UnbiasedHasTheRightExpectationAndVariance) {
  const std::int64_t n = 24, v = 2500, d = 12;
  const int seeds = GetParam() == "scalar" ? 60 : 200;
  Case test = peaked(n, v, d, true);
  test.problem.filter = Filter::unbiased;
  test.problem.epsilon = 4e-3f;
  const Plan made = plan(test.problem);
  const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {4000});
  std::vector<double> mean_e(want.d_e.size()), square(static_cast<std::size_t>(n)), mean_c(want.d_c.size());
  double bound = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    const Filtered got = run(test, made, static_cast<std::uint64_t>(seed));
    EXPECT_EQ(got.report.rows_redone, 0);
    bound = got.report.error_bound;
    for (std::size_t i = 0; i < mean_e.size(); ++i) mean_e[i] += got.answer.d_e.get(i) / seeds;
    for (std::size_t i = 0; i < mean_c.size(); ++i) mean_c[i] += got.answer.d_c.get(i) / seeds;
    for (std::int64_t i = 0; i < n; ++i) {
      double rounding = 0;
      const double error = row_error(got.answer, want, i, d, &rounding);
      square[static_cast<std::size_t>(i)] += error * error / seeds;
    }
  }
  double total_error = 0, total_variance = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    // The variance bound, row by row, with five standard errors of a variance: 5 sqrt(2 / S).
    EXPECT_LE(square[static_cast<std::size_t>(i)], bound * bound * (1 + 5 * std::sqrt(2.0 / seeds))) << "row " << i;
    total_variance += square[static_cast<std::size_t>(i)];
  }
  EXPECT_GT(total_variance, 0) << "nothing is left to chance: the test tests nothing";
  for (std::size_t i = 0; i < mean_e.size(); ++i) total_error += std::pow(mean_e[i] - want.d_e[i], 2);
  // Of a sum of many squares of mean V / S the probability to be four times as large is negligible.
  EXPECT_LE(total_error, 4 * total_variance / seeds) << "dE is biased";
  // Rows of C: the summed error of dC is that of sums of the same entries against E.
  double c_error = 0, c_norm = 0;
  for (std::size_t i = 0; i < mean_c.size(); ++i) {
    c_error += std::pow(mean_c[i] - want.d_c[i], 2);
    c_norm += want.d_c[i] * want.d_c[i];
  }
  EXPECT_LE(std::sqrt(c_error / c_norm), 0.1 / std::sqrt(static_cast<double>(seeds) / 60)) << "dC is biased";
}

TEST_P(EveryTargetSparse, VocabularyOrderChangesTheWorkAndNotTheAnswer) {
  Case test = peaked(60, 900, 18, true);
  const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {2000});
  std::vector<std::int64_t> order(900);
  ASSERT_TRUE(learn_vocab_order(test.problem, test.inputs(), order.data()).ok());
  std::vector<bool> seen(900);
  for (const std::int64_t id : order) seen[static_cast<std::size_t>(id)] = true;
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 900) << "no permutation";
  for (const Filter filter : {Filter::none, Filter::certified, Filter::tile}) {
    test.problem.filter = filter;
    if (filter != Filter::none) test.problem.epsilon = 1e-12f;
    test.problem.vocab_order = true;
    test.order = order;
    const Filtered got = run(test, plan(test.problem));
    const auto worst = testing::compare(got.plan, got.answer, want);
    EXPECT_LE(worst.ratio, 1.0) << name(filter) << ": " << worst.where;
  }
  order[5] = order[6];
  test.order = order;
  const Answer refused = testing::run_plan(plan(test.problem), test.inputs());
  EXPECT_NE(refused.status.message().find("permutation"), std::string::npos) << refused.status.message();
}

TEST_P(EveryTargetSparse, TileFilterDropsWhatIsBelowEpsilonAndNothingElse) {
  for (const bool d_e : {true, false}) {
    for (const bool d_c : {true, false}) {
      if (!d_e && !d_c) continue;
      Case test = Case::random(5, 6000, 20, 3, 8.0f);
      test.problem.want_d_c = d_c;
      test.problem.want_d_e = d_e;
      test.problem.filter = Filter::tile;
      test.problem.epsilon = 1e-30f;
      const Filtered all = run(test, plan(test.problem));
      EXPECT_EQ(all.report.kept_entries, 4.0 * 6000);
      const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {7000});
      auto worst = testing::compare(all.plan, all.answer, want);
      EXPECT_LE(worst.ratio, 1.0) << worst.where;

      test.problem.epsilon = 0.03f;
      const Filtered some = run(test, plan(test.problem));
      EXPECT_LT(some.report.kept_entries, 4.0 * 6000);
      EXPECT_GT(some.report.kept_entries, 0);
      // An entry is off by less than epsilon of its row's upstream gradient, 1 / valid; rows of C lie within 4 x 5 /
      // sqrt(D).
      double c_norm = 0;
      for (std::size_t i = 0; i < test.c.size(); ++i) c_norm = std::max<double>(c_norm, std::abs(test.c.get(i)));
      double worst_error = 0;
      for (std::size_t i = 0; i < some.answer.d_e.size(); ++i) {
        const double error = std::abs(some.answer.d_e.get(i) - want.d_e[i]);
        EXPECT_LE(error, 0.03 / 4 * 6000 * c_norm + want.d_e_bound[i]);
        worst_error = std::max(worst_error, error / want.d_e_bound[i]);
      }
      if (d_e) {
        EXPECT_GT(worst_error, 1) << "nothing was dropped";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryTargetSparse, ::testing::ValuesIn(available_targets()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace cutloss
