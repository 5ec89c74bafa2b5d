#include <algorithm>
#include <cstring>

#include "src/cpu/element.h"
#include "src/cpu/passes.h"
#include "src/cpu/row_sums.h"
#include "src/cpu/two_sum.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

// to (+)= from, over n floats.
void put(const Context& context, const float* from, std::int64_t n, bool add, float* to) {
  if (add) {
    add_row(context.kernels, 1.0f, from, n, to);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  }
}

// Into row `row` of the sums that ranges share; returns it, complete if `last`.
const float* add_to_sum(const Context& context, std::int64_t row, const float* values, bool started, bool last) {
  const std::int64_t columns = context.workspace.geometry.slice_columns;
  float* sum = context.workspace.d_c_sum + row * columns;
  if (context.workspace.d_c_error == nullptr) {
    put(context, values, columns, started, sum);
    return sum;
  }
  float* error = context.workspace.d_c_error + row * columns;
  for (std::int64_t column = 0; column < columns; ++column) {
    if (!started) sum[column] = error[column] = 0.0f;
    error[column] += AddTwoSum(sum[column], values[column]);
  }
  if (last) add_row(context.kernels, 1.0f, error, columns, sum);
  return sum;
}

void write_d_c(const Context& context, std::int64_t id, const float* values, bool add) {
  const Problem& p = context.plan.problem;
  const HeadStrides stride = d_c_strides(p);
  if (d_c_dtype(p) == DType::f32 && stride.d == 1) {
    return put(context, values, p.hidden, add, static_cast<float*>(context.outputs.d_c) + id * stride.v);
  }
  WithElement(d_c_dtype(p), context.outputs.d_c, [&](auto* d_c) {
    auto* to = d_c + id * stride.v;
    for (std::int64_t column = 0; column < p.hidden; ++column) {
      auto& cell = to[column * stride.d];
      FromFloat(add ? ToFloat(cell) + values[column] : values[column], cell);
    }
  });
}

// `started`: an earlier range has written the row.
void write_row(const Context& context, std::int64_t id, const float* values, bool started) {
  const Problem& p = context.plan.problem;
  if (p.want_d_c) write_d_c(context, id, values, started || p.accumulate_d_c);
  if (!p.want_d_bias) return;
  WithElement(*p.bias_dtype, context.outputs.d_bias, [&](auto* d_bias) {
    const float value = values[context.workspace.geometry.slice_columns - 1];
    FromFloat(started || p.accumulate_d_bias ? ToFloat(d_bias[id]) + value : value, d_bias[id]);
  });
}

class HeadTask {
 public:
  HeadTask(const Context& context, std::int64_t first, std::int64_t count)
      : context_(context), plan_(context.plan), g_(context.workspace.geometry), first_(first), count_(count) {}

  std::int64_t rows_of(std::int64_t tile) const {
    return std::min(g_.tile_rows, plan_.problem.vocab - tile * g_.tile_rows);
  }

  std::int64_t out_tile() const { return g_.tile_rows * g_.slice_hidden; }

  // scratch.out + out_error = gradient of tiles [tile, tile_end), from the logits the loss pass kept.
  void from_saved(std::int64_t tile, const HeadScratch& scratch) const {
    const std::int64_t chunk_panels = plan_.chunk_tokens / g_.panel;
    float* saved = context_.workspace.saved_logits + tile * chunk_panels * g_.logits_tile;
    for (std::int64_t token = 0; token < count_; token += plan_.head_tokens) {
      const std::int64_t panels = ceil_div(std::min(plan_.head_tokens, count_ - token), g_.panel);
      float* logits = saved + token / g_.panel * g_.logits_tile;
      multiply(tile, token, panels, logits, context_.workspace.chunk_slices + token * g_.panel, plan_.chunk_tokens,
               scratch, scratch.out, scratch.out_error);
    }
  }

  // The same for several tiles, forming the logits again.
  void from_recomputed(std::int64_t tile, std::int64_t tile_end, const HeadScratch& scratch) const {
    const Kernels& kernels = context_.kernels;
    for (std::int64_t t = tile; t < tile_end; ++t) {
      pack_head_tile(context_, t * g_.tile_rows, rows_of(t), scratch.heads + (t - tile) * g_.head_tile);
    }
    for (std::int64_t token = 0; token < count_; token += plan_.head_tokens) {
      const std::int64_t count = std::min(plan_.head_tokens, count_ - token);
      const std::int64_t panels = ceil_div(count, g_.panel);
      pack_token_panels(context_, first_ + token, count, panels, scratch.tokens);
      pack_token_slices(context_, first_ + token, count, 0, plan_.head_tokens, scratch.slices);
      for (std::int64_t t = tile; t < tile_end; ++t) {
        const std::int64_t groups = ceil_div(rows_of(t), g_.rows);
        for (std::int64_t panel = 0; panel < panels; ++panel) {
          kernels.logits(scratch.heads + (t - tile) * g_.head_tile, static_cast<std::size_t>(g_.head_stride), groups,
                         scratch.tokens + panel * g_.panel * g_.depth, g_.depth,
                         scratch.logits + panel * g_.logits_tile);
        }
        multiply(t, token, panels, scratch.logits, scratch.slices, plan_.head_tokens, scratch,
                 scratch.out + (t - tile) * out_tile(), scratch.out_error + (t - tile) * out_tile());
      }
    }
  }

  // Rows of one tile into the outputs; `from` takes up its errors first.
  void store(std::int64_t tile, float* from, const float* from_error, const HeadRange& range) const {
    for (std::int64_t i = 0; i < rows_of(tile); ++i) {
      float* values = from + i * g_.slice_hidden;
      const float* errors = from_error + i * g_.slice_hidden;
      add_row(context_.kernels, 1.0f, errors, g_.slice_columns, values);
      store_head_row(context_, tile * g_.tile_rows + i, values, range.started, range.last);
    }
  }

