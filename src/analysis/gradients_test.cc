// Gradients as each filter leaves them, against ones formed from the whole filtered matrix in float64.

#include "src/analysis/dense_case.h"
#include "src/analysis/variants.h"

namespace cutloss::analysis {
namespace {

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

// The gradient of G added up tile by tile, as a variant rounds its sums. Tiles of tokens (of_table) or of the order.
Matrix summed(const Dense& x, const Matrix& g, const std::vector<std::int64_t>& order, const Options& o, Sums sums,
              bool of_table) {
  Matrix made(of_table ? x.v : x.n, std::vector<double>(x.d, 0.0)), lost = made;
  const std::int64_t length = of_table ? x.n : x.v, step = of_table ? o.tile_tokens : o.tile_vocab;
  for (std::int64_t owner = 0; owner < (of_table ? x.v : x.n); ++owner) {
    for (std::int64_t begin = 0; begin < length; begin += step) {
      std::vector<double> part(x.d, 0.0);
      bool kept = false;
      for (std::int64_t at = begin; at < std::min(length, begin + step); ++at) {
        const std::int64_t i = of_table ? at : owner, k = of_table ? owner : order[at];
        kept = kept || g[i][k] != 0;
        for (std::int64_t j = 0; j < x.d; ++j) part[j] += g[i][k] * (of_table ? x.e[i * x.d + j] : x.c[k * x.d + j]);
      }
      if (!kept) continue;  // a tile that is left out is not added as zeros: Kahan's compensation would be
      for (std::int64_t j = 0; j < x.d; ++j) {
        double& sum = made[owner][j];
        const auto term = static_cast<float>(part[j]);
        if (sums == Sums::full) {
          sum += part[j];
        } else if (sums == Sums::bf16) {
          sum = round_to_bf16(static_cast<float>(sum) + term);
        } else {
          const float corrected = term - static_cast<float>(lost[owner][j]);
          const float next = round_to_bf16(static_cast<float>(sum) + corrected);
          lost[owner][j] = round_to_bf16((next - static_cast<float>(sum)) - corrected);
          sum = next;
        }
      }
    }
    if (sums != Sums::full) continue;
    for (double& value : made[owner]) value = round_to_bf16(static_cast<float>(value));
  }
  return made;
}

TEST(AnalysisVariants, AreTheRoundedSumsOfTilesInTheirOrder) {
  const Dense x(103, 301, 19, 10);
  Options options = small_options();
  options.variant_exponent = 3;  // some tiles have nothing above it
  const Report report = must(x, options);
  const auto order = by_mean_logit(x);
  const Matrix left = filtered(x, Method::tile, std::ldexp(1.0, -options.variant_exponent), order, options, 0);
  for (const bool of_table : {false, true}) {
    const Matrix exact = gradient(x, x.g, of_table);
    double largest = 0, norm2 = 0;
    for (const auto& row : exact) {
      for (const double value : row) largest = std::max(largest, std::abs(value)), norm2 += value * value;
    }
    // A term on the edge of f32 rounding may fall to either side, and one bf16 step of a number with it.
    const double one_step = 0x1p-8 * largest / std::sqrt(norm2);
    ASSERT_EQ(report.variants.size(), 6u);
    double plain_bf16 = 0;
    for (const auto& variant : report.variants) {
      const Wanted want =
          compare(summed(x, variant.filtered ? left : x.g, order, options, variant.sums, of_table), exact);
      const GradientError& got = of_table ? variant.d_c : variant.d_e;
      const std::string what =
          std::string(name(variant.sums)) + (variant.filtered ? " filtered" : " all") + (of_table ? " dC" : " dE");
      EXPECT_NEAR(got.relative, want.relative, one_step) << what;
      EXPECT_NEAR(got.cosine, want.cosine, one_step * (want.relative + one_step)) << what;
      if (variant.filtered) continue;
      if (variant.sums == Sums::bf16) {
        plain_bf16 = got.relative;
      } else {  // the test would see bf16 sums in the place of the others
        EXPECT_GT(plain_bf16, got.relative + 2 * one_step) << what;
        EXPECT_LT(got.relative, 0x1p-8) << what;  // half a step of bf16 is 2^-9 of each number
      }
    }
  }
}

// Run once more here, with the options of the section; exact dC is kept in f32, 6e-8 of its norm.
TEST(AnalysisTolerance, ErrorsAreNotThoseOfTheLibrarysGradients) {
  for (const HeadLayout layout : {HeadLayout::vd, HeadLayout::dv}) {
    Dense x(100, 301, 19, 11, 0.5f);
    const Matrix exact_e = gradient(x, x.g, false), exact_c = gradient(x, x.g, true);
    const std::vector<std::int64_t> order = by_mean_logit(x);
    x.problem.head_layout = layout;
    if (layout == HeadLayout::dv) {
      const std::vector<float> c = x.c;
      for (std::int64_t k = 0; k < x.v; ++k) {
        for (std::int64_t j = 0; j < x.d; ++j) x.c[j * x.v + k] = c[k * x.d + j];
      }
    }
    Options options = small_options();
    options.sections.tolerance = true;
    options.tolerances = {0.05f};
    const Report report = must(x, options);
    ASSERT_EQ(report.tolerances.size(), 2u);
    for (const auto& point : report.tolerances) {
      Problem p = x.problem;
      p.reduction = Reduction::sum, p.want_d_e = p.want_d_c = true;
      p.filter = point.filter, p.tolerance = 0.05f, p.vocab_order = true;
      std::vector<float> d_e(x.e.size()), d_c(x.c.size());
      FilterReport filtered;
      Inputs in = x.inputs();
      in.seed = options.seed, in.vocab_order = order.data();
      Outputs out;
      out.d_e = d_e.data(), out.d_c = d_c.data(), out.filter_report = &filtered;
      const Machine machine = Machine::detect().value();
      const Result<Plan> plan = make_plan(p, {Mode::automatic, std::nullopt, options.threads}, machine);
      ASSERT_TRUE(plan.ok() && run(plan.value(), in, out).ok());
      Matrix made_e = exact_e, made_c = exact_c;
      for (std::int64_t i = 0; i < x.n; ++i) std::copy_n(d_e.data() + i * x.d, x.d, made_e[i].begin());
      for (std::int64_t k = 0; k < x.v; ++k) {
        for (std::int64_t j = 0; j < x.d; ++j) made_c[k][j] = d_c[layout == HeadLayout::dv ? j * x.v + k : k * x.d + j];
      }
      const Wanted e = compare(made_e, exact_e), c = compare(made_c, exact_c);
      EXPECT_NEAR(point.d_e.relative, e.relative, 1e-9);
      EXPECT_NEAR(point.d_e.worst_row, e.worst, 1e-9);
      EXPECT_NEAR(point.d_e.bias, e.bias, 1e-9);
      EXPECT_NEAR(point.d_e.cosine, e.cosine, 1e-9);
      EXPECT_GT(point.d_e.relative, 1e-6) << "nothing was filtered";
      EXPECT_NEAR(point.d_c.relative, c.relative, 1e-7);
      EXPECT_NEAR(point.d_c.cosine, c.cosine, 1e-7);
      EXPECT_EQ(point.d_c.nothing, c.nothing);
      EXPECT_GT(point.d_c.relative, 1e-6);
      const double entries = static_cast<double>(x.n) * static_cast<double>(x.v);
      EXPECT_NEAR(point.kept, filtered.kept_entries / entries + filtered.rows_redone / static_cast<double>(x.n), 1e-12);
    }
  }
}

}  // namespace
}  // namespace cutloss::analysis
