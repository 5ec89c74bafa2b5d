// Gathering the rows that count into the two packed forms of the hidden states. O(N D) work beside O(N V D): plain C++.
#include <algorithm>

#include "src/cpu/element.h"
#include "src/cpu/passes.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

// visit(column, value) for every column of one caller's row, widened.
template <typename Visit>
void read_row(const Context& context, std::int64_t row, const Visit& visit) {
  const Problem& p = context.plan.problem;
  const Strides stride = e_strides(p);
  const auto read = [&](const auto* e) {
    const auto* at = e + row * stride.axis0;
    for (std::int64_t column = 0; column < p.hidden; ++column) visit(column, ToFloat(at[column * stride.axis1]));
  };
  if (p.e_dtype == DType::bf16) {
    read(static_cast<const Bf16*>(context.inputs.e));
  } else {
    read(static_cast<const float*>(context.inputs.e));
  }
}

}  // namespace

double upstream(const Context& context, std::int64_t row) {
  const float* cotangent = context.inputs.cotangent;
  if (cotangent == nullptr) return context.loss_scale;
  return context.loss_scale * cotangent[context.plan.problem.reduction == Reduction::none ? row : 0];
}

void label_rows(const Context& context, std::int64_t first, std::int64_t end, std::int64_t tile_row,
                std::int64_t* label_row) {
  const std::int64_t lanes = context.workspace.geometry.panel;
  const std::int64_t* labels = context.workspace.rows.label;
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    const std::int64_t label = first + lane < end ? labels[first + lane] : kBadLabel;
    label_row[lane] = label == kBadLabel ? -1 : label - tile_row;
  }
}

void pack_token_panels(const Context& context, std::int64_t first, std::int64_t count, std::int64_t panels,
                       float* out) {
  const std::int64_t lanes = context.workspace.geometry.panel;
  const std::int64_t hidden = context.plan.problem.hidden;
  for (std::int64_t i = 0; i < panels * lanes; ++i) {
    float* lane = out + i / lanes * lanes * hidden + i % lanes;
    if (i < count) {
      read_row(context, context.workspace.rows.row[first + i],
               [&](std::int64_t column, float value) { lane[column * lanes] = value; });
    } else {
      for (std::int64_t column = 0; column < hidden; ++column) lane[column * lanes] = 0.0f;
    }
  }
}

void pack_token_slices(const Context& context, std::int64_t first, std::int64_t count, std::int64_t at,
                       std::int64_t token_rows, float* out) {
  const Geometry& g = context.workspace.geometry;
  const std::int64_t lanes = g.panel;
  const std::int64_t hidden = context.plan.problem.hidden;
  const auto cell = [&](std::int64_t i, std::int64_t column) -> float& {
    return out[(column / lanes * token_rows + at + i) * lanes + column % lanes];
  };
  const std::int64_t padded = round_up(count, lanes);
  for (std::int64_t i = 0; i < padded; ++i) {
    if (i < count) {
      read_row(context, context.workspace.rows.row[first + i],
               [&](std::int64_t column, float value) { cell(i, column) = value; });
    }
    for (std::int64_t column = i < count ? hidden : 0; column < g.slice_hidden; ++column) cell(i, column) = 0.0f;
  }
}

}  // namespace cutloss::cpu
