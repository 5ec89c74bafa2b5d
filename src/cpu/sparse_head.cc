// dC of filtered rows: tasks own tiles, gather the entries that panels kept of them, and write each row of dC once.
#include <algorithm>
#include <cmath>

#include "src/cpu/row_sums.h"
#include "src/cpu/sparse.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

class ScatterTask {
 public:
  ScatterTask(const Context& context, const SparseGroup& group)
      : context_(context), p_(context.plan.problem), g_(context.workspace.geometry), group_(group) {}

  void run(std::int64_t tile, const HeadScratch& scratch) const {
    const std::int64_t tile_row = tile * g_.tile_rows;
    const std::int64_t rows = std::min(g_.tile_rows, p_.vocab - tile_row);
    bool touched[kMaxTileRows] = {};
    std::fill_n(scratch.out, rows * g_.slice_hidden, 0.0f);
    const RowSums sums(
        context_.kernels, scratch.terms, rows,
        {context_.workspace.token_rows, g_.slice_hidden, scratch.out, g_.slice_hidden, g_.slice_columns});
    const auto add = [&](float factor, std::int64_t row, std::int64_t v) {
      sums.add(v, factor, row);
      touched[v] = true;
    };
    for (std::int64_t row = 0; row < group_.count; row += g_.panel) {
      const std::int64_t live = std::min(g_.panel, group_.count - row);
      const Redo* redo = context_.workspace.rows.redo + group_.first + row;
      if (std::all_of(redo, redo + live, [](Redo r) { return r != Redo::no; })) continue;  // flat: no entries
      add_entries(tile, row, add);
      add_labels(tile_row, rows, row, live, add);
      add_targets(tile_row, rows, row, add);
    }
    sums.flush();
    if (group_.final) add_shared(tile, tile_row, rows, scratch);
    for (std::int64_t v = 0; v < rows; ++v) {
      if (group_.started && !touched[v] && !group_.final) continue;
      store_head_row(context_, tile_row + v, scratch.out + v * g_.slice_hidden, group_.started, group_.last);
    }
  }

 private:
  // Each calls add(factor, row of the group, row of the tile).
  template <typename Add>
  void add_entries(std::int64_t tile, std::int64_t row, const Add& add) const {
    const Workspace& w = context_.workspace;
    const std::int64_t panel = row / g_.panel;
    const std::int64_t slice = slice_of(context_.plan, g_, tile);
    const std::int32_t* ends = w.entry_ends + panel * g_.tiles;
    const std::int64_t at = (panel * context_.plan.vocab_slices + slice) * context_.plan.panel_entries;
    const std::int32_t begin = tile == slice_begin(context_.plan, g_, slice) ? 0 : ends[tile - 1];
    for (std::int64_t i = at + begin; i < at + ends[tile]; ++i) {
      const std::int64_t lane = w.entries.place[i] % kMaxPanel;
      const std::int64_t token = group_.first + row + lane;
      const float weight = w.rows.weight[token];
      if (weight == 0) continue;  // redone, or nothing comes down to it
      add(weight * std::exp(w.entries.value[i] - w.rows.max[token]), row + lane, w.entries.place[i] / kMaxPanel);
    }
  }

  template <typename Add>
  void add_labels(std::int64_t tile_row, std::int64_t rows, std::int64_t row, std::int64_t live, const Add& add) const {
    const RowTable& table = context_.workspace.rows;
    for (std::int64_t i = row; i < row + live; ++i) {
      const std::int64_t v = table.position[group_.first + i] - tile_row;
      if (v < 0 || v >= rows || table.redo[group_.first + i] != Redo::no) continue;
      add(table.label_grad[group_.first + i], i, v);
    }
  }

  template <typename Add>
  void add_targets(std::int64_t tile_row, std::int64_t rows, std::int64_t row, const Add& add) const {
    if (p_.soft_targets == 0) return;
    const RowTable& table = context_.workspace.rows;
    for (const PanelTarget& target : targets_in(context_, group_.first + row, tile_row, tile_row + rows)) {
      const std::int64_t at = group_.first + row + target.lane;
      if (table.redo[at] != Redo::no) continue;
      add(-table.target[at] * target.probability * target.slope, row + target.lane, target.position - tile_row);
    }
  }

  // What every row of the tile gets: its share of the tail, and smoothing.
  void add_shared(std::int64_t tile, std::int64_t tile_row, std::int64_t rows, const HeadScratch& scratch) const {
    const Workspace& w = context_.workspace;
    const float* tail = w.tail_rows == nullptr ? nullptr : w.tail_rows + tile / g_.tail_tiles * g_.slice_hidden;
    for (std::int64_t v = 0; v < rows; ++v) {
      float* out = scratch.out + v * g_.slice_hidden;
      if (tail != nullptr) add_row(context_.kernels, 1.0f, tail, g_.slice_columns, out);
      if (w.smooth_row == nullptr) continue;
      const double weight = class_weight(context_, id_at(context_, tile_row + v));
      for (std::int64_t i = 0; i < g_.slice_columns; ++i) {
        out[i] -= static_cast<float>(weight * w.smooth_row[i]);
      }
    }
  }

