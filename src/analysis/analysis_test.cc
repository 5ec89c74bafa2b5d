// Every statistic against plain float64 over the whole N x V, on ragged shapes.
#include <limits>

#include "src/analysis/dense_case.h"
#include "src/analysis/rank_curve.h"

namespace cutloss::analysis {
namespace {

TEST(AnalysisShares, EntriesAndRowsAreThoseOfTheWholeMatrix) {
  Dense x(37, 301, 19, 1);
  const Report report = must(x, small_options());
  ASSERT_EQ(report.temperatures.size(), 2u);
  for (const auto& shares : report.temperatures) {
    x.fill(shares.temperature);
    for (std::size_t j = 0; j < small_options().exponents.size(); ++j) {
      const double epsilon = std::ldexp(1.0, -small_options().exponents[j]);
      std::int64_t entries = 0, rows = 0;
      for (std::int64_t k = 0; k < x.v; ++k) {
        const auto before = entries;
        for (std::int64_t i = 0; i < x.n; ++i) entries += std::abs(x.g[i][k]) >= epsilon;
        rows += entries > before;
      }
      EXPECT_EQ(shares.entries[j], static_cast<double>(entries) / (37.0 * 301)) << j;
      EXPECT_EQ(shares.rows[j], static_cast<double>(rows) / 301) << j;
    }
  }
}

TEST(AnalysisShares, TilesAreCountedInEveryOrderAndAtEveryTemperature) {
  Dense x(37, 301, 19, 2, 0.9f, 6.0f);
  Options options = small_options();
  options.given_order = reversed(x.v);
  options.orders = {Order::natural, Order::given, Order::sorted};
  const Report report = must(x, options);
  ASSERT_EQ(report.orders.size(), 6u);
  std::vector<std::int64_t> natural(x.v);
  std::iota(natural.begin(), natural.end(), 0);
  const auto sorted = by_mean_logit(x);
  for (const auto& shares : report.orders) {
    x.fill(shares.temperature);
    const auto& order = shares.order == Order::natural  ? natural
                        : shares.order == Order::sorted ? sorted
                                                        : options.given_order;
    for (std::size_t j = 0; j < options.exponents.size(); ++j) {
      const TileCount want = count_tiles(x, order, options, std::ldexp(1.0, -options.exponents[j]));
      EXPECT_EQ(shares.tiles[j], want.kept) << name(shares.order) << j;
      EXPECT_EQ(shares.forced[j], want.forced) << name(shares.order) << j;
      EXPECT_NEAR(shares.rows[j], want.rows, kExact) << name(shares.order) << j;
    }
  }
}

TEST(AnalysisShares, RenamingTheVocabularyChangesNoEntryAndNoTileOfTheSameOrder) {
  const Dense x(37, 301, 19, 3);
  Dense renamed = x;  // id k becomes v - 1 - k
  for (std::int64_t k = 0; k < x.v; ++k) {
    std::copy_n(x.c.begin() + k * x.d, x.d, renamed.c.begin() + (x.v - 1 - k) * x.d);
  }
  for (auto& label : renamed.labels) label = x.v - 1 - label;
  Options options = small_options();
  options.orders = {Order::natural};
  const Report before = must(x, options);
  options.orders = {Order::given, Order::natural};
  options.given_order = reversed(x.v);
  const Report after = must(renamed, options);
  for (std::size_t t = 0; t < before.temperatures.size(); ++t) {
    EXPECT_EQ(before.temperatures[t].entries, after.temperatures[t].entries);
    EXPECT_EQ(before.orders[t].tiles, after.orders[t].tiles);
  }
  EXPECT_NE(before.orders[0].tiles, after.orders[2].tiles);  // the test would see an order that is not followed
}

TEST(AnalysisMass, RanksAreSortedProbabilities) {
  const Dense x(37, 701, 19, 4);
  const Report report = must(x, small_options());
  Matrix sorted = x.p;
  for (auto& row : sorted) std::sort(row.begin(), row.end(), std::greater<>());
  ASSERT_EQ(report.ranks.back().rank, x.v);
  for (const auto& point : report.ranks) {
    double probability = 0, cumulative = 0;
    for (const auto& row : sorted) {
      probability += row[point.rank - 1] / x.n;
      cumulative += std::accumulate(row.begin(), row.begin() + point.rank, 0.0) / x.n;
    }
    // Exact ranks are kept as f32 log2 p, below 2^5 in size: 2^-20 of them, ln 2 times that of p.
    const bool exact = point.rank <= static_cast<std::int64_t>(RankCurve::kExact);
    EXPECT_NEAR(point.probability / probability, 1, exact ? 0x1p-20 : 0.0443) << point.rank;
    EXPECT_NEAR(cumulative, point.cumulative, exact ? 0x1p-20 : 0.0443 * 16 * probability + 0x1p-20) << point.rank;
  }
  EXPECT_NEAR(report.ranks.back().cumulative, 1, kExact);
}

TEST(AnalysisMass, WhatIsBelowEpsilonIsTheSumOfThoseEntries) {
  const Dense x(37, 301, 19, 5);
  const Report report = must(x, small_options());
  for (std::size_t j = 0; j < report.below.size(); ++j) {
    const double epsilon = std::ldexp(1.0, -small_options().exponents[j]);
    double mean = 0, most = 0, kept = 0;
    std::int64_t kept_most = 0;
    for (std::int64_t i = 0; i < x.n; ++i) {
      double mass = 0;
      std::int64_t count = 0;
      for (std::int64_t k = 0; k < x.v; ++k) {
        if (x.p[i][k] < epsilon && k != x.labels[i]) mass += x.p[i][k];
        count += x.p[i][k] >= epsilon;
      }
      mean += mass / x.n, most = std::max(most, mass);
      kept += static_cast<double>(count) / x.n, kept_most = std::max(kept_most, count);
    }
    EXPECT_NEAR(report.below[j].mass_mean, mean, kExact);
    EXPECT_NEAR(report.below[j].mass_max, most, kExact);
    EXPECT_NEAR(report.below[j].kept_mean, kept, 1e-9);
    EXPECT_EQ(report.below[j].kept_max, kept_most);
  }
}

TEST(AnalysisMass, TheLossIsTheOneOfTheWholeMatrix) {
  const Dense x(37, 301, 19, 6, 1.25f);
  const double mean = std::accumulate(x.nll.begin(), x.nll.end(), 0.0) / x.n;
  EXPECT_NEAR(must(x, small_options()).nll, mean, 1e-12 * mean);
}

TEST(AnalysisTolerance, TheLibrarysFiltersAreWithinTheirTolerance) {
  Options options = small_options();
  options.sections.tolerance = true;
  options.tolerances = {0.05f, 1e-3f};
  const Report report = must(Dense(100, 301, 19, 11), options);
  ASSERT_EQ(report.tolerances.size(), 4u);
  for (const auto& point : report.tolerances) {
    EXPECT_GT(point.kept, 0);
    EXPECT_LE(point.kept, 1 + kExact);
    if (point.filter == Filter::certified) {
      EXPECT_LE(point.report.dropped_mass_max, point.tolerance);
    }
    EXPECT_LT(point.d_e.relative, point.tolerance);  // |dE| is about as long as the rows are; f32 sums add 1e-6
  }
}

TEST(AnalysisRows, IgnoredTokensAreLeftOut) {
  Dense x(37, 301, 19, 12);
  Options options = small_options();
  Dense few(30, 301, 19, 12);  // the same seed draws the same first rows
  few.labels.assign(x.labels.begin(), x.labels.begin() + 30);
  few.c = x.c;
  for (std::int64_t i = 30; i < 37; ++i) x.labels[i] = x.problem.ignore_index;
  std::fill(x.e.begin() + 30 * 19, x.e.end(), std::numeric_limits<float>::quiet_NaN());
  const Report all = must(x, options), part = must(few, options);
  EXPECT_EQ(all.tokens, 30);
  EXPECT_EQ(all.nll, part.nll);
  EXPECT_EQ(all.errors[0].d_e[1].relative, part.errors[0].d_e[1].relative);
}

TEST(AnalysisRows, ASampleIsOfWholeTilesSpreadEvenly) {
  const Dense x(100, 61, 7, 13);
  Options options = small_options();
  options.sections = {};
  options.sections.d_e = options.sections.d_c = options.sections.tolerance = false;
  options.sample_tokens = 40;
  const Report report = must(x, options);
  EXPECT_EQ(report.tokens, 40);
  double nll = 0;  // 16 + 16 + 8 of 100: from 0, from 30 + 16, and the last 8
  for (const auto& [first, end] : {std::pair{0, 16}, std::pair{46, 62}, std::pair{92, 100}}) {
    for (int i = first; i < end; ++i) nll += x.nll[i] / 40;
  }
  EXPECT_NEAR(report.nll, nll, 1e-12 * nll);
}

TEST(AnalysisThreads, ResultsAreTheSameBits) {
  const Dense x(70, 301, 19, 14);
  Options options = small_options();
  options.threads = 1;
  const Report one = must(x, options);
  options.threads = 3;
  const Report three = must(x, options);
  EXPECT_EQ(one.nll, three.nll);
  for (std::size_t r = 0; r < one.ranks.size(); ++r) EXPECT_EQ(one.ranks[r].probability, three.ranks[r].probability);
  for (std::size_t m = 0; m < one.errors.size(); ++m) {
    for (std::size_t j = 0; j < one.errors[m].d_e.size(); ++j) {
      EXPECT_EQ(one.errors[m].d_e[j].bias, three.errors[m].d_e[j].bias);
      EXPECT_EQ(one.errors[m].d_c[j].relative, three.errors[m].d_c[j].relative);
    }
  }
}

TEST(AnalysisProgress, AStageIsNotToldOrGoesBackOrEndsBeforeItsTasks) {
  const Dense x(37, 301, 19, 17);
  Options options = small_options();
  options.sections.tolerance = true;
  options.threads = 3;
  std::vector<std::string> stages;
  std::vector<std::vector<double>> done;
  options.progress = [&](std::string_view stage, double share) {
    if (stages.empty() || stages.back() != stage) stages.emplace_back(stage), done.emplace_back();
    done.back().push_back(share);
  };
  must(x, options);
  EXPECT_EQ(stages, (std::vector<std::string>{"softmax", "shares", "errors of dE", "errors of dC", "tolerances"}));
  // 3 tiles of tokens; the 8 of the vocabulary are one block of at most 1024 ids; 4 tolerances of 2 filters.
  const std::vector<std::size_t> tasks = {3, 3, 3, 1, 8};
  for (std::size_t s = 0; s < stages.size(); ++s) {
    ASSERT_EQ(done[s].size(), tasks[s] + 1) << stages[s];
    for (std::size_t i = 0; i < done[s].size(); ++i) {
      EXPECT_EQ(done[s][i], static_cast<double>(i) / static_cast<double>(tasks[s])) << stages[s];
    }
  }
}

TEST(AnalysisErrorsText, NamesArgumentValueAndLimit) {
  Dense x(5, 11, 3, 15);
  Options options = small_options();
  options.exponents = {3, 61};
  EXPECT_NE(refusal(x, options).find("exponents has 61"), std::string::npos);
  options = small_options();
  options.tile_vocab = 0;
  EXPECT_NE(refusal(x, options).find("tile_vocab is 0"), std::string::npos);
  options = small_options();
  options.temperatures = {0.0};
  EXPECT_NE(refusal(x, options).find("temperatures has 0"), std::string::npos);
  options = small_options();
  options.orders = {Order::given};
  options.given_order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9};
  EXPECT_NE(refusal(x, options).find("order[10] is 9"), std::string::npos) << refusal(x, options);
  x.labels[3] = 11;
  EXPECT_NE(refusal(x, small_options()).find("labels[3] is 11, outside [0, 11)"), std::string::npos);
  x.labels.assign(5, x.problem.ignore_index);
  EXPECT_NE(refusal(x, small_options()).find("no token counts"), std::string::npos);
  x.labels.assign(5, 1);
  x.e[2 * 3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(refusal(x, small_options()).find("logits of row 2"), std::string::npos) << refusal(x, small_options());
}

TEST(AnalysisEdges, OneIdAndOneToken) {
  const Dense x(1, 1, 1, 16);
  const Report report = must(x, small_options());
  EXPECT_EQ(report.nll, 0);
  for (const double share : report.temperatures[0].entries) EXPECT_EQ(share, 0);  // p is 1, G is 0
}

}  // namespace
}  // namespace cutloss::analysis
