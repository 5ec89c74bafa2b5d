// What the passes feed the products with: packed head tiles, the two packed forms of the hidden states, label rows.
// O(N D) and O(V D) work beside O(N V D): plain C++ but for the head tile.
#include <algorithm>
#include <cstdint>

#include "src/cpu/element.h"
#include "src/cpu/passes.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

// visit(column, value) for every column of one caller's row, widened and scaled.
template <typename Visit>
void read_row(const Context& context, std::int64_t row, const Visit& visit) {
  const Problem& p = context.plan.problem;
  const Strides stride = e_strides(p);
  const float scale = p.logit_scale;
  WithElement(p.e_dtype, context.inputs.e, [&](const auto* e) {
    const auto* at = e + row * stride.axis0;
    for (std::int64_t column = 0; column < p.hidden; ++column) {
      const float x = ToFloat(at[column * stride.axis1]);
      visit(column, scale == 1.0f ? x : scale * x);  // a product by 1 would flush a subnormal x
    }
  });
}

// order null: rows row, row + 1, ...
void pack_rows(const Context& context, const std::int64_t* order, std::int64_t row, std::int64_t rows, float* out) {
  const Problem& p = context.plan.problem;
  const Geometry& g = context.workspace.geometry;
  const HeadStrides stride = c_strides(p);
  context.kernels.pack_head(context.inputs.c, p.c_dtype, stride.v, stride.d, order, row, rows, p.hidden, g.padded_depth,
                            out);
  if (!p.bias_dtype) return;
  WithElement(*p.bias_dtype, context.inputs.bias, [&](const auto* bias) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t id = order == nullptr ? row + i : order[row + i];
      out[i / g.rows * g.head_stride + p.hidden * g.rows + i % g.rows] = ToFloat(bias[id]);
    }
  });
}

}  // namespace

void pack_head_tile(const Context& context, std::int64_t tile_row, std::int64_t rows, float* out) {
  pack_rows(context, context.inputs.vocab_order, tile_row, rows, out);
}

void pack_head_rows(const Context& context, const std::int64_t* ids, std::int64_t rows, float* out) {
  pack_rows(context, ids, 0, rows, out);
}

const float* float_table_row(const Context& context, std::int64_t id, float* scratch) {
  const Problem& p = context.plan.problem;
  const HeadStrides stride = c_strides(p);
  const auto* row =
      static_cast<const char*>(context.inputs.c) + id * stride.v * static_cast<std::int64_t>(size_of(p.c_dtype));
  if (rows_are_floats(p)) return reinterpret_cast<const float*>(row);
  context.kernels.widen_row(row, p.c_dtype, stride.d, p.hidden, scratch);
  return scratch;
}

void float_hidden_row(const Context& context, std::int64_t row, float* out) {
  const Problem& p = context.plan.problem;
  const Strides stride = e_strides(p);
  const auto* at =
      static_cast<const char*>(context.inputs.e) + row * stride.axis0 * static_cast<std::int64_t>(size_of(p.e_dtype));
  context.kernels.widen_row(at, p.e_dtype, stride.axis1, p.hidden, out);
  if (p.logit_scale != 1.0f) context.kernels.scale_row(p.logit_scale, p.hidden, out);
}

const float* tile_class_weights(const Context& context, std::int64_t tile_row, std::int64_t rows, float* scratch) {
  const float* weights = context.inputs.class_weights;
  if (weights == nullptr) return nullptr;
  if (context.inputs.vocab_order == nullptr) return weights + tile_row;
  for (std::int64_t i = 0; i < rows; ++i) scratch[i] = weights[context.inputs.vocab_order[tile_row + i]];
  return scratch;
}

void label_rows(const Context& context, std::int64_t first, std::int64_t end, std::int64_t tile_row,
                std::int64_t* label_row) {
  const std::int64_t lanes = context.workspace.geometry.panel;
  const std::int64_t* positions = context.workspace.rows.position;
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    const std::int64_t position = first + lane < end ? positions[first + lane] : kBadLabel;
    label_row[lane] = position < 0 ? -1 : position - tile_row;
  }
}

void pack_token_panels(const Context& context, std::int64_t first, std::int64_t count, std::int64_t panels,
                       float* out) {
  const Geometry& g = context.workspace.geometry;
  const std::int64_t hidden = context.plan.problem.hidden;
  for (std::int64_t i = 0; i < panels * g.panel; ++i) {
    float* lane = out + i / g.panel * g.panel * g.depth + i % g.panel;
    if (i < count) {
      read_row(context, context.workspace.rows.row[first + i],
               [&](std::int64_t column, float value) { lane[column * g.panel] = value; });
    } else {
      for (std::int64_t column = 0; column < hidden; ++column) lane[column * g.panel] = 0.0f;
    }
    // In empty lanes too: 0 times a bias of -inf would be NaN.
    if (g.depth > hidden) lane[hidden * g.panel] = 1.0f;
  }
}

void pack_token_slices(const Context& context, std::int64_t first, std::int64_t count, std::int64_t at,
                       std::int64_t token_rows, float* out) {
  const Problem& p = context.plan.problem;
  const Geometry& g = context.workspace.geometry;
  const auto cell = [&](std::int64_t i, std::int64_t column) -> float& {
    return out[(column / g.panel * token_rows + at + i) * g.panel + column % g.panel];
  };
  const std::int64_t padded = round_up(count, g.panel);
  for (std::int64_t i = 0; i < padded; ++i) {
    std::int64_t filled = 0;
    if (i < count && p.want_d_c) {
      read_row(context, context.workspace.rows.row[first + i],
               [&](std::int64_t column, float value) { cell(i, column) = value; });
      filled = p.hidden;
    }
    if (i < count && p.want_d_bias) cell(i, filled++) = 1.0f;
    for (std::int64_t column = filled; column < g.slice_hidden; ++column) cell(i, column) = 0.0f;
  }
}

}  // namespace cutloss::cpu
