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
  std::int64_t depth;          // columns of a packed head row: D, and one for the bias where there is one
  std::int64_t padded_depth;   // Dp: depth rounded up to R
  std::int64_t slice_columns;  // columns of dC that the head pass computes: D if dC is wanted, one for dbias
  std::int64_t slice_hidden;   // the same rounded up to W
  std::int64_t tile_groups;    // groups of R in a vocabulary tile
  std::int64_t tile_rows;      // = plan.vocab_tile
  std::int64_t tiles;          // ceil(V / tile_rows)
  std::int64_t head_stride;    // floats between the groups of a head tile
  std::int64_t head_tile;      // floats in a head tile
  std::int64_t logits_tile;    // floats in a logits tile
  std::int64_t loss_blocks;    // most token blocks of one loss pass
};
Geometry geometry_of(const Plan& plan);

// Per-row data in the order of the compacted rows; what is absent is null.
struct RowTable {
  std::int64_t* row;       // index in the caller's arrays
  std::int64_t* label;     // in [0, V), or kBadLabel
  std::int64_t* position;  // of the label in vocab_order; the same array as label without one
  double* loss;            // weighted, before the reduction's factor
  double* label_weight;    // soft targets only: probability of the label ...
  double* target_sum;      // ... and of all ids
  float* max;              // these four only if the head pass runs: see PanelGradient
  float* weight;
  float* label_grad;
  float* smooth;  // with label smoothing
  float* target;  // with soft targets: what a probability is multiplied by
};

// A soft target other than its row's label; the entries of a panel of rows lie side by side, sorted by position.
struct PanelTarget {
  std::int64_t position;  // in vocab_order; V or more: none
  std::int64_t id;
  std::int32_t lane;
  float probability;
  float logit;  // these two by the loss pass
  float slope;
};

// What the metrics have seen so far of one token block: [token_block] each, or [token_block][k].
struct MetricState {
  float* weighted_sum;  // sum of exp(z - max) z ...
  float* weighted_error;
  float* best;
  std::int64_t* best_id;
  float* label_logit;
  std::int64_t* rank;
  float* top;
  std::int64_t* top_id;
};

// Running softmax and accumulator of one token block over one slice of the vocabulary.
struct LossState {
  float* max;  // [token_block] each
  float* sum;
  float* sum_error;
  float* label_logit;
  float* label_slope;
  float* accumulator;  // [panels][Dp][W], if dE is wanted
  float* smooth_sum;   // these three with softcap and smoothing: sum of class weight x z, ...
  float* smooth_error;
  float* smooth_accumulator;  // ... and, if dE is wanted, of class weight x slope x table row
  MetricState metrics;
};

struct LossScratch {  // one per worker
  float* tokens;      // [panels][depth][W]
  float* head;        // a head tile
  float* logits;      // a logits tile (mode chunk writes to saved_logits instead)
  float* weights;
  float* z;  // these two with softcap
  float* slopes;
  float* rescale;           // [W]
  float* peak;              // [3][W], with metrics
  float* class_weights;     // [tile_rows]
  std::int64_t* label_row;  // [W]
};

struct HeadScratch {        // one per worker
  float* out;               // [head_tiles * tile_rows][slice_hidden]
  float* out_error;         // what its sums have rounded away
  float* class_weights;     // [tile_rows]
  std::int64_t* label_row;  // [W]
  float* heads;             // these four in mode recompute only: head_tiles head tiles,
  float* tokens;            // [head_tokens / W][depth][W]
  float* slices;            // [slice_hidden / W][head_tokens][W]
  float* logits;            // head_tokens / W logits tiles
};

constexpr std::int64_t kMaxPanel = 32;  // W at most
constexpr std::int64_t kMaxTileRows =
    224;  // vocabulary rows of a tile at most: logits and weights of a panel stay in L1

// Sums over the vocabulary or the rows are made of this many parts, whatever the number of threads.
constexpr std::int64_t kVectorParts = 16;

struct Workspace {
  RowTable rows;
  std::int64_t* order_position = nullptr;  // with vocab_order: its inverse, [V]
  PanelTarget* targets = nullptr;          // with soft targets: [N][K]
  double* vector = nullptr;                // [D]: sum over v of class weight x table row, or the mean hidden state
  double* vector_parts = nullptr;          // [kVectorParts][D + 1]
  float* saved_logits = nullptr;           // mode chunk: [tiles][chunk panels] logits tiles, before softcap
  float* chunk_slices = nullptr;           // mode chunk: [slice_hidden / W][chunk_tokens][W]
  float* d_c_sum = nullptr;                // mode chunk with several chunks: see needs_head_sum(); [V][slice_columns]
  float* d_c_error = nullptr;              // with problem.compensated: what d_c_sum has rounded away
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

// Whether chunks are summed apart from the outputs: these are not f32, or errors are kept.
bool needs_head_sum(const Plan& plan);

// With base null only `bytes` means anything. `plan` must outlive the result.
Workspace map_workspace(const Plan& plan, std::byte* base);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_WORKSPACE_H_
