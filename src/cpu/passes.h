// The two passes every mode is made of.
//
//   loss pass   tasks own tokens:      loss, lse, metrics and dE of a range of rows, streaming over the vocabulary
//   head pass   tasks own vocabulary:  dC and dbias of all rows of a range, from kept logits or by forming them again
//
//   loss, stream   one loss pass                                          1u, 2u
//   recompute      one loss pass, one head pass that forms logits again   4u (3u without dE)
//   chunk          per chunk of rows: a loss pass that keeps its logits, a head pass that reads them    3u (2u)
//
// No task writes what another one reads or writes within a pass: no atomics, and the same bits for any schedule.
#ifndef CUTLOSS_SRC_CPU_PASSES_H_
#define CUTLOSS_SRC_CPU_PASSES_H_

#include "cutloss/cutloss.hpp"
#include "src/cpu/kernels.h"
#include "src/cpu/workers.h"
#include "src/plan/workspace.h"

namespace cutloss::cpu {

// Sums that the objective needs before any row: see objective.cc.
struct Objective {
  double scale = 1;             // what the reduction multiplies a row's loss with: 1 / denominator, or 1
  double class_weight_sum = 0;  // W
  double bias_sum = 0;          // sum over v of class weight x bias; with smoothing and no softcap
};

struct Context {
  const Plan& plan;
  const Inputs& inputs;
  const Outputs& outputs;
  const Kernels& kernels;
  const Workspace& workspace;
  const Workers& executor;
  std::byte* base;  // of the workspace
  Objective objective;
};

// Rows [first, first + count) of the row table. Writes what is wanted of each row, and for a head pass the table's last
// columns. Mode chunk keeps the raw logits in workspace.saved_logits.
void loss_pass(const Context& context, std::int64_t first, std::int64_t count);

// Rows [first, first + count) of the row table for dC and dbias.
struct HeadRange {
  std::int64_t first;
  std::int64_t count;
  bool started;  // outputs or sums hold those of earlier rows: add
  bool last;     // no range follows: sums are rounded to the output's dtype
};
// Needs the rows' loss_pass.
void head_pass(const Context& context, const HeadRange& range);

// The passes of an exact mode over the first `rows` rows. `started`: see HeadRange.
void run_exact(const Context& context, std::int64_t rows, bool started);

// dz of a logits tile of the panel at table row `first`, in place; false where filter "tile" drops it.
bool gradient_tile(const Context& context, std::int64_t first, std::int64_t end, std::int64_t tile_row,
                   std::int64_t rows, const float* class_weights, std::int64_t* label_row, float* logits);
// dE of the first `rows` rows under filter "tile"; needs their loss_pass.
void filtered_pass(const Context& context, std::int64_t rows);

// One row of dC and dbias, from slice_columns values; `sum`: through the sums that ranges share.
void store_head_row(const Context& context, std::int64_t position, const float* values, bool started, bool last);

// A tile of the vocabulary and the slice it belongs to.
struct VocabTile {
  std::int64_t index;
  std::int64_t row;  // position of its first row
  std::int64_t rows;
  std::int64_t slice;
};

// -------------------------------------------------------------------------------------------------- packing (tile.cc)

// Tile of packed head rows [tile_row, tile_row + rows) in the order of the vocabulary, with the bias as last column.
void pack_head_tile(const Context& context, std::int64_t tile_row, std::int64_t rows, float* out);
// The same for the rows ids[0, rows).
void pack_head_rows(const Context& context, const std::int64_t* ids, std::int64_t rows, float* out);
// Row `id` of the table as f32: in place where it lies so, else widened into `scratch`.
const float* float_table_row(const Context& context, std::int64_t id, float* scratch);
// The hidden states of caller's row `row` as f32, times logit_scale.
void float_hidden_row(const Context& context, std::int64_t row, float* out);
// Hidden states of `count` table rows from `first`, times logit_scale, and 1 where there is a bias
// -> panels[depth][W], lanes beyond count zero.
void pack_token_panels(const Context& context, std::int64_t first, std::int64_t count, std::int64_t panels, float* out);
// ... -> slices[slice_hidden / W][token_rows][W], rows [at, at + count); rows up to the next multiple of W are zeroed.
void pack_token_slices(const Context& context, std::int64_t first, std::int64_t count, std::int64_t at,
                       std::int64_t token_rows, float* out);

// For each lane of the panel that starts at table row `first`: its label's position less `tile_row`, out of any tile's
// range for lanes at or beyond `end`.
void label_rows(const Context& context, std::int64_t first, std::int64_t end, std::int64_t tile_row,
                std::int64_t* label_row);
// Class weights of a tile's rows, null without class weights; `scratch` may hold them.
const float* tile_class_weights(const Context& context, std::int64_t tile_row, std::int64_t rows, float* scratch);

double class_weight(const Context& context, std::int64_t id);
// Of a table row's label; 1 for a label that is no class.
double label_class_weight(const Context& context, std::int64_t table_row);
inline std::int64_t id_at(const Context& context, std::int64_t position) {
  const std::int64_t* order = context.inputs.vocab_order;
  return order == nullptr ? position : order[position];
}

// ------------------------------------------------------------------------------------------ the objective of a row

// What one row's softmax comes to.
struct RowSoftmax {
  double nll;
  double lse;
  double weight;         // 1 / sum over all entries of exp(z - max)
  double label;          // p_label
  double label_minus_1;  // p_label - 1
};

// From the running softmax over everything but the label, and the label's logit.
RowSoftmax combine(double max, double sum, double label_logit);

// A row's loss, and its dz = softmax x p - smooth x class weight - target x soft probability, but for the label, whose
// whole dz is `label` (without the smoothing term). target_logits: sum of class weight (soft: probability) x z over all
// entries the uniform (soft) part covers, the label of a soft target left out.
struct RowFactors {
  double loss;
  double softmax;
  double label;
  double smooth;
  double target;
};
RowFactors row_factors(const Context& context, std::int64_t table_row, const RowSoftmax& softmax, double target_logits);

// Upstream gradient of row `row`'s loss: cotangent, reduction and token weight.
double upstream(const Context& context, std::int64_t row);

Objective prepare_objective(const Context& context, std::int64_t rows);

// workspace.vector[column] = sum over v of class weight x c[v][column]; returns the same sum of the bias.
double smoothing_vector(const Context& context);
// outputs.mean_logits of the first `rows` table rows.
void mean_logits(const Context& context, std::int64_t rows);

// The ids by falling mean logit before softcap, which keeps their order; equal ones by id.
void order_by_mean_logit(const Context& context, std::int64_t rows, double* means, std::int64_t* order);

// ---------------------------------------------------------------------------------------- soft targets
// (soft_targets.cc)

// Fills workspace.targets, rows.label_weight and rows.target_sum of table rows [0, rows).
void gather_targets(const Context& context, std::int64_t rows);
// The targets of a panel that lie in positions [begin, end).
std::span<PanelTarget> targets_in(const Context& context, std::int64_t first_row, std::int64_t begin, std::int64_t end);
// All of the panel's targets, whatever their lane.
std::span<PanelTarget> panel_targets(const Context& context, std::int64_t first_row);

// ------------------------------------------------------------------------------------------------ metrics (metrics.cc)

void reset_metrics(const Context& context, const MetricState& state, std::int64_t lanes);
// Logits of the labels of a panel, the very bits their tiles will hold -> label_logit[W].
void label_logits(const Context& context, std::int64_t first, std::int64_t end, const float* panel_tokens,
                  const LossScratch& scratch, float* label_logit);
// One tile of one panel, its labels at -inf, after the softmax has seen it; lanes [lane, lane + live) of the block are
// rows.
void observe_tile(const Context& context, const MetricState& state, std::int64_t lane, std::int64_t live,
                  const float* z, std::int64_t rows, std::int64_t tile_row, const PanelState& seen,
                  const LossScratch& scratch);

// Lane `lane` of slices [slot, slot + slices): joined, and written for table row `table_row`. `label_seen`: the label's
// logit is label_logit, else there is none.
struct RowMetrics {
  std::int64_t table_row;
  std::int64_t lane;
  std::int64_t slot;
  std::int64_t slices;
  double max;
  double sum;
  double label_logit;
  bool has_label;
};
void write_metrics(const Context& context, const RowMetrics& row, const RowSoftmax& softmax);

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_PASSES_H_
