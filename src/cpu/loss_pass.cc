#include <algorithm>
#include <cmath>
#include <limits>

#include "src/cpu/element.h"
#include "src/cpu/passes.h"
#include "src/cpu/sparse.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

struct Block {
  std::int64_t first;  // table row
  std::int64_t count;
  std::int64_t panels;
};

PanelState panel_state(const LossState& state, std::int64_t lane) {
  return {state.max + lane, state.sum + lane, state.sum_error + lane};
}

class LossTask {
 public:
  LossTask(const Context& context, std::int64_t range_first)
      : context_(context), plan_(context.plan), g_(context.workspace.geometry), range_first_(range_first) {}

  // One block against one slice of the vocabulary.
  void stream(const Block& block, std::int64_t slice, const LossScratch& scratch, const LossState& state) const {
    pack_token_panels(context_, block.first, block.count, block.panels, scratch.tokens);
    reset(block, state);
    read_labels(block, scratch, state);
    for (std::int64_t tile = slice_begin(plan_, g_, slice); tile < slice_begin(plan_, g_, slice + 1); ++tile) {
      const std::int64_t first_row = tile * g_.tile_rows;
      const VocabTile at{tile, first_row, std::min(g_.tile_rows, plan_.problem.vocab - first_row), slice};
      pack_head_tile(context_, at.row, at.rows, scratch.head);
      if (plan_.mode == Mode::sparse) widen_tile(context_, at.row, at.rows, scratch);
      const float* class_weights = tile_class_weights(context_, at.row, at.rows, scratch.class_weights);
      for (std::int64_t panel = 0; panel < block.panels; ++panel) {
        meet(block, panel * g_.panel, at, class_weights, scratch, state);
      }
    }
  }

  // The block's rows from the states of its vocabulary slices, slot, slot + 1, ...: always joined in this order.
  void finish(const Block& block, std::int64_t slot, std::int64_t slices) const {
    const RowTable& table = context_.workspace.rows;
    for (std::int64_t i = 0; i < block.count; ++i) finish_row(block.first + i, i, slot, slices);
    if (table.max == nullptr) return;
    for (std::int64_t i = block.first + block.count; i % g_.panel != 0; ++i) leave_out(i);
  }

 private:
  // Lane `i` of the block once all slices have seen the vocabulary.
  struct Row {
    std::int64_t table_row;
    std::int64_t lane;
    std::int64_t slot;
    std::int64_t slices;
    double max;
    double label_slope;
    RowFactors factors;
    double weight;  // factors.softmax / sum of exp(z - max)
  };

  void reset(const Block& block, const LossState& state) const {
    const std::int64_t lanes = block.panels * g_.panel;
    std::fill_n(state.max, lanes, std::numeric_limits<float>::lowest());
    for (float* zero :
         {state.sum, state.sum_error, state.label_logit, state.label_slope, state.smooth_sum, state.smooth_error}) {
      if (zero != nullptr) std::fill_n(zero, lanes, 0.0f);
    }
    for (float* zero : {state.accumulator, state.smooth_accumulator}) {
      if (zero != nullptr) std::fill_n(zero, lanes * g_.padded_depth, 0.0f);
    }
    if (state.row_accumulator != nullptr) std::fill_n(state.row_accumulator, lanes * g_.row_stride, 0.0f);
    if (plan_.mode == Mode::sparse) reset_filter(context_, block.first, block.count, state);
    reset_metrics(context_, state.metrics, lanes);
  }

  // The logits of the labels, where they are wanted before their tiles come.
  void read_labels(const Block& block, const LossScratch& scratch, const LossState& state) const {
    float* const filter = plan_.mode == Mode::sparse ? state.filter.label_logit : nullptr;
    float* const logits = filter != nullptr ? filter : state.metrics.label_logit;
    if (logits == nullptr) return;
    for (std::int64_t panel = 0; panel < block.panels; ++panel) {
      const std::int64_t lane = panel * g_.panel;
      label_logits(context_, block.first + lane, block.first + block.count, scratch.tokens + lane * g_.depth, scratch,
                   logits + lane);
    }
    if (filter == nullptr || state.metrics.label_logit == nullptr) return;
    std::copy_n(filter, block.panels * g_.panel, state.metrics.label_logit);
  }