 private:
  // out (+)= gradient of `panels` logits tiles x their hidden states.
  void multiply(std::int64_t tile, std::int64_t token, std::int64_t panels, float* logits, const float* slices,
                std::int64_t token_rows, const HeadScratch& scratch, float* out, float* out_error) const {
    const std::int64_t rows = rows_of(tile);
    const std::int64_t groups = ceil_div(rows, g_.rows);
    const std::int64_t tile_row = tile * g_.tile_rows;
    const float* class_weights = tile_class_weights(context_, tile_row, rows, scratch.class_weights);
    bool started = token > 0;
    // Runs of panels that no filter drops: without one, all of them at once.
    std::int64_t run = 0;
    const auto add = [&](std::int64_t end) {
      if (end == run) return;
      context_.kernels.head_gradient(logits + run * g_.logits_tile, static_cast<std::size_t>(g_.logits_tile), end - run,
                                     slices + run * g_.panel * g_.panel, token_rows, groups, g_.slice_hidden, started,
                                     out, out_error);
      started = true;
    };
    const Problem& p = plan_.problem;
    std::int64_t* counted = p.filter == Filter::tile && !p.want_d_e ? context_.workspace.rows.kept : nullptr;
    if (counted != nullptr && token == 0) counted[tile] = 0;
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const bool kept = gradient_tile(context_, first_ + token + panel * g_.panel, first_ + count_, tile_row, rows,
                                      class_weights, scratch.label_row, logits + panel * g_.logits_tile);
      const std::int64_t live = std::min(g_.panel, count_ - token - panel * g_.panel);
      if (kept && counted != nullptr) counted[tile] += rows * live;
      if (kept) continue;
      add(panel);
      run = panel + 1;
    }
    add(panels);
    if (started) return;
    std::fill_n(out, out_tile(), 0.0f);
    std::fill_n(out_error, out_tile(), 0.0f);
  }

  const Context& context_;
  const Plan& plan_;
  const Geometry& g_;
  const std::int64_t first_;
  const std::int64_t count_;
};

}  // namespace

bool gradient_tile(const Context& context, std::int64_t first, std::int64_t end, std::int64_t tile_row,
                   std::int64_t rows, const float* class_weights, std::int64_t* label_row, float* logits) {
  const Problem& p = context.plan.problem;
  const RowTable& table = context.workspace.rows;
  const std::int64_t w = context.workspace.geometry.panel;
  label_rows(context, first, end, tile_row, label_row);
  const float* smooth = table.smooth == nullptr ? nullptr : table.smooth + first;
  context.kernels.logits_gradient(
      logits, rows, ceil_div(rows, context.workspace.geometry.rows), label_row, softcap_or_zero(p),
      {table.max + first, table.weight + first, table.label_grad + first, smooth}, class_weights);
  if (p.soft_targets > 0) {
    for (const PanelTarget& target : targets_in(context, first, tile_row, tile_row + rows)) {
      logits[(target.position - tile_row) * w + target.lane] -=
          table.target[first + target.lane] * target.probability * target.slope;
    }
  }
  if (p.filter != Filter::tile) return true;
  float largest[kMaxPanel];
  context.kernels.largest_magnitude(logits, rows, largest);
  for (std::int64_t lane = 0; lane < std::min(w, end - first); ++lane) {
    // Not below: NaN counts.
    if (!(largest[lane] < context.plan.epsilon * table.scale[first + lane])) return true;
  }
  return false;
}

void store_head_row(const Context& context, std::int64_t position, const float* values, bool started, bool last) {
  const std::int64_t id = id_at(context, position);
  if (context.workspace.d_c_sum == nullptr) return write_row(context, id, values, started);
  const float* sum = add_to_sum(context, position, values, started, last);
  if (last) write_row(context, id, sum, false);
}

void head_pass(const Context& context, const HeadRange& range) {
  const Plan& plan = context.plan;
  const Workspace& workspace = context.workspace;
  const Geometry& g = workspace.geometry;
  const HeadTask task(context, range.first, range.count);

  if (plan.mode == Mode::chunk) {
    const std::int64_t step = 8 * g.panel;
    context.executor.parallel_for(ceil_div(range.count, step), [&](std::int64_t index, int) {
      const std::int64_t at = index * step;
      pack_token_slices(context, range.first + at, std::min(step, range.count - at), at, plan.chunk_tokens,
                        workspace.chunk_slices);
    });
  }
  context.executor.parallel_for(ceil_div(g.tiles, plan.head_tiles), [&](std::int64_t index, int worker) {
    const HeadScratch scratch = workspace.head_scratch(worker);
    const std::int64_t tile = index * plan.head_tiles;
    const std::int64_t tile_end = std::min(tile + plan.head_tiles, g.tiles);
    if (plan.mode == Mode::chunk) {
      task.from_saved(tile, scratch);
    } else {
      task.from_recomputed(tile, tile_end, scratch);
    }
    for (std::int64_t t = tile; t < tile_end; ++t) {
      const std::int64_t at = (t - tile) * task.out_tile();
      task.store(t, scratch.out + at, scratch.out_error + at, range);
    }
  });
}

void run_exact(const Context& context, std::int64_t rows, bool started) {
  const Plan& plan = context.plan;
  const std::int64_t step = plan.mode == Mode::chunk ? plan.chunk_tokens : rows;
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    loss_pass(context, first, count);
    if (plan.problem.filter == Filter::tile && plan.problem.want_d_e) filtered_pass(context, rows);
    if (wants_head(plan.problem)) head_pass(context, {first, count, started || first > 0, first + count == rows});
  }
}

}  // namespace cutloss::cpu
