// What gradient filters keep and cost on given hidden states, table and labels, measured against float64.
//
// Words beside those of cutloss.hpp: G = p - onehot(label), one entry for each token and id; epsilon = 2^-k, k an
// exponent; a tile is tile_tokens x tile_vocab entries of G in some order of the vocabulary; level of a value: the
// first (largest) epsilon that it reaches.
//
// Logits are formed by the engine's own f32 kernels; softmax, gradients and their sums are float64. Nothing is kept
// whose size is tokens x vocabulary: a task holds a few numbers for each id, or for each token, and one tile.
#ifndef CUTLOSS_SRC_ANALYSIS_ANALYSIS_H_
#define CUTLOSS_SRC_ANALYSIS_ANALYSIS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cutloss/cutloss.hpp"

namespace cutloss::analysis {

enum class Order {
  natural,    // by id
  sorted,     // by falling mean logit over the tokens
  frequency,  // by falling count, of the labels or as given
  random,
  given,
};
std::string_view name(Order);

// How an entry below epsilon is treated.
enum class Method {
  drop,      // left out, the label's entry never
  tail,      // left out; its mass times the mean row of its block of the vocabulary stands for it
  unbiased,  // kept with probability p / epsilon, and then weighs epsilon
  tile,      // left out where every |G| of its tile is below epsilon: Cut Cross-Entropy's filter
};
constexpr int kMethods = 4;
std::string_view name(Method);

struct Sections {
  bool mass = true;         // softmax mass by rank, and below each epsilon
  bool shares = true;       // entries, rows and tiles that reach epsilon, by order
  bool temperature = true;  // the same at every temperature
  bool map = true;          // the largest |G| of each tile
  bool d_e = true;          // errors of dE by epsilon and method
  bool d_c = true;          // errors of dC
  bool variants = true;     // errors under the sums of Cut Cross-Entropy's variants, with d_e and d_c
  bool tolerance = true;    // the shipped filters by tolerance, on dE
};

struct Options {
  std::int64_t tile_tokens = 128;
  std::int64_t tile_vocab = 128;
  std::vector<int> exponents = {8, 10, 12, 14, 16, 18, 20, 22, 24, 26};  // rising, in [1, 60]
  std::vector<double> temperatures = {1, 0.75, 0.5, 0.35};               // 1 is always measured
  std::vector<Order> orders = {Order::natural, Order::sorted, Order::frequency, Order::random};
  Order error_order = Order::sorted;  // of the tiles and blocks of the errors
  std::vector<std::int64_t> given_order;
  std::vector<double> counts;  // [V], of Order::frequency; empty: of the labels
  std::vector<float> tolerances = {1e-1f, 1e-2f, 1e-3f, 1e-4f};
  int variant_exponent = 12;
  std::int64_t sample_tokens = 0;  // whole tiles of tokens, spread evenly; 0: all
  std::uint64_t seed = 0;          // of Order::random and Method::unbiased
  int threads = 0;
  Sections sections;
  // Called from any thread, one call at a time: share of the stage that is done.
  std::function<void(std::string_view stage, double done)> progress;
};

struct RankPoint {
  std::int64_t rank;   // from 1
  double probability;  // of the entry of this rank, mean over tokens
  double cumulative;   // of this rank and those before
};

// At one epsilon, temperature 1.
struct Below {
  double kept_mean = 0;  // entries of a token with p >= epsilon
  std::int64_t kept_max = 0;
  double mass_mean = 0;  // softmax mass of a token below epsilon, the label left out
  double mass_max = 0;
};

// Vectors have one value for each exponent.
struct TemperatureShares {
  double temperature = 1;
  std::vector<double> entries;  // share of entries with |G| >= epsilon; no order changes it
  std::vector<double> rows;     // share of table rows with such an entry
};
struct OrderShares {
  Order order = Order::natural;
  double temperature = 1;
  std::vector<double> tiles;   // share of tiles with such an entry
  std::vector<double> forced;  // of tiles where only a label's |p - 1| reaches epsilon, no p does
  std::vector<double> rows;    // of table rows with such a tile
};

// log2 of the largest |G| of a tile, pooled by maximum to at most 256 x 1024; row-major, tiles of tokens by tiles of
// ids.
struct TileMap {
  Order order = Order::natural;
  std::int64_t rows = 0, columns = 0;
  std::vector<float> log2;
};

// Of a gradient against the float64 one; rows are tokens for dE, ids for dC.
struct GradientError {
  double relative = 0;      // L2 over the whole gradient
  double cosine = 1;        // between the two
  double worst_row = 0;     // largest relative L2 of a row
  double bias = 0;          // dE: relative L2 of the sum over tokens
  double nothing = 0;       // dC: share of rows that get exactly nothing
  double nothing_norm = 0;  // dC: share of ||dC||^2 in them
  double of_bound = 0;      // dE: error / its bound: largest of a row; unbiased: of the root mean squares; 0: no bound
};

struct MethodErrors {
  Method method = Method::drop;
  std::vector<double> kept;  // share of entries that are worked on, by exponent; empty without d_e
  std::vector<GradientError> d_e, d_c;
};

enum class Sums { bf16, kahan, full };  // see variants.h
std::string_view name(Sums);
struct VariantErrors {
  Sums sums = Sums::full;
  bool filtered = false;
  GradientError d_e, d_c;
};

// The shipped filter under a tolerance: dE, and dC where the section d_c is wanted too.
struct TolerancePoint {
  Filter filter = Filter::certified;
  double tolerance = 0;
  double kept = 0;  // share of entries worked on, those of redone rows included
  FilterReport report;
  GradientError d_e, d_c;
};

struct Report {
  std::int64_t tokens = 0;  // that were looked at
  std::int64_t tokens_valid = 0, tokens_given = 0;
  std::int64_t vocab = 0, hidden = 0;
  std::string target;
  int threads = 1;
  double nll = 0;
  std::vector<RankPoint> ranks;
  std::vector<Below> below;
  std::vector<TemperatureShares> temperatures;
  std::vector<OrderShares> orders;
  std::vector<TileMap> maps;
  std::vector<MethodErrors> errors;
  std::vector<VariantErrors> variants;
  std::vector<TolerancePoint> tolerances;
};

// problem: shapes, dtypes, strides, layout, ignore_index, softcap, logit_scale; what else it asks for is not looked at.
// inputs: e, c, labels (i64). Fails as run() does, and on a logit that is not finite.
Result<Report> analyze(const Problem& problem, const Inputs& inputs, const Machine& machine, const Options& options);

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_ANALYSIS_H_
