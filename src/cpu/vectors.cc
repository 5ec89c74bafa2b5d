// Sums over the whole vocabulary or over all rows that end in one vector: matrix-vector work, in float64.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/cpu/element.h"
#include "src/cpu/passes.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

// vector[D] and the return value: sums over `count` items of what add(item, part[D + 1]) adds. In kVectorParts parts of
// fixed extent, joined in order: the same bits for any schedule.
template <typename Add>
double sum_in_parts(const Context& context, std::int64_t count, const Add& add) {
  const std::int64_t size = context.plan.problem.hidden + 1;
  double* parts = context.workspace.vector_parts;
  context.executor.parallel_for(kVectorParts, [&](std::int64_t part, int) {
    double* to = parts + part * size;
    std::fill_n(to, size, 0.0);
    for (std::int64_t i = part * count / kVectorParts; i < (part + 1) * count / kVectorParts; ++i) add(i, to);
  });
  double* vector = context.workspace.vector;
  std::fill_n(vector, size, 0.0);
  for (std::int64_t part = 0; part < kVectorParts; ++part) {
    for (std::int64_t column = 0; column < size; ++column) vector[column] += parts[part * size + column];
  }
  return vector[size - 1];
}

double bias_at(const Context& context, std::int64_t id) {
  const Problem& p = context.plan.problem;
  if (!p.bias_dtype) return 0;
  double value = 0;
  WithElement(*p.bias_dtype, context.inputs.bias, [&](const auto* bias) { value = ToFloat(bias[id]); });
  return value;
}

// The mean of r_v is the mean hidden state against the table: V D work. set(v, mean).
template <typename Set>
void for_mean_linear_logits(const Context& context, std::int64_t rows, const Set& set) {
  const Problem& p = context.plan.problem;
  const Strides es = e_strides(p);
  WithElement(p.e_dtype, context.inputs.e, [&](const auto* e) {
    sum_in_parts(context, rows, [&](std::int64_t i, double* part) {
      const auto* at = e + context.workspace.rows.row[i] * es.axis0;
      for (std::int64_t column = 0; column < p.hidden; ++column) part[column] += ToFloat(at[column * es.axis1]);
    });
  });
  const HeadStrides cs = c_strides(p);
  const double factor = p.logit_scale / static_cast<double>(rows);
  const std::int64_t step = ceil_div(p.vocab, 64);
  WithElement(p.c_dtype, context.inputs.c, [&](const auto* c) {
    context.executor.parallel_for(ceil_div(p.vocab, step), [&](std::int64_t part, int) {
      for (std::int64_t v = part * step; v < std::min(p.vocab, (part + 1) * step); ++v) {
        double sum = 0;
        for (std::int64_t column = 0; column < p.hidden; ++column) {
          sum += context.workspace.vector[column] * ToFloat(c[v * cs.v + column * cs.d]);
        }
        set(v, factor * sum + bias_at(context, v));
      }
    });
  });
}

// Under a softcap every logit has to be formed: tasks own tiles, rows are added up in order.
void mean_of_capped_logits(const Context& context, std::int64_t rows) {
  const Problem& p = context.plan.problem;
  const Geometry& g = context.workspace.geometry;
  const std::int64_t block = context.plan.token_block;
  context.executor.parallel_for(g.tiles, [&](std::int64_t tile, int worker) {
    const LossScratch scratch = context.workspace.loss_scratch(worker);
    const std::int64_t tile_row = tile * g.tile_rows;
    const std::int64_t count = std::min(g.tile_rows, p.vocab - tile_row);
    pack_head_tile(context, tile_row, count, scratch.head);
    double sums[kMaxTileRows] = {};
    for (std::int64_t row = 0; row < rows; row += block) {
      const std::int64_t live = std::min(block, rows - row);
      const std::int64_t panels = ceil_div(live, g.panel);
      pack_token_panels(context, row, live, panels, scratch.tokens);
      for (std::int64_t panel = 0; panel < panels; ++panel) {
        context.kernels.logits(scratch.head, static_cast<std::size_t>(g.head_stride), ceil_div(count, g.rows),
                               scratch.tokens + panel * g.panel * g.depth, g.depth, scratch.weights);
        context.kernels.softcap(scratch.weights, count, *p.softcap, scratch.z, scratch.slopes);
        const std::int64_t lanes = std::min(g.panel, live - panel * g.panel);
        for (std::int64_t v = 0; v < count; ++v) {
          for (std::int64_t lane = 0; lane < lanes; ++lane) sums[v] += scratch.z[v * g.panel + lane];
        }
      }
    }
    for (std::int64_t v = 0; v < count; ++v) {
      context.outputs.mean_logits[id_at(context, tile_row + v)] =
          static_cast<float>(sums[v] / static_cast<double>(rows));
    }
  });
}

}  // namespace

double smoothing_vector(const Context& context) {
  const Problem& p = context.plan.problem;
  const HeadStrides cs = c_strides(p);
  double bias_sum = 0;
  WithElement(p.c_dtype, context.inputs.c, [&](const auto* c) {
    bias_sum = sum_in_parts(context, p.vocab, [&](std::int64_t v, double* part) {
      const double weight = class_weight(context, v);
      if (weight == 0) return;
      for (std::int64_t column = 0; column < p.hidden; ++column) {
        part[column] += weight * ToFloat(c[v * cs.v + column * cs.d]);
      }
      part[p.hidden] += weight * bias_at(context, v);
    });
  });
  return bias_sum;
}

void mean_logits(const Context& context, std::int64_t rows) {
  if (context.plan.problem.softcap) {
    mean_of_capped_logits(context, rows);
  } else {
    for_mean_linear_logits(
        context, rows, [&](std::int64_t v, double mean) { context.outputs.mean_logits[v] = static_cast<float>(mean); });
  }
}

void order_by_mean_logit(const Context& context, std::int64_t rows, double* means, std::int64_t* order) {
  for_mean_linear_logits(context, rows, [&](std::int64_t v, double mean) { means[v] = mean; });
  std::iota(order, order + context.plan.problem.vocab, std::int64_t{0});
  // NaN would break the order that sort() needs: such ids go last.
  const auto key = [&](std::int64_t v) { return std::isnan(means[v]) ? -HUGE_VAL : means[v]; };
  std::sort(order, order + context.plan.problem.vocab,
            [&](std::int64_t a, std::int64_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
}

}  // namespace cutloss::cpu
