// Every statistic against plain float64 over the whole N x V, on ragged shapes. Inputs are small multiples of 1/8, so
// that the kernels' f32 dot products are exact and both sides see the same logits: what is left is the order of float64
// additions, at most a few thousand of them, 1e-12.
#include "src/analysis/analysis.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "src/analysis/levels.h"
#include "src/analysis/rank_curve.h"
#include "src/analysis/variants.h"

namespace cutloss::analysis {
namespace {

using Matrix = std::vector<std::vector<double>>;
constexpr double kExact = 1e-12;

// The problem, and all of its N x V numbers.
struct Dense {
  std::int64_t n, v, d;
  Problem problem;
  std::vector<float> e, c;
  std::vector<std::int64_t> labels;
  Matrix p, g, slope;
  std::vector<double> nll;

  Dense(std::int64_t n_, std::int64_t v_, std::int64_t d_, std::uint64_t seed, float scale = 1,
        std::optional<float> softcap = std::nullopt)
      : n(n_), v(v_), d(d_) {
    const auto draw = [&](std::uint64_t i, int most) {
      return static_cast<float>(static_cast<int>(mix(seed ^ mix(i)) % (2 * most + 1)) - most) / 8;
    };
    for (std::int64_t i = 0; i < n * d; ++i) e.push_back(draw(i, 10));
    for (std::int64_t i = 0; i < v * d; ++i) c.push_back(draw(1000000 + i, 8));
    for (std::int64_t i = 0; i < n; ++i) labels.push_back(static_cast<std::int64_t>(mix(seed + i) % v));
    problem.tokens = n, problem.vocab = v, problem.hidden = d;
    problem.logit_scale = scale, problem.softcap = softcap;
    fill(1.0);
  }

  void fill(double temperature) {
    p.assign(n, std::vector<double>(v)), g = p, slope = p;
    nll.assign(n, 0);
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = 0, others = 0;
      for (std::int64_t k = 0; k < v; ++k) {
        double z = 0;
        for (std::int64_t j = 0; j < d; ++j) z += static_cast<double>(e[i * d + j]) * c[k * d + j];
        z *= problem.logit_scale;
        slope[i][k] = problem.logit_scale;
        if (problem.softcap) {
          z = *problem.softcap * std::tanh(z / *problem.softcap);
          slope[i][k] *= 1 - std::pow(z / *problem.softcap, 2);
        }
        sum += p[i][k] = std::exp(z / temperature);
        if (k != labels[i]) others += p[i][k];
      }
      for (double& value : p[i]) value /= sum;
      g[i] = p[i];
      g[i][labels[i]] = -others / sum;
      nll[i] = -std::log(p[i][labels[i]]);
    }
  }

  Inputs inputs() const {
    Inputs in;
    in.e = e.data(), in.c = c.data(), in.labels = labels.data();
    return in;
  }
};

Options small_options() {
  Options o;
  o.tile_tokens = 16, o.tile_vocab = 40;
  o.exponents = {3, 5, 6, 9, 12, 15};
  o.temperatures = {1, 0.6};
  o.variant_exponent = 6;
  o.seed = 7;
  o.threads = 2;
  o.sections.tolerance = false;
  return o;
}

Report must(const Dense& dense, const Options& options) {
  const Result<Machine> machine = Machine::detect();
  Result<Report> report = analyze(dense.problem, dense.inputs(), machine.value(), options);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return report.ok() ? report.value() : Report();
}

std::string refusal(const Dense& dense, const Options& options) {
  const Result<Report> report = analyze(dense.problem, dense.inputs(), Machine::detect().value(), options);
  return report.ok() ? "" : report.status().message();
}

std::vector<std::int64_t> reversed(std::int64_t v) {
  std::vector<std::int64_t> ids(v);
  for (std::int64_t i = 0; i < v; ++i) ids[i] = v - 1 - i;
  return ids;
}

// By falling mean logit, ties by id.
std::vector<std::int64_t> by_mean_logit(const Dense& x) {
  std::vector<double> mean(x.v, 0.0);
  for (std::int64_t k = 0; k < x.v; ++k) {
    for (std::int64_t i = 0; i < x.n; ++i) {
      for (std::int64_t j = 0; j < x.d; ++j) mean[k] += static_cast<double>(x.e[i * x.d + j]) * x.c[k * x.d + j];
    }
  }
  std::vector<std::int64_t> ids(x.v);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](auto a, auto b) { return mean[a] > mean[b]; });
  return ids;
}

