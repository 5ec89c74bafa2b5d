// The vector kernels, as one struct of function pointers per target; kernels.inc lists the targets.
//
// Words and layouts (all f32, 64-byte aligned, W = panel, R = rows of the struct below):
//   token panel   [D][W]            W tokens side by side, one per vector lane
//   head tile     [groups][Dp][R]   R vocabulary rows interleaved, Dp = D rounded up to R; groups lie head_stride apart
//   logits tile   [groups * R][W]   one panel against one head tile; rows beyond the vocabulary hold zeros
//   token slices  [D / W][tokens][W] the hidden states again, W columns side by side, for products over tokens
#ifndef CUTLOSS_SRC_CPU_KERNELS_H_
#define CUTLOSS_SRC_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "cutloss/cutloss.hpp"

namespace cutloss::cpu {

// Running softmax of a panel over every vocabulary entry but the label: one value per lane in each array.
struct PanelState {
  float* max;        // largest logit seen; starts at the lowest finite float
  float* sum;        // sum of exp(logit - max) ...
  float* sum_error;  // ... and what its additions across tiles have rounded away
};

// What the gradient of a panel's logits needs once the softmax is known: one value per lane.
struct PanelGradient {
  const float* max;
  const float* weight;      // factor of the softmax / sum of exp(logit - max) over all entries; 0 in empty lanes
  const float* label_grad;  // gradient of the label's logit before softcap
  const float* smooth;      // label smoothing takes this times the class weight from every entry; null: none
};

// For the entropy: how far below the maximum the mass lies. Only differences of logits enter, which keep their digits
// whatever all logits have in common. One value per lane in each array.
struct BelowPeak {
  float* sum;  // of exp(z - peak) * (z - peak), compensated
  float* error;
  float* mass;  // the running sum of exp(z - peak)
  float* peak;  // and the running maximum of then
};

// What a tile holds beyond its softmax: one value per lane.
struct TilePeak {
  float* max;    // largest logit
  float* row;    // its row in the tile, the first of equals
  float* above;  // number of logits above label_logit
};

// How the entries of a tile are chosen: one value per lane. An entry's mass is exp(z - max) under the running maximum.
struct Selection {
  const float* slopes;        // like the tile, null: 1
  const float* sum;           // running sum of the masses, this tile included, ...
  const float* sum_error;     // ... and its error
  const float* label_mass;    // of the label, which is in no tile
  const std::uint32_t* keys;  // [2][W], of the tokens; used if unbiased
  std::int64_t first;         // position of the tile's first row
  float epsilon;              // entries of at least epsilon * (sum + label_mass) are kept;
  bool unbiased;              // of the others this share of their mass over that threshold, weighing the threshold
  float* below;               // out: mass below the threshold
  float* tail;                // out: the same times slopes, unless unbiased
  float* kept;                // out: number of entries kept
};

struct Kernels {
  const char* name;
  std::int64_t highway_target;
  int panel;  // W: two vectors
  int rows;   // R: register tile is R x 2 vectors, chosen to fill the register file without spills

  // Head rows [row, row + rows) of a table with element strides (stride_v, stride_d) -> head tile, zero padded. With
  // an order, rows order[row], order[row + 1], ... instead. `padded_hidden` is Dp of the tile, at least `hidden`.
  void (*pack_head)(const void* table, DType dtype, std::int64_t stride_v, std::int64_t stride_d,
                    const std::int64_t* order, std::int64_t row, std::int64_t rows, std::int64_t hidden,
                    std::int64_t padded_hidden, float* tile);

  // logits[groups * R][W] = head tile x token panel; `depth` rows of the panel, at most Dp.
  void (*logits)(const float* head, std::size_t head_stride, std::int64_t groups, const float* tokens,
                 std::int64_t depth, float* logits);

  // z = softcap * tanh(logits / softcap) and slopes = d z / d logits, for `rows` rows.
  void (*softcap)(const float* logits, std::int64_t rows, float softcap, float* z, float* slopes);

