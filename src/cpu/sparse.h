// Mode sparse: the loss pass with a filter in place of the hidden_gradient product, dC by scattering what was kept, and
// the rows that must be done exactly after all.
//
// The running lse only grows, so an entry below log(epsilon) now is below it at the end: it may be left out soundly.
// What is left out is added up and certifies the row; rows over the tolerance are redone. The label is always kept.
#ifndef CUTLOSS_SRC_CPU_SPARSE_H_
#define CUTLOSS_SRC_CPU_SPARSE_H_

#include "src/cpu/passes.h"

namespace cutloss::cpu {

// The first `rows` rows of the table.
FilterReport run_sparse(const Context& context, std::int64_t rows);

// --------------------------------------------------------------------------------- for the loss pass (sparse_tile.cc)

// A panel of rows, within its block and its group.
struct SparsePanel {
  std::int64_t first;  // table row of its first lane
  std::int64_t lane;   // of the block
  std::int64_t live;   // lanes that are rows
  std::int64_t group_first;
};

void reset_filter(const Context& context, std::int64_t first, std::int64_t count, const LossState& state);
// Rows of the tile as f32 [rows][..], for the dE of entries; does nothing where the table can be read in place.
void widen_tile(const Context& context, std::int64_t tile_row, std::int64_t rows, const LossScratch& scratch);
// A tile that a panel meets, its softmax done without slopes: scratch.weights are masses.
void filter_tile(const Context& context, const VocabTile& tile, const SparsePanel& panel, const LossScratch& scratch,
                 const LossState& state);
// A tile that a flat panel meets: what was dropped before goes with the running maximum.
void rescale_dropped(const SparsePanel& panel, const LossScratch& scratch, const LossState& state);

// What the slices of a lane come to. `weight`: 1 / sum of exp(z - max).
struct FilteredRow {
  bool flat;
  double below;  // of the row's mass, with an allowance for rounding
  std::int64_t kept;
};
FilteredRow join_filter(const Context& context, std::int64_t lane, std::int64_t slot, std::int64_t slices, double max,
                        double weight);
// Whether the row's certificate holds; writes its part of the row table.
bool certify(const Context& context, std::int64_t table_row, const FilteredRow& row, double softmax_factor);

// ---------------------------------------------------------------------------------------- for dC (sparse_head.cc)

// centers and radius of every tail block: the mean of its table rows and the largest distance from it; for a filter
// without a tail 0 and the largest norm.
void summarize_head(const Context& context);

struct SparseGroup {
  std::int64_t first;  // table rows [first, first + count)
  std::int64_t count;
  bool started;  // outputs or sums hold earlier groups
  bool final;    // no group follows
  bool last;     // nor an exact pass
};
// Adds dC and dbias of a group's filtered rows.
void scatter_pass(const Context& context, const SparseGroup& group);

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_SPARSE_H_
