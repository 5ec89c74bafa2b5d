// Orders of the vocabulary that no test can name beforehand, and the map of tiles, against the whole matrix.
#include <limits>

#include "src/analysis/dense_case.h"

namespace cutloss::analysis {
namespace {

Options shares_alone(std::vector<Order> orders) {
  Options options = small_options();
  options.temperatures = {1};
  options.orders = std::move(orders);
  options.sections.mass = options.sections.map = options.sections.d_e = options.sections.d_c = false;
  return options;
}

void expect_tiles(const Dense& x, const std::vector<std::int64_t>& order, const Options& options) {
  const Report report = must(x, options);
  ASSERT_EQ(report.orders.size(), 1u);
  bool some = false;
  for (std::size_t j = 0; j < options.exponents.size(); ++j) {
    const TileCount want = count_tiles(x, order, options, std::ldexp(1.0, -options.exponents[j]));
    EXPECT_EQ(report.orders[0].tiles[j], want.kept) << j;
    EXPECT_EQ(report.orders[0].forced[j], want.forced) << j;
    EXPECT_NEAR(report.orders[0].rows[j], want.rows, kExact) << j;
    some = some || (want.kept > 0 && want.kept < 1);
  }
  EXPECT_TRUE(some) << "every tile is kept, or none: any order would do";
}

TEST(AnalysisOrders, TheFrequencyOrderIsNotByFallingCountAndThenById) {
  Dense x(61, 301, 7, 21);
  for (std::size_t i = 0; i < x.labels.size(); ++i) x.labels[i] = static_cast<std::int64_t>(290 - mix(i) % 5 * 40);
  x.fill(1.0);
  Options options = shares_alone({Order::frequency});
  options.exponents = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const auto order_by = [&](const std::vector<double>& counts) {
    std::vector<std::int64_t> ids;
    for (std::int64_t k = 0; k < x.v; ++k) {  // an insertion sort: behind all that count as much or more
      auto at = ids.begin();
      while (at != ids.end() && counts[*at] >= counts[k]) ++at;
      ids.insert(at, k);
    }
    return ids;
  };
  std::vector<double> counts(x.v, 0.0);
  for (const std::int64_t label : x.labels) ++counts[label];
  expect_tiles(x, order_by(counts), options);
  for (std::int64_t k = 0; k < x.v; ++k) counts[k] = static_cast<double>(mix(k) % 9);
  options.counts = counts;
  expect_tiles(x, order_by(counts), options);
}

// No order is given here to compare with: what is known of a random one is that each set of ids is as likely as any
// other to be a tile. Of V ids m reach epsilon for some token of a tile of tokens: w of them miss all m with
// probability C(V - m, w) / C(V, w).
TEST(AnalysisOrders, TheRandomOrderFavoursSomeIdsOrIgnoresTheSeed) {
  Dense x(48, 240, 7, 22);
  const Dense as_drawn = x;  // ids that count lie side by side: an order that leaves some in place keeps fewer tiles
  const std::vector<std::int64_t> by_size = by_mean_logit(as_drawn);
  for (std::int64_t k = 0; k < x.v; ++k) std::copy_n(as_drawn.c.data() + by_size[k] * x.d, x.d, x.c.data() + k * x.d);
  x.fill(1.0);
  Options options = shares_alone({Order::random});
  options.tile_tokens = 8, options.tile_vocab = 12;
  options.exponents = {2, 3, 4, 5};
  const std::int64_t w = options.tile_vocab;
  constexpr int kSeeds = 64;
  std::vector<std::vector<double>> shares;
  for (int seed = 0; seed < kSeeds; ++seed) {
    options.seed = static_cast<std::uint64_t>(seed);
    shares.push_back(must(x, options).orders[0].tiles);
  }
  options.seed = 0;
  EXPECT_EQ(must(x, options).orders[0].tiles, shares[0]);
  int told = 0;
  for (std::size_t j = 0; j < options.exponents.size(); ++j) {
    double expected = 0;
    for (std::int64_t t = 0; t < x.n; t += options.tile_tokens) {
      std::int64_t m = 0;
      for (std::int64_t k = 0; k < x.v; ++k) {
        double g = 0;
        for (std::int64_t i = t; i < t + options.tile_tokens; ++i) g = std::max(g, std::abs(x.g[i][k]));
        m += g >= std::ldexp(1.0, -options.exponents[j]);
      }
      double missed = 1;
      for (std::int64_t i = 0; i < w; ++i) missed *= std::max(0.0, static_cast<double>(x.v - m - i)) / (x.v - i);
      expected += (1 - missed) / (static_cast<double>(x.n) / options.tile_tokens);
    }
    double mean = 0, square = 0;
    for (const auto& share : shares) mean += share[j] / kSeeds, square += share[j] * share[j] / kSeeds;
    const double spread = std::sqrt(std::max(0.0, square - mean * mean) / kSeeds);
    if (expected < 0.05 || expected > 0.95) continue;  // nearly all tiles are of one kind
    ++told;
    EXPECT_GT(spread, 0) << j << ": every seed gives the same share";
    EXPECT_NEAR(mean, expected, 5 * spread) << j;
  }
  EXPECT_GE(told, 2);
}

TEST(AnalysisMap, ACellIsNotTheLargestOfItsTiles) {
  struct Case {
    std::int64_t n, v, tile_tokens, tile_vocab, rows, columns;
  };
  // Whole tiles, ragged ones, and more of them than there are cells.
  for (const Case& at : {Case{32, 120, 16, 40, 2, 3}, Case{37, 301, 16, 40, 3, 8}, Case{300, 2100, 1, 1, 256, 1024}}) {
    const Dense x(at.n, at.v, 3, 23);
    Options options = small_options();
    options.tile_tokens = at.tile_tokens, options.tile_vocab = at.tile_vocab;
    options.sections = {};
    options.sections.mass = options.sections.shares = options.sections.temperature = false;
    options.sections.d_e = options.sections.d_c = options.sections.tolerance = false;
    const Report report = must(x, options);
    ASSERT_EQ(report.maps.size(), 2u);
    std::vector<std::int64_t> natural(x.v);
    std::iota(natural.begin(), natural.end(), 0);
    for (const TileMap& map : report.maps) {
      const std::vector<std::int64_t> order = map.order == Order::natural ? natural : by_mean_logit(x);
      ASSERT_EQ(map.rows, at.rows);
      ASSERT_EQ(map.columns, at.columns);
      const std::int64_t token_tiles = (x.n + at.tile_tokens - 1) / at.tile_tokens;
      const std::int64_t vocab_tiles = (x.v + at.tile_vocab - 1) / at.tile_vocab;
      std::vector<double> want(map.log2.size(), 0.0);
      for (std::int64_t i = 0; i < x.n; ++i) {
        for (std::int64_t k = 0; k < x.v; ++k) {
          const std::int64_t row = i / at.tile_tokens * map.rows / token_tiles;
          const std::int64_t column = k / at.tile_vocab * map.columns / vocab_tiles;
          double& cell = want[row * map.columns + column];
          cell = std::max(cell, std::abs(x.g[i][order[k]]));
        }
      }
      double furthest = 0;  // of log2, kept in f32: below 2^6 in size, half a step is 2^-19
      for (std::size_t i = 0; i < want.size(); ++i)
        furthest = std::max(furthest, std::abs(map.log2[i] - std::log2(want[i])));
      EXPECT_LE(furthest, 0x1p-18) << name(map.order) << " of " << at.n << " x " << at.v;
    }
  }
}

}  // namespace
}  // namespace cutloss::analysis