  const Context& context_;
  const Problem& p_;
  const Geometry& g_;
  const SparseGroup& group_;
};

// Token rows of the group, [count][slice_hidden], and smoothing's sum over them.
void gather_tokens(const Context& context, const SparseGroup& group) {
  const Workspace& w = context.workspace;
  const Geometry& g = w.geometry;
  const Problem& p = context.plan.problem;
  context.executor.parallel_for(ceil_div(group.count, 64), [&](std::int64_t task, int) {
    for (std::int64_t i = task * 64; i < std::min(group.count, task * 64 + 64); ++i) {
      float* to = w.token_rows + i * g.slice_hidden;
      if (p.want_d_c) float_hidden_row(context, w.rows.row[group.first + i], to);
      if (p.want_d_bias) to[g.slice_columns - 1] = 1.0f;
    }
  });
  if (w.smooth_row == nullptr) return;
  if (!group.started) std::fill_n(w.smooth_row, g.slice_columns, 0.0);
  for (std::int64_t i = 0; i < group.count; ++i) {
    const double smooth = w.rows.smooth[group.first + i];
    const float* token = w.token_rows + i * g.slice_hidden;
    for (std::int64_t column = 0; column < g.slice_columns; ++column) w.smooth_row[column] += smooth * token[column];
  }
}

// tail_rows[block] += sum over the group's rows of the mass they left in the block, for each of its vocabulary rows.
void spread_tails(const Context& context, const SparseGroup& group) {
  const Workspace& w = context.workspace;
  const Geometry& g = w.geometry;
  if (w.tail_rows == nullptr) return;
  const std::int64_t stored = g.tail_blocks + context.plan.vocab_slices;
  context.executor.parallel_for(g.tail_blocks, [&](std::int64_t block, int) {
    float* to = w.tail_rows + block * g.slice_hidden;
    if (!group.started) std::fill_n(to, g.slice_hidden, 0.0f);
    const std::int64_t first_tile = block * g.tail_tiles;
    const std::int64_t end_tile = std::min(first_tile + g.tail_tiles, g.tiles);
    const std::int64_t first_slice = slice_of(context.plan, g, first_tile);
    const std::int64_t last_slice = slice_of(context.plan, g, end_tile - 1);
    const std::int64_t rows = std::min(end_tile * g.tile_rows, context.plan.problem.vocab) - first_tile * g.tile_rows;
    for (std::int64_t i = 0; i < group.count; ++i) {
      const std::int64_t at = group.first + i;
      if (w.rows.weight[at] == 0) continue;
      for (std::int64_t slice = first_slice; slice <= last_slice; ++slice) {
        const TailMass tail = w.tail_masses[i * stored + block + slice];
        if (tail.mass == 0) continue;
        const float factor = w.rows.weight[at] * tail.mass * std::exp(tail.max - w.rows.max[at]);
        add_row(context.kernels, factor / static_cast<float>(rows), w.token_rows + i * g.slice_hidden, g.slice_columns,
                to);
      }
    }
  });
}

}  // namespace

void summarize_head(const Context& context) {
  const Problem& p = context.plan.problem;
  const Workspace& w = context.workspace;
  const Geometry& g = w.geometry;
  context.executor.parallel_for(g.tail_blocks, [&](std::int64_t block, int worker) {
    const std::int64_t begin = block * g.tail_tiles * g.tile_rows;
    const std::int64_t end = std::min(begin + g.tail_tiles * g.tile_rows, p.vocab);
    float* center = w.centers + block * g.row_stride;
    float* scratch = w.loss_scratch(worker).table;
    std::fill_n(center, g.row_stride, 0.0f);
    const auto row = [&](std::int64_t position) { return float_table_row(context, id_at(context, position), scratch); };
    if (p.filter == Filter::certified) {
      const auto share = 1.0f / static_cast<float>(end - begin);
      for (std::int64_t i = begin; i < end; ++i) add_row(context.kernels, share, row(i), p.hidden, center);
    }
    double largest = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      largest = std::max<double>(largest, context.kernels.squared_distance(row(i), center, p.hidden));
    }
    // The sum of D squares in f32 is off by at most D 2^-24.
    w.radius[block] = std::sqrt(largest * (1 + static_cast<double>(p.hidden + 8) * 0x1p-24));
  });
  w.radius[g.tail_blocks] = *std::max_element(w.radius, w.radius + g.tail_blocks);
}

void scatter_pass(const Context& context, const SparseGroup& group) {
  gather_tokens(context, group);
  spread_tails(context, group);
  const ScatterTask task(context, group);
  context.executor.parallel_for(context.workspace.geometry.tiles, [&](std::int64_t tile, int worker) {
    task.run(tile, context.workspace.head_scratch(worker));
  });
}

}  // namespace cutloss::cpu