struct TileCount {
  double kept = 0, forced = 0, rows = 0;
};

TileCount count_tiles(const Dense& x, const std::vector<std::int64_t>& order, const Options& o, double epsilon) {
  TileCount out;
  double tiles = 0;
  std::vector<char> row(x.v, 0);
  for (std::int64_t t = 0; t < x.n; t += o.tile_tokens) {
    for (std::int64_t w = 0; w < x.v; w += o.tile_vocab, ++tiles) {
      double g = 0, p = 0;
      for (std::int64_t i = t; i < std::min(x.n, t + o.tile_tokens); ++i) {
        for (std::int64_t k = w; k < std::min(x.v, w + o.tile_vocab); ++k) {
          g = std::max(g, std::abs(x.g[i][order[k]]));
          p = std::max(p, x.p[i][order[k]]);
        }
      }
      if (g < epsilon) continue;
      ++out.kept;
      out.forced += p < epsilon;
      for (std::int64_t k = w; k < std::min(x.v, w + o.tile_vocab); ++k) row[order[k]] = 1;
    }
  }
  out.kept /= tiles, out.forced /= tiles;
  out.rows = static_cast<double>(std::count(row.begin(), row.end(), 1)) / static_cast<double>(x.v);
  return out;
}

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

// ---------------------------------------------------------------------------------------------------------- gradients

// G as a filter leaves it, in float64.
Matrix filtered(const Dense& x, Method method, double epsilon, const std::vector<std::int64_t>& order, const Options& o,
                std::uint64_t seed) {
  Matrix out = x.g;
  for (std::int64_t i = 0; i < x.n; ++i) {
    for (std::int64_t k = 0; k < x.v; ++k) {
      if (method == Method::tile || k == x.labels[i] || x.p[i][k] >= epsilon) continue;
      out[i][k] = 0;
      if (method == Method::unbiased && uniform(seed, i, k) < x.p[i][k] / epsilon) out[i][k] = epsilon;
    }
  }
  if (method == Method::tile) {
    for (std::int64_t t = 0; t < x.n; t += o.tile_tokens) {
      for (std::int64_t w = 0; w < x.v; w += o.tile_vocab) {
        double g = 0;
        const auto visit = [&](const auto& use) {
          for (std::int64_t i = t; i < std::min(x.n, t + o.tile_tokens); ++i) {
            for (std::int64_t k = w; k < std::min(x.v, w + o.tile_vocab); ++k) use(out[i][order[k]]);
          }
        };
        visit([&](double value) { g = std::max(g, std::abs(value)); });
        if (g < epsilon) visit([](double& value) { value = 0; });
      }
    }
  }
  return out;
}

// dE or dC of a G, the slopes included.
Matrix gradient(const Dense& x, const Matrix& g, bool of_table) {
  Matrix out(of_table ? x.v : x.n, std::vector<double>(x.d, 0.0));
  for (std::int64_t i = 0; i < x.n; ++i) {
    for (std::int64_t k = 0; k < x.v; ++k) {
      for (std::int64_t j = 0; j < x.d; ++j) {
        out[of_table ? k : i][j] += g[i][k] * x.slope[i][k] * (of_table ? x.e[i * x.d + j] : x.c[k * x.d + j]);
      }
    }
  }
  return out;
}

// The correction: slope-weighted mass of what `left` lacks of a token in a block of the order, times the block's mean
// row of the table (dE), or spread over the block's rows (dC).
void add_tail(const Dense& x, const Matrix& left, const std::vector<std::int64_t>& order, std::int64_t block_rows,
              bool of_table, Matrix& to) {
  for (std::int64_t b = 0; b < x.v; b += block_rows) {
    const std::int64_t end = std::min(x.v, b + block_rows);
    for (std::int64_t i = 0; i < x.n; ++i) {
      double mass = 0;
      for (std::int64_t k = b; k < end; ++k) mass += (x.g[i][order[k]] - left[i][order[k]]) * x.slope[i][order[k]];
      for (std::int64_t k = b; k < end; ++k) {
        for (std::int64_t j = 0; j < x.d; ++j) {
          to[of_table ? order[k] : i][j] += mass / (end - b) * (of_table ? x.e[i * x.d + j] : x.c[order[k] * x.d + j]);
        }
      }
    }
  }
}