  // Running max and sum over a tile whose label entries are -inf; weights[groups * R][W] = exp(z - max) (times slopes
  // unless null), 0 beyond rows; rescale[W] = exp(old max - new max).
  void (*softmax)(const float* z, std::int64_t rows, std::int64_t groups, const float* slopes, PanelState state,
                  float* weights, float* rescale);

  // The uniform part of label smoothing under a softcap: weights = class weight * slope, 0 beyond rows, and
  // sum += class weight * z, compensated. class_weights: of the tile's rows; null: 1. Entries at -inf add nothing.
  void (*smooth)(const float* z, const float* slopes, std::int64_t rows, std::int64_t groups,
                 const float* class_weights, float* weights, float* sum, float* sum_error);

  // Moves the sums of `below` to the maximum of `state`, which has seen the tile, and adds the tile's terms.
  void (*below_peak)(const float* z, std::int64_t rows, PanelState state, const float* rescale, BelowPeak below);

  void (*tile_peak)(const float* z, std::int64_t rows, const float* label_logit, TilePeak peak);

  // masks[v] bit i: entry (v, lane i) is kept. weights hold the masses; if unbiased they become at least the threshold.
  void (*select)(float* weights, std::int64_t rows, const Selection& selection, std::uint32_t* masks);

  // Rows of n floats: y += factor[k] * row index[k] of `rows`, for k = 0, 1, ..., count - 1 in this order; y *= factor,
  // sum of (x - center)^2, and widening from any dtype and stride.
  void (*add_rows)(const float* rows, std::int64_t stride, const std::int64_t* index, const float* factor,
                   std::int64_t count, std::int64_t n, float* y);
  void (*scale_row)(float factor, std::int64_t n, float* y);
  float (*squared_distance)(const float* x, const float* center, std::int64_t n);
  void (*widen_row)(const void* row, DType dtype, std::int64_t stride, std::int64_t n, float* out);

  // accumulator[Dp][W] = accumulator * rescale + head tile^T x weights.
  void (*hidden_gradient)(const float* head, std::size_t head_stride, std::int64_t groups, const float* weights,
                          std::int64_t padded_hidden, const float* rescale, float* accumulator);

  // In place: logits tile -> gradient of the raw logits. Rows beyond `rows` become 0. class_weights: of the tile's
  // rows, used with gradient.smooth; null: 1.
  void (*logits_gradient)(float* logits, std::int64_t rows, std::int64_t groups, const std::int64_t* label_row,
                          float softcap, PanelGradient gradient, const float* class_weights);

  // largest[W] = the largest |value| of the tile's rows, NaN where there is one.
  void (*largest_magnitude)(const float* tile, std::int64_t rows, float* largest);

  // out[groups * R][out_stride] (+)= gradient x token slices, over `panels` logits tiles lying panel_stride apart.
  // token_rows is the row count of a slice; out_stride is D rounded up to W. error, of out's size, gathers what the
  // additions round away (0 at first, without accumulate), so that out + error does not drift with the number of steps.
  void (*head_gradient)(const float* gradient, std::size_t panel_stride, std::int64_t panels, const float* slices,
                        std::int64_t token_rows, std::int64_t groups, std::int64_t out_stride, bool accumulate,
                        float* out, float* error);

  // R x 2 independent chains of vector multiply-adds, `iterations` long, with no memory in between: the arithmetic
  // peak that the products are measured against. 2 * R * 2 * (W / 2) FLOP an iteration.
  void (*multiply_add_chains)(std::int64_t iterations, float* sink);

  void (*exp_for_test)(const float* x, std::size_t n, float* y);  // exp over n floats <= 0
};

// Floats from one group of a head tile to the next: an odd number of 64-byte lines, so that the groups of a tile fall
// on different L1 sets for every D. With D a power of two they would otherwise all share 3 of the 64 sets.
constexpr std::size_t head_stride(std::int64_t padded_hidden, int rows) {
  const std::size_t lines = (static_cast<std::size_t>(padded_hidden) * rows + 4 + 15) / 16;
  return (lines | 1) * 16;
}

// Targets of this build that this CPU can run, best first.
std::span<const Kernels* const> supported_kernels();
const Kernels* find_kernels(std::string_view name);  // null if not supported

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_KERNELS_H_