  float* saved_logits(const Block& block, std::int64_t lane, const VocabTile& tile) const {
    const std::int64_t chunk_panel = (block.first - range_first_ + lane) / g_.panel;
    return context_.workspace.saved_logits +
           (tile.index * (plan_.chunk_tokens / g_.panel) + chunk_panel) * g_.logits_tile;
  }

  // One tile against the panel of the block that begins at `lane`.
  void meet(const Block& block, std::int64_t lane, const VocabTile& tile, const float* class_weights,
            const LossScratch& scratch, const LossState& state) const {
    const Problem& p = plan_.problem;
    const Kernels& kernels = context_.kernels;
    const std::int64_t groups = ceil_div(tile.rows, g_.rows);
    const auto stride = static_cast<std::size_t>(g_.head_stride);
    const bool flat = plan_.mode == Mode::sparse && state.filter.flat[lane / g_.panel] != 0;
    if (flat && state.accumulator == nullptr) return;  // the exact mode has these rows
    const bool sparse = plan_.mode == Mode::sparse && !flat;
    float* z = plan_.mode == Mode::chunk ? saved_logits(block, lane, tile) : scratch.logits;
    kernels.logits(scratch.head, stride, groups, scratch.tokens + lane * g_.depth, g_.depth, z);
    if (p.softcap) {
      kernels.softcap(z, tile.rows, *p.softcap, scratch.z, scratch.slopes);
      z = scratch.z;
    }
    read_targets(block, lane, tile, z, scratch);
    lift_labels(block, lane, tile, z, scratch, state);
    kernels.softmax(z, tile.rows, groups, sparse ? nullptr : scratch.slopes, panel_state(state, lane), scratch.weights,
                    scratch.rescale);
    const std::int64_t live = std::min(g_.panel, block.count - lane);
    observe_tile(context_, state.metrics, lane, live, z, tile.rows, tile.row, panel_state(state, lane), scratch);
    const SparsePanel filtered{block.first + lane, lane, live, range_first_};
    if (flat) rescale_dropped(filtered, scratch, state);
    if (sparse) {
      filter_tile(context_, tile, filtered, scratch, state);
    } else if (streams_d_e(p)) {
      kernels.hidden_gradient(scratch.head, stride, groups, scratch.weights, g_.padded_depth, scratch.rescale,
                              state.accumulator + lane * g_.padded_depth);
    }
    if (state.smooth_sum == nullptr) return;
    kernels.smooth(z, scratch.slopes, tile.rows, groups, class_weights, scratch.weights, state.smooth_sum + lane,
                   state.smooth_error + lane);
    if (streams_d_e(p)) {
      std::fill_n(scratch.rescale, g_.panel, 1.0f);
      kernels.hidden_gradient(scratch.head, stride, groups, scratch.weights, g_.padded_depth, scratch.rescale,
                              state.smooth_accumulator + lane * g_.padded_depth);
    }
  }

  void read_targets(const Block& block, std::int64_t lane, const VocabTile& tile, const float* z,
                    const LossScratch& scratch) const {
    if (plan_.problem.soft_targets == 0) return;
    for (PanelTarget& target : targets_in(context_, block.first + lane, tile.row, tile.row + tile.rows)) {
      const std::int64_t at = (target.position - tile.row) * g_.panel + target.lane;
      target.logit = z[at];
      if (scratch.slopes != nullptr) target.slope = scratch.slopes[at];
    }
  }