struct Wanted {
  double relative, worst, bias, nothing, nothing_norm, cosine;
};

Wanted compare(const Matrix& made, const Matrix& exact) {
  double error2 = 0, exact2 = 0, made2 = 0, product = 0, nothing = 0, nothing2 = 0;
  Wanted out = {};
  std::vector<double> sum(exact[0].size(), 0.0), exact_sum = sum;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    double row = 0, row_exact = 0, row_made = 0;
    for (std::size_t j = 0; j < sum.size(); ++j) {
      row += std::pow(made[i][j] - exact[i][j], 2), row_exact += std::pow(exact[i][j], 2);
      row_made += std::pow(made[i][j], 2), product += made[i][j] * exact[i][j];
      sum[j] += made[i][j] - exact[i][j], exact_sum[j] += exact[i][j];
    }
    error2 += row, exact2 += row_exact, made2 += row_made;
    out.worst = std::max(out.worst, std::sqrt(row / row_exact));
    if (row_made == 0) nothing += 1, nothing2 += row_exact;
  }
  const auto norm = [](const std::vector<double>& a) {
    return std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0));
  };
  out.relative = std::sqrt(error2 / exact2);
  out.bias = norm(sum) / norm(exact_sum);
  out.nothing = nothing / static_cast<double>(exact.size());
  out.nothing_norm = nothing2 / exact2;
  out.cosine = product / std::sqrt(made2 * exact2);
  return out;
}

class AnalysisErrors : public ::testing::TestWithParam<bool> {};  // whether there is a softcap

TEST_P(AnalysisErrors, AreThoseOfGradientsFormedFromTheFilteredMatrix) {
  const Dense x = GetParam() ? Dense(37, 301, 19, 8, 0.7f, 9.0f) : Dense(37, 301, 19, 8);
  const Options options = small_options();
  const Report report = must(x, options);
  const auto order = by_mean_logit(x);
  const std::int64_t block_rows = 1024 / options.tile_vocab * options.tile_vocab;
  ASSERT_EQ(report.errors.size(), 4u);
  for (const bool of_table : {false, true}) {
    const Matrix exact = gradient(x, x.g, of_table);
    for (const auto& errors : report.errors) {
      const auto& list = of_table ? errors.d_c : errors.d_e;
      ASSERT_EQ(list.size(), options.exponents.size());
      for (std::size_t j = 0; j < list.size(); ++j) {
        const double epsilon = std::ldexp(1.0, -options.exponents[j]);
        const Matrix left = filtered(x, errors.method == Method::tail ? Method::drop : errors.method, epsilon, order,
                                     options, options.seed);
        Matrix made = gradient(x, left, of_table);
        if (errors.method == Method::tail) add_tail(x, left, order, block_rows, of_table, made);
        const Wanted want = compare(made, exact);
        const std::string what = std::string(name(errors.method)) + (of_table ? " dC 2^-" : " dE 2^-") +
                                 std::to_string(options.exponents[j]);
        EXPECT_NEAR(list[j].relative, want.relative, kExact) << what;
        EXPECT_NEAR(list[j].cosine, want.cosine, kExact) << what;
        // Relative to a row's own norm, which may be small beside the terms it is the sum of.
        EXPECT_NEAR(list[j].worst_row, want.worst, 1e-9) << what;
        if (of_table) {
          EXPECT_NEAR(list[j].nothing, want.nothing, kExact) << what;
          EXPECT_NEAR(list[j].nothing_norm, want.nothing_norm, kExact) << what;
        } else {
          EXPECT_NEAR(list[j].bias, want.bias, 1e-11) << what;
        }
      }
    }
  }
}

