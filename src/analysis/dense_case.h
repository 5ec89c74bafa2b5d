// A problem of small multiples of 1/8, so that the kernels' f32 dot products are exact and both sides see the same
// logits: what is left is the order of float64 additions, at most a few thousand of them, 1e-12.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "src/analysis/analysis.h"
#include "src/analysis/levels.h"

namespace cutloss::analysis {

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

inline Options small_options() {
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

inline Report must(const Dense& dense, const Options& options) {
  const Result<Machine> machine = Machine::detect();
  Result<Report> report = analyze(dense.problem, dense.inputs(), machine.value(), options);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return report.ok() ? report.value() : Report();
}

inline std::string refusal(const Dense& dense, const Options& options) {
  const Result<Report> report = analyze(dense.problem, dense.inputs(), Machine::detect().value(), options);
  return report.ok() ? "" : report.status().message();
}

inline std::vector<std::int64_t> reversed(std::int64_t v) {
  std::vector<std::int64_t> ids(v);
  for (std::int64_t i = 0; i < v; ++i) ids[i] = v - 1 - i;
  return ids;
}

// By falling mean logit, ties by id.
inline std::vector<std::int64_t> by_mean_logit(const Dense& x) {
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

// Shares of the tiles of an order that a filter at epsilon keeps, and of the ids in them.
struct TileCount {
  double kept = 0, forced = 0, rows = 0;
};

inline TileCount count_tiles(const Dense& x, const std::vector<std::int64_t>& order, const Options& o, double epsilon) {
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

}  // namespace cutloss::analysis