  // The label's logit leaves the tile: the softmax runs over the others.
  void lift_labels(const Block& block, std::int64_t lane, const VocabTile& tile, float* z, const LossScratch& scratch,
                   const LossState& state) const {
    label_rows(context_, block.first + lane, block.first + block.count, tile.row, scratch.label_row);
    for (std::int64_t i = 0; i < g_.panel; ++i) {
      const std::int64_t row = scratch.label_row[i];
      if (row < 0 || row >= tile.rows) continue;
      const std::int64_t at = row * g_.panel + i;
      state.label_logit[lane + i] = z[at];
      state.label_slope[lane + i] = scratch.slopes == nullptr ? 1.0f : scratch.slopes[at];
      z[at] = -std::numeric_limits<float>::infinity();
    }
  }

  bool label_owned(std::int64_t table_row, std::int64_t slice) const {
    const std::int64_t position = context_.workspace.rows.position[table_row];
    return position >= 0 && slice_of(plan_, g_, position / g_.tile_rows) == slice;
  }

  void finish_row(std::int64_t table_row, std::int64_t lane, std::int64_t slot, std::int64_t slices) const {
    const auto slice = [&](std::int64_t s) { return context_.workspace.loss_state(slot + s); };
    double max = std::numeric_limits<float>::lowest();
    double label_logit = -std::numeric_limits<double>::infinity();
    Row row{table_row, lane, slot, slices, 0, 1, {}, 0};
    bool has_label = false;
    for (std::int64_t s = 0; s < slices; ++s) {
      const LossState state = slice(s);
      max = std::max<double>(max, state.max[lane]);
      if (!label_owned(table_row, s)) continue;
      has_label = true;
      label_logit = state.label_logit[lane];
      row.label_slope = state.label_slope[lane];
    }
    double sum = 0;
    double capped_sum = 0;  // of class weight x z, with softcap and smoothing
    for (std::int64_t s = 0; s < slices; ++s) {
      const LossState state = slice(s);
      sum += (static_cast<double>(state.sum[lane]) + state.sum_error[lane]) * std::exp(state.max[lane] - max);
      if (state.smooth_sum == nullptr) continue;
      capped_sum += static_cast<double>(state.smooth_sum[lane]) + state.smooth_error[lane];
    }
    row.max = max;
    RowSoftmax softmax = combine(max, sum, label_logit);
    // The softmax of a row without a label is known all the same. Nothing else of a bad one is; one of padding has
    // none.
    const double none = context_.workspace.rows.label[table_row] == kNoTarget ? 0 : NAN;
    if (!has_label) softmax = {none, softmax.lse, softmax.weight, none, none};
    FilteredRow filtered{};
    if (plan_.mode == Mode::sparse) {
      filtered = join_filter(context_, lane, slot, slices, max, softmax.weight);
      if (filtered.flat && wants_head(plan_.problem)) {
        certify(context_, table_row, filtered, 0);
        return leave_out(table_row);
      }
    }
    row.factors = row_factors(context_, table_row, softmax, target_logits(table_row, capped_sum, label_logit));
    row.weight = row.factors.softmax * softmax.weight;
    if (plan_.mode == Mode::sparse && !certify(context_, table_row, filtered, row.factors.softmax)) {
      return leave_out(table_row);
    }
    write_metrics(context_, {table_row, lane, slot, slices, max, sum, label_logit, has_label}, softmax);
    write_row(row, softmax);
  }

  // Adds nothing to dC: a lane that is no row, or a row that will be redone.
  void leave_out(std::int64_t table_row) const {
    const RowTable& table = context_.workspace.rows;
    for (float* column : {table.weight, table.label_grad, table.smooth, table.target}) {
      if (column != nullptr) column[table_row] = 0.0f;
    }
    // No finite logit is above it: exp(z - max) stays finite, and times the weight 0.
    if (table.max != nullptr) table.max[table_row] = std::numeric_limits<float>::max();
  }