TEST_P(AnalysisErrors, WhatIsWorkedOnIsCounted) {
  const Dense x = GetParam() ? Dense(37, 301, 19, 8, 0.7f, 9.0f) : Dense(37, 301, 19, 8);
  const Options options = small_options();
  const Report report = must(x, options);
  const auto order = by_mean_logit(x);
  for (const auto& errors : report.errors) {
    for (std::size_t j = 0; j < errors.kept.size(); ++j) {
      const double epsilon = std::ldexp(1.0, -options.exponents[j]);
      const Method as = errors.method == Method::tail ? Method::drop : errors.method;
      double kept = 0;
      for (const auto& row : filtered(x, as, epsilon, order, options, options.seed)) {
        kept += std::count_if(row.begin(), row.end(), [](double value) { return value != 0; });
      }
      EXPECT_NEAR(errors.kept[j], kept / (37.0 * 301), kExact) << name(errors.method) << j;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, AnalysisErrors, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "softcap" : "plain"; });

TEST(AnalysisBounds, NoRowOfDEIsFurtherOffThanItsCertificate) {
  const Report report = must(Dense(100, 301, 19, 9), small_options());
  for (const auto& errors : report.errors) {
    for (const auto& error : errors.d_e) {
      if (errors.method == Method::tile) {
        EXPECT_EQ(error.of_bound, 0);
      } else {
        EXPECT_LE(error.of_bound, 1 + kExact) << name(errors.method);
        EXPECT_TRUE(error.relative == 0 || error.of_bound > 0.01) << name(errors.method);  // and it says something
      }
    }
  }
}

TEST(AnalysisVariants, AreTheRoundedSumsOfTilesInTheirOrder) {
  const Dense x(37, 301, 19, 10);
  Options options = small_options();
  options.variant_exponent = 3;  // some tiles have nothing above it
  const Report report = must(x, options);
  const auto order = by_mean_logit(x);
  const double epsilon = std::ldexp(1.0, -options.variant_exponent);
  const Matrix exact = gradient(x, x.g, false);
  for (const auto& variant : report.variants) {
    const Matrix g = variant.filtered ? filtered(x, Method::tile, epsilon, order, options, 0) : x.g;
    Matrix made(x.n, std::vector<double>(x.d, 0.0)), lost = made;
    for (std::int64_t w = 0; w < x.v; w += options.tile_vocab) {
      for (std::int64_t i = 0; i < x.n; ++i) {
        for (std::int64_t j = 0; j < x.d; ++j) {
          double term = 0;
          for (std::int64_t k = w; k < std::min(x.v, w + options.tile_vocab); ++k)
            term += g[i][order[k]] * x.c[order[k] * x.d + j];
          double& sum = made[i][j];
          if (variant.sums == Sums::full) {
            sum += term;
          } else if (variant.sums == Sums::bf16) {
            sum = round_to_bf16(static_cast<float>(sum) + static_cast<float>(term));
          } else {
            const float corrected = static_cast<float>(term) - static_cast<float>(lost[i][j]);
            const float next = round_to_bf16(static_cast<float>(sum) + corrected);
            lost[i][j] = round_to_bf16((next - static_cast<float>(sum)) - corrected);
            sum = next;
          }
        }
      }
    }
    if (variant.sums == Sums::full) {
      for (auto& row : made) {
        for (double& value : row) value = round_to_bf16(static_cast<float>(value));
      }
    }
    // A term that lies on the edge of f32 rounding may fall to either side, and one bf16 step with it: 2^-8 of one of
    // the 703 numbers, 2^-8 / sqrt(703) of the whole.
    EXPECT_NEAR(variant.d_e.relative, compare(made, exact).relative, 1.5e-4) << name(variant.sums) << variant.filtered;
  }
  const auto error = [&](Sums sums, bool is_filtered) {
    for (const auto& variant : report.variants) {
      if (variant.sums == sums && variant.filtered == is_filtered) return variant.d_c.relative;
    }
    return -1.0;
  };
  EXPECT_LT(error(Sums::full, false), 0x1p-8);  // half a step of bf16 is 2^-9 of each number
  EXPECT_GT(error(Sums::full, true), error(Sums::full, false));
}

// ------------------------------------------------------------------------------------------------------------ the rest

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
