// The two passes every mode is made of.
//
//   loss pass   tasks own tokens:      lse, nll and dE of a range of rows, streaming over the vocabulary
//   head pass   tasks own vocabulary:  dC of all rows of a range, from kept logits or by forming them again
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
#include "src/plan/workspace.h"

namespace cutloss::cpu {

struct Context {
  const Plan& plan;
  const Inputs& inputs;
  const Outputs& outputs;
  const Kernels& kernels;
  const Workspace& workspace;
  Executor& executor;
  double loss_scale;  // what the reduction multiplies a row's nll with: 1 / valid, or 1
};

// Rows [first, first + count) of the row table. Writes nll and lse, dE if wanted, and with dC wanted the table's last
// three columns. Mode chunk keeps the raw logits in workspace.saved_logits.
void loss_pass(const Context& context, std::int64_t first, std::int64_t count);

// Adds (or, for the first range, sets) dC of rows [first, first + count). Needs their loss_pass.
// `last` says that no range follows: sums kept in f32 are rounded to the output's dtype.
void head_pass(const Context& context, std::int64_t first, std::int64_t count, bool last);

// Upstream gradient of row `row`'s nll: cotangent and reduction.
double upstream(const Context& context, std::int64_t row);

// Hidden states of `count` table rows from `first` -> panels[D][W], lanes beyond count zero.
void pack_token_panels(const Context& context, std::int64_t first, std::int64_t count, std::int64_t panels, float* out);
// ... -> slices[slice_hidden / W][token_rows][W], rows [at, at + count); rows up to the next multiple of W are zeroed.
void pack_token_slices(const Context& context, std::int64_t first, std::int64_t count, std::int64_t at,
                       std::int64_t token_rows, float* out);

// For each lane of the panel that starts at table row `first`: its label less `tile_row`, out of any tile's range for
// lanes at or beyond `end`.
void label_rows(const Context& context, std::int64_t first, std::int64_t end, std::int64_t tile_row,
                std::int64_t* label_row);

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_PASSES_H_
