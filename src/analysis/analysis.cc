#include "src/analysis/analysis.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "src/analysis/passes.h"
#include "src/problem/text.h"

namespace cutloss::analysis {
namespace {

Status no_memory() {
  try {
    return Status(StatusCode::out_of_memory,
                  "no memory for the analysis: a tile of tokens takes about 8 D bytes for each token and epsilon, four "
                  "times; make the tile or the list of exponents smaller");
  } catch (const std::bad_alloc&) {  // not even for that text
    return out_of_memory();
  }
}

Status check_exponents(const Options& options) {
  if (options.exponents.empty()) return invalid("exponents is empty; give at least one k of epsilon = 2^-k");
  for (std::size_t i = 0; i < options.exponents.size(); ++i) {
    const int k = options.exponents[i];
    if (k < 1 || k > 60) return invalid("exponents has ", k, "; k of epsilon = 2^-k must be in [1, 60]");
    if (i > 0 && k <= options.exponents[i - 1])
      return invalid("exponents must rise, got ", k, " after ", options.exponents[i - 1]);
  }
  if (options.variant_exponent < 1 || options.variant_exponent > 60) {
    return invalid("variant_exponent is ", options.variant_exponent, "; it must be in [1, 60]");
  }
  return Status();
}

Status check(const Problem& problem, const Options& options) {
  if (Status s = check_exponents(options); !s.ok()) return s;
  if (options.tile_tokens < 1 || options.tile_tokens > 4096) {
    return invalid("tile_tokens is ", options.tile_tokens, "; it must be in [1, 4096]");
  }
  if (options.tile_vocab < 1 || options.tile_vocab > 65536) {
    return invalid("tile_vocab is ", options.tile_vocab, "; it must be in [1, 65536]");
  }
  if (options.sample_tokens < 0)
    return invalid("sample_tokens is ", options.sample_tokens, "; it must be 0 (all) or more");
  for (const double value : options.temperatures) {
    // Below 2^-20, log2 p of the other entries is beyond anything that an epsilon asks for.
    if (!(value >= 0x1p-20 && value <= 0x1p20))
      return invalid("temperatures has ", value, "; it must be in [2^-20, 2^20]");
  }
  for (const float value : options.tolerances) {
    if (!(value > 0 && value < 1)) return invalid("tolerances has ", value, "; it must be in (0, 1)");
  }
  if (problem.tokens < 1) return invalid("there are no tokens: hidden has 0 rows; it must have at least 1");
  for (const double count : options.counts) {
    if (!std::isfinite(count)) return invalid("counts has ", count, "; counts must be finite");
  }
  return Status();
}

Status measure(const Tiles& tiles, const Machine& machine, const Options& options, Report& report) {
  const Sections& want = options.sections;
  std::vector<NamedOrder> orders;
  if (want.shares || want.map) {
    std::vector<Order> wanted = options.orders;
    if (want.map) wanted.insert(wanted.end(), {Order::natural, options.error_order});
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (std::find(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(i), wanted[i]) !=
          wanted.begin() + static_cast<std::ptrdiff_t>(i)) {
        continue;
      }
      Result<Ids> ids = make_order(tiles, wanted[i], options);
      if (!ids.ok()) return ids.status();
      orders.push_back({wanted[i], std::move(ids.value())});
    }
  }
  if (want.mass || want.shares || want.map) measure_shares(tiles, orders, options, report);
  orders.clear();
  if (!want.d_e && !want.d_c && !want.tolerance) return Status();
  const Result<Ids> order = make_order(tiles, options.error_order, options);
  if (!order.ok()) return order.status();
  std::vector<double> exact;
  if (want.tolerance) exact.resize(static_cast<std::size_t>(tiles.tokens() * tiles.hidden()));
  if (want.d_e || want.tolerance) {
    measure_d_e(tiles, order.value(), options, report, want.tolerance ? exact.data() : nullptr);
  }
  std::vector<float> exact_d_c;
  if (want.tolerance && want.d_c) exact_d_c.resize(static_cast<std::size_t>(tiles.vocab() * tiles.hidden()));
  if (want.d_c) measure_d_c(tiles, order.value(), options, report, exact_d_c.empty() ? nullptr : exact_d_c.data());
  return want.tolerance ? measure_tolerances(tiles, order.value(), machine, options, exact, exact_d_c, report)
                        : Status();
}

}  // namespace

Result<Report> analyze(const Problem& problem, const Inputs& inputs, const Machine& machine, const Options& options) {
  try {
    if (Status s = check(problem, options); !s.ok()) return s;
    const Result<Tiles> tiles = Tiles::make(problem, inputs, machine, options);
    if (!tiles.ok()) return tiles.status();
    Report report;
    report.tokens = tiles->tokens();
    report.tokens_valid = tiles->valid();
    report.tokens_given = problem.tokens;
    report.vocab = problem.vocab;
    report.hidden = problem.hidden;
    report.target = tiles->target();
    report.threads = tiles->executor().concurrency();
    for (std::int64_t i = 0; i < tiles->tokens(); ++i)
      report.nll += tiles->nll(i) / static_cast<double>(tiles->tokens());
    if (Status s = measure(tiles.value(), machine, options, report); !s.ok()) return s;
    return report;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

}  // namespace cutloss::analysis