  // See row_factors().
  double target_logits(std::int64_t table_row, double capped_sum, double label_logit) const {
    const Problem& p = plan_.problem;
    const RowTable& table = context_.workspace.rows;
    double sum = 0;
    if (p.soft_targets > 0) {
      const std::int64_t first = table_row / g_.panel * g_.panel;
      for (const PanelTarget& target : panel_targets(context_, first)) {
        if (first + target.lane != table_row || target.probability == 0) continue;
        sum += static_cast<double>(target.probability) * target.logit;
      }
    } else if (p.label_smoothing > 0 && p.softcap) {
      const double weight = label_class_weight(context_, table_row);
      sum = capped_sum + weight * label_logit;
    } else if (p.label_smoothing > 0) {
      const Strides stride = e_strides(p);
      WithElement(p.e_dtype, context_.inputs.e, [&](const auto* e) {
        const auto* at = e + table.row[table_row] * stride.axis0;
        for (std::int64_t column = 0; column < p.hidden; ++column) {
          sum += context_.workspace.vector[column] * ToFloat(at[column * stride.axis1]);
        }
      });
      sum = p.logit_scale * sum + context_.objective.bias_sum;
    }
    return sum;
  }

  void write_row(const Row& row, const RowSoftmax& softmax) const {
    const Problem& p = plan_.problem;
    const RowTable& table = context_.workspace.rows;
    const Outputs& out = context_.outputs;
    const std::int64_t at = row.table_row;
    const std::int64_t to = table.row[at];
    table.loss[to] = row.factors.loss;
    if (out.nll != nullptr) out.nll[to] = static_cast<float>(softmax.nll);
    if (out.lse != nullptr) out.lse[to] = static_cast<float>(softmax.lse);

    const double label_grad = row.factors.label * row.label_slope;
    if (table.max != nullptr) {
      // Mode sparse takes smoothing off all rows at once.
      const bool smoothed = table.smooth != nullptr && plan_.mode != Mode::sparse;
      const double weight = label_class_weight(context_, at);
      const double label_smooth = smoothed ? row.factors.smooth * row.label_slope * weight : 0;
      table.max[at] = static_cast<float>(row.max);
      table.weight[at] = static_cast<float>(row.weight);
      table.label_grad[at] = static_cast<float>(label_grad - label_smooth);
      if (table.smooth != nullptr) table.smooth[at] = static_cast<float>(row.factors.smooth);
      if (table.target != nullptr) table.target[at] = static_cast<float>(row.factors.target);
    }
    if (table.scale != nullptr) table.scale[at] = static_cast<float>(std::abs(upstream(context_, to)));
    if (!streams_d_e(p)) return;
    WithElement(d_e_dtype(p), out.d_e, [&](auto* d_e) {
      for (std::int64_t column = 0; column < p.hidden; column += kColumns) {
        double values[kColumns];
        const std::int64_t count = std::min(kColumns, p.hidden - column);
        form_d_e(row, label_grad, column, count, values);
        for (std::int64_t i = 0; i < count; ++i) {
          auto& cell = d_e[to * p.hidden + column + i];
          const double value = p.logit_scale * values[i];
          FromFloat(static_cast<float>(p.accumulate_d_e ? ToFloat(cell) + value : value), cell);
        }
      }
    });
  }

