// Where everything lies in the workspace. The planner counts bytes and run() gets pointers from the same function, so
// that what is used is what the plan said.
#ifndef CUTLOSS_SRC_PLAN_WORKSPACE_H_
#define CUTLOSS_SRC_PLAN_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "cutloss/cutloss.hpp"

namespace cutloss {

constexpr std::int64_t kMaxPanel = 32;  // W at most
constexpr std::int64_t kMaxTileRows =
    224;  // vocabulary rows of a tile at most: logits and weights of a panel stay in L1

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
  std::int64_t row_stride;     // D rounded up to a cache line of floats
  std::int64_t tail_tiles;     // tiles of a tail block
  std::int64_t tail_blocks;    // ceil(tiles / tail_tiles)
};
Geometry geometry_of(const Plan& plan);

// First tile of a vocabulary slice; of slice plan.vocab_slices, the number of tiles.
inline std::int64_t slice_begin(const Plan& plan, const Geometry& g, std::int64_t slice) {
  return slice * g.tiles / plan.vocab_slices;
}
// The slice that a tile is in.
inline std::int64_t slice_of(const Plan& plan, const Geometry& g, std::int64_t tile) {
  return ((tile + 1) * plan.vocab_slices - 1) / g.tiles;
}

// What becomes of a filtered row: exactly: the exact mode does it again; finished: too flat, its last tiles unfiltered.
enum class Redo : std::uint8_t { no, exactly, finished };

// Per-row data in the order of the compacted rows; what is absent is null.
struct RowTable {
  std::int64_t* row;       // index in the caller's arrays
  std::int64_t* label;     // in [0, V), kBadLabel or kNoTarget
  std::int64_t* position;  // of the label in vocab_order; the same array as label without one
  double* loss;            // [N] by the caller's rows: weighted, before the reduction's factor; 0 where not computed
  double* label_weight;    // soft targets only: probability of the label ...
  double* target_sum;      // ... and of all ids
  float* max;              // these five only where dz is formed from a known lse: see PanelGradient
  float* weight;
  float* label_grad;
  float* smooth;  // with label smoothing
  float* target;  // with soft targets: what a probability is multiplied by

  float* scale;  // filter "tile": magnitude of the upstream gradient

  Redo* redo;          // mode sparse
  double* below;       // mode sparse: its mass below epsilon, ...
  double* bound;       // ... what that may cost its dE, ...
  std::int64_t* kept;  // ... and its entries that were kept
};

// Kept entries of a panel, sorted by tile but not within one. The gradient of one is factors.softmax / sum *
// exp(value - max); value and place are kept apart, 6 bytes for 8.
struct SparseEntries {
  float* value;
  std::uint16_t* place;  // row in its tile * kMaxPanel + lane
};
constexpr std::int64_t kEntryBytes = 6;

// Mass that a row left below epsilon in one tail block, under the running maximum of then.
struct TailMass {
  float mass;
  float max;
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

// What a filter has seen so far of one token block: [token_block] each.
struct FilterState {
  float* scale_max;  // the maximum that the row accumulator is scaled by, ...
  float* factor;     // ... and exp(max - scale_max)
  float* below;      // mass below epsilon
  float* below_error;
  float* tail;         // the same, times slope, of the current tail block
  float* label_logit;  // known before any tile, so that the first ones are not measured against next to nothing
  float* label_mass;   // exp(label_logit - running maximum)
  std::int64_t* kept;
  std::uint32_t* keys;  // [panels][2][W]
  std::int64_t* flat;   // [panels]: 1 where so much was kept that the panel is filtered no further
};

// What the metrics have seen so far of one token block: [token_block] each, or [token_block][k].
struct MetricState {
  float* below_sum;  // sum of exp(z - max) (z - max) under the latest maximum, ...
  float* below_error;
  float* mass;  // ... sum of exp(z - max), ...
  float* peak;  // ... and that maximum
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
  float* accumulator;      // [panels][Dp][W], if dE is wanted; not in mode sparse with a trainable head
  float* row_accumulator;  // mode sparse: [token_block][row_stride], of kept entries
  float* smooth_sum;       // these three with softcap and smoothing: sum of class weight x z, ...
  float* smooth_error;
  float* smooth_accumulator;  // ... and, if dE is wanted, of class weight x slope x table row
  MetricState metrics;
  FilterState filter;
};

// Terms of sums over rows that are gathered before they are added: [sums][kTerms] each, and how many there are.
struct TermLists {
  float* factor;
  std::int64_t* row;
  std::int32_t* count;  // [sums]
};
// Per list: longer ones save less than 1/16 of the columns' traffic, and those of a tile are to stay in L1.
constexpr std::int64_t kTerms = 16;

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
  std::uint32_t* masks;     // mode sparse: [tile_rows]
  float* parts;             // mode sparse: [3][W]
  TermLists terms;          // mode sparse: of W sums
  float* table;             // mode sparse: [tile_rows][row_stride], where the table's rows are not f32 side by side
};

struct HeadScratch {        // one per worker
  float* out;               // [head_tiles * tile_rows][slice_hidden]
  float* out_error;         // what its sums have rounded away
  float* class_weights;     // [tile_rows]
  std::int64_t* label_row;  // [W]
  TermLists terms;          // mode sparse: of tile_rows sums
  float* heads;             // these four in mode recompute only: head_tiles head tiles,
  float* tokens;            // [head_tokens / W][depth][W]
  float* slices;            // [slice_hidden / W][head_tokens][W]
  float* logits;            // head_tokens / W logits tiles
};

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
  float* d_c_sum = nullptr;                // with plan.head_sum: [V][slice_columns]
  float* d_c_error = nullptr;              // with problem.compensated: what d_c_sum has rounded away
  // Mode sparse. centers, radius: see summarize_head(); the others if the head pass runs.
  float* centers = nullptr;            // [tail_blocks][row_stride]
  double* radius = nullptr;            // [tail_blocks + 1], the last the largest
  SparseEntries entries{};             // [group panels][vocab_slices][panel_entries]
  std::int32_t* entry_ends = nullptr;  // [group panels][tiles]: where a tile's entries of its slice end
  TailMass* tail_masses = nullptr;     // [group tokens][tail_blocks + vocab_slices]
  float* token_rows = nullptr;         // [group tokens][slice_hidden]
  float* tail_rows = nullptr;          // [tail_blocks][slice_hidden]: what every row of a block gets
  double* smooth_row = nullptr;        // [slice_columns]: the same of smoothing, times the class weight
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
