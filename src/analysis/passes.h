// The passes over the logits that fill a report. Each is deterministic for any number of threads: what tasks find is
// joined in their order, or by maximum.
#ifndef CUTLOSS_SRC_ANALYSIS_PASSES_H_
#define CUTLOSS_SRC_ANALYSIS_PASSES_H_

#include <cstdint>
#include <vector>

#include "src/analysis/tiles.h"

namespace cutloss::analysis {

using Ids = std::vector<std::int64_t>;
struct NamedOrder {
  Order order;
  Ids ids;
};

// ranks, below, temperatures, orders, maps of the report. A task is a tile of tokens: it keeps the largest |G| and the
// largest p of each id over its tokens, from which every order's tiles follow.
void measure_shares(const Tiles& tiles, const std::vector<NamedOrder>& orders, const Options& options, Report& report);

// errors[].d_e, errors[].kept and variants[].d_e. A task is a tile of tokens. exact_d_e: [tokens][D] if not null.
void measure_d_e(const Tiles& tiles, const Ids& order, const Options& options, Report& report, double* exact_d_e);

// errors[].d_c and variants[].d_c. A task is a block of the vocabulary, all its rows' sums held at once. exact_d_c:
// [V][D] if not null, rounded to f32, 6e-8 beside errors of 1e-6 and more.
void measure_d_c(const Tiles& tiles, const Ids& order, const Options& options, Report& report, float* exact_d_c);

// tolerances: the library's own filters, run on the same tokens, against exact_d_e and, unless it is empty, exact_d_c.
Status measure_tolerances(const Tiles& tiles, const Ids& order, const Machine& machine, const Options& options,
                          const std::vector<double>& exact_d_e, const std::vector<float>& exact_d_c, Report& report);

// Ids that share a tail correction, in positions of the order: whole tiles, about 1024 as in mode sparse.
inline std::int64_t tail_tiles(const Options& options) { return std::max<std::int64_t>(1, 1024 / options.tile_vocab); }

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_PASSES_H_
