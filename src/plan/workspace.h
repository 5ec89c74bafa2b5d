// Where everything lies in the workspace. The planner counts bytes and run() gets pointers from the same function, so
// that what is used is what the plan said.
#ifndef CUTLOSS_SRC_PLAN_WORKSPACE_H_
#define CUTLOSS_SRC_PLAN_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "cutloss/cutloss.hpp"

namespace cutloss {

// Sizes that follow from a plan and its kernels. Layout words are those of src/cpu/kernels.h.
struct Geometry {
  std::int64_t panel;          // W
  std::int64_t rows;           // R
  std::int64_t padded_hidden;  // Dp: D rounded up to R
  std::int64_t slice_hidden;   // D rounded up to W
  std::int64_t tile_groups;    // groups of R in a vocabulary tile
  std::int64_t tile_rows;      // = plan.vocab_tile
  std::int64_t tiles;          // ceil(V / tile_rows)
  std::int64_t head_stride;    // floats between the groups of a head tile
  std::int64_t head_tile;      // floats in a head tile
  std::int64_t logits_tile;    // floats in a logits tile
  std::int64_t loss_blocks;    // most token blocks of one loss pass
};
Geometry geometry_of(const Plan& plan);

// Per-row results of the loss pass, in the order of the compacted rows.
struct RowTable {
  std::int64_t* row;    // index in the caller's arrays
  std::int64_t* label;  // in [0, V), or kBadLabel
  double* nll;
  float* max;  // these three only if dC is wanted: see PanelGradient
  float* weight;
  float* label_grad;
};

// Running softmax and accumulator of one token block over one slice of the vocabulary.
struct LossState {
  float* lanes;        // five arrays of token_block: max, sum, sum_error, label_logit, label_slope
  float* accumulator;  // [panels][Dp][W], if dE is wanted
};

struct LossScratch {  // one per worker
  float* tokens;      // [panels][D][W]
  float* head;        // a head tile
  float* logits;      // a logits tile (mode chunk writes to saved_logits instead)
  float* weights;
  float* slopes;            // with softcap
  float* rescale;           // [W]
  std::int64_t* label_row;  // [W]
};

struct HeadScratch {        // one per worker
  float* out;               // [head_tiles * tile_rows][slice_hidden]
  float* out_error;         // what its sums have rounded away
  std::int64_t* label_row;  // [W]
  float* heads;             // these four in mode recompute only: head_tiles head tiles,
  float* tokens;            // [head_tokens / W][D][W]
  float* slices;            // [slice_hidden / W][head_tokens][W]
  float* logits;            // head_tokens / W logits tiles
};

struct Workspace {
  RowTable rows;
  float* saved_logits = nullptr;  // mode chunk: [tiles][chunk panels] logits tiles, before softcap
  float* chunk_slices = nullptr;  // mode chunk: [slice_hidden / W][chunk_tokens][W]
  float* d_c_sum = nullptr;       // mode chunk with several chunks and dC not f32: [V][D]
  std::uint64_t bytes = 0;

  LossState loss_state(std::int64_t slot) const;
  LossScratch loss_scratch(int worker) const;
  HeadScratch head_scratch(int worker) const;

  // base of slot or worker 0, and the floats from one to the next
  std::byte* states = nullptr;
  std::byte* workers = nullptr;
  Geometry geometry{};
  std::uint64_t state_bytes = 0;
  std::uint64_t worker_bytes = 0;
  const Plan* plan = nullptr;
};

// With base null only `bytes` means anything. `plan` must outlive the result.
Workspace map_workspace(const Plan& plan, std::byte* base);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_WORKSPACE_H_
