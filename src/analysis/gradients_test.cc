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