  // weight * sum_{v != label} exp(z_v - max) slope_v c_v + label_grad * c_label, less the smooth and soft parts, of
  // columns [first, first + count).
  void form_d_e(const Row& row, double label_grad, std::int64_t first, std::int64_t count, double* values) const {
    const Problem& p = plan_.problem;
    const bool sparse = plan_.mode == Mode::sparse;
    const std::int64_t panel_at = row.lane / g_.panel * g_.panel * g_.padded_depth + row.lane % g_.panel;
    const std::int64_t at = panel_at + first * g_.panel;
    std::fill_n(values, count, 0.0);
    for (std::int64_t s = 0; s < row.slices; ++s) {
      const LossState state = context_.workspace.loss_state(row.slot + s);
      const auto add = [&](double factor, const float* sums, std::int64_t step) {
        for (std::int64_t i = 0; i < count; ++i) values[i] += factor * sums[i * step];
      };
      if (sparse) {
        const double factor = row.weight * std::exp(state.filter.scale_max[row.lane] - row.max);
        add(factor, state.row_accumulator + row.lane * g_.row_stride + first, 1);
      }
      if (!sparse || state.filter.flat[row.lane / g_.panel] != 0) {
        add(row.weight * std::exp(state.max[row.lane] - row.max), state.accumulator + at, g_.panel);
      }
      if (state.smooth_accumulator != nullptr) add(-row.factors.smooth, state.smooth_accumulator + at, g_.panel);
    }
    if (p.label_smoothing > 0 && !p.softcap) {
      for (std::int64_t i = 0; i < count; ++i) values[i] -= row.factors.smooth * context_.workspace.vector[first + i];
    }
    const std::int64_t label = context_.workspace.rows.label[row.table_row];
    if (label != kNoTarget) add_table_row(label, label_grad, first, count, values);
    if (p.soft_targets == 0) return;
    const std::int64_t panel_first = row.table_row / g_.panel * g_.panel;
    for (const PanelTarget& target : panel_targets(context_, panel_first)) {
      if (panel_first + target.lane != row.table_row || target.probability == 0) continue;
      add_table_row(target.id, -row.factors.target * target.probability * target.slope, first, count, values);
    }
  }

  // values += factor * the table's row `id`, columns [first, first + count). A bad label's factor is NaN.
  void add_table_row(std::int64_t id, double factor, std::int64_t first, std::int64_t count, double* values) const {
    const Problem& p = plan_.problem;
    const HeadStrides stride = c_strides(p);
    WithElement(p.c_dtype, context_.inputs.c, [&](const auto* c) {
      const auto* at = c + std::max<std::int64_t>(id, 0) * stride.v + first * stride.d;
      for (std::int64_t i = 0; i < count; ++i) values[i] += factor * ToFloat(at[i * stride.d]);
    });
  }

  static constexpr std::int64_t kColumns = 64;  // of dE at a time, in float64 on the stack

  const Context& context_;
  const Plan& plan_;
  const Geometry& g_;
  const std::int64_t range_first_;
};

}  // namespace

void loss_pass(const Context& context, std::int64_t first, std::int64_t count) {
  const Plan& plan = context.plan;
  const Workspace& workspace = context.workspace;
  const Geometry& g = workspace.geometry;
  const std::int64_t slices = plan.vocab_slices;

  // As many blocks for every worker: ignored rows may leave fewer than planned, and a group of rows need not divide. A
  // row's bits do not depend on the block it is in, so this choice is free; only slices have their number of states
  // fixed by the plan.
  std::int64_t blocks = ceil_div(count, plan.token_block);
  if (slices == 1) {
    blocks = std::max(blocks, std::min(round_up(blocks, plan.threads), ceil_div(count, 8 * g.panel)));
  }
  const std::int64_t size = ceil_div(ceil_div(count, blocks), g.panel) * g.panel;
  blocks = ceil_div(count, size);

  const auto block_at = [=](std::int64_t index) {
    const std::int64_t begin = index * size;
    const std::int64_t n = std::min(size, count - begin);
    return Block{first + begin, n, ceil_div(n, g.panel)};
  };
  const LossTask task(context, first);
  context.executor.parallel_for(blocks * slices, [&](std::int64_t index, int worker) {
    const std::int64_t slot = slices == 1 ? worker : index;
    const std::int64_t slice = index % slices;
    const Block block = block_at(index / slices);
    task.stream(block, slice, workspace.loss_scratch(worker), workspace.loss_state(slot));
    if (slices == 1) task.finish(block, slot, 1);
  });
  if (slices > 1) {
    context.executor.parallel_for(
        blocks, [&](std::int64_t index, int) { task.finish(block_at(index), index * slices, slices); });
  }
}

}  // namespace cutloss::cpu
