#include <algorithm>
#include <cmath>
#include <limits>

#include "src/cpu/element.h"
#include "src/cpu/float_env.h"
#include "src/cpu/passes.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

struct Block {
  std::int64_t first;  // table row
  std::int64_t count;
  std::int64_t panels;
};

PanelState panel_state(const LossState& state, std::int64_t token_block, std::int64_t lane) {
  return {state.lanes + lane, state.lanes + token_block + lane, state.lanes + 2 * token_block + lane,
          state.lanes + 3 * token_block + lane, state.lanes + 4 * token_block + lane};
}

// What one row's running softmax (over everything but the label) and its label come to.
//
// Neither lse - z_label nor p_label - 1 is formed by subtraction: where the row is confident (1 - p_label near 1e-7)
// either would keep no correct digit in f32. With s = sum exp(z - max):
//   nll = log1p(s exp(max - z_label)),   p_label - 1 = -s / (s + exp(z_label - max))
struct RowSoftmax {
  double nll;
  double lse;
  double weight;         // 1 / sum over all entries of exp(z - max)
  double label_minus_1;  // p_label - 1
};

RowSoftmax combine(double max, double sum, double label_logit) {
  RowSoftmax row;
  if (label_logit >= max) {
    const double odds = sum * std::exp(max - label_logit);
    row.nll = std::log1p(odds);
    row.lse = label_logit + row.nll;
    row.weight = std::exp(max - label_logit) / (1 + odds);
    row.label_minus_1 = -odds / (1 + odds);
    // An infinite logit must not look like certainty.
    if (std::isinf(label_logit)) row = {NAN, NAN, NAN, NAN};
  } else {
    const double all = sum + std::exp(label_logit - max);
    row.nll = (max - label_logit) + std::log(all);
    row.lse = max + std::log(all);
    row.weight = 1 / all;
    row.label_minus_1 = -sum / all;
  }
  return row;
}

class LossTask {
 public:
  LossTask(const Context& context, std::int64_t range_first)
      : context_(context), plan_(context.plan), g_(context.workspace.geometry), range_first_(range_first) {}

  // One block against tiles [tile, tile_end) of the vocabulary.
  void stream(const Block& block, std::int64_t tile, std::int64_t tile_end, const LossScratch& scratch,
              const LossState& state) const {
    const Problem& p = plan_.problem;
    const Kernels& kernels = context_.kernels;
    const HeadStrides stride = c_strides(p);
    pack_token_panels(context_, block.first, block.count, block.panels, scratch.tokens);
    reset(block, state);
    for (; tile < tile_end; ++tile) {
      const std::int64_t tile_row = tile * g_.tile_rows;
      const std::int64_t rows = std::min(g_.tile_rows, p.vocab - tile_row);
      const std::int64_t groups = ceil_div(rows, g_.rows);
      kernels.pack_head(context_.inputs.c, p.c_dtype, stride.v, stride.d, tile_row, rows, p.hidden, scratch.head);
      for (std::int64_t panel = 0; panel < block.panels; ++panel) {
        const std::int64_t lane = panel * g_.panel;
        float* logits = scratch.logits;
        if (plan_.mode == Mode::chunk) {
          const std::int64_t chunk_panel = (block.first - range_first_) / g_.panel + panel;
          logits =
              context_.workspace.saved_logits + (tile * (plan_.chunk_tokens / g_.panel) + chunk_panel) * g_.logits_tile;
        }
        kernels.logits(scratch.head, static_cast<std::size_t>(g_.head_stride), groups, scratch.tokens + lane * p.hidden,
                       p.hidden, logits);
        label_rows(context_, block.first + lane, block.first + block.count, tile_row, scratch.label_row);
        kernels.softmax(logits, rows, groups, scratch.label_row, softcap_or_zero(p),
                        panel_state(state, plan_.token_block, lane), scratch.weights, scratch.slopes, scratch.rescale);
        if (p.want_d_e) {
          kernels.hidden_gradient(scratch.head, static_cast<std::size_t>(g_.head_stride), groups, scratch.weights,
                                  g_.padded_hidden, scratch.rescale, state.accumulator + lane * g_.padded_hidden);
        }
      }
    }
  }

  // The block's rows from the states of its vocabulary slices, slot, slot + 1, ...: always joined in this order.
  void finish(const Block& block, std::int64_t slot, std::int64_t slices) const {
    const Problem& p = plan_.problem;
    const RowTable& table = context_.workspace.rows;
    for (std::int64_t i = 0; i < block.count; ++i) {
      double max = std::numeric_limits<float>::lowest();
      double label_logit = -std::numeric_limits<double>::infinity();
      double label_slope = 1;
      for (std::int64_t s = 0; s < slices; ++s) {
        const PanelState lane = panel_state(context_.workspace.loss_state(slot + s), plan_.token_block, i);
        max = std::max<double>(max, *lane.max);
        if (label_owned(block.first + i, s, slices)) {
          label_logit = *lane.label_logit;
          label_slope = *lane.label_slope;
        }
      }
      double sum = 0;
      for (std::int64_t s = 0; s < slices; ++s) {
        const PanelState lane = panel_state(context_.workspace.loss_state(slot + s), plan_.token_block, i);
        sum += (static_cast<double>(*lane.sum) + *lane.sum_error) * std::exp(*lane.max - max);
      }
      RowSoftmax softmax = combine(max, sum, label_logit);
      if (table.label[block.first + i] == kBadLabel) softmax = {NAN, softmax.lse, NAN, NAN};
      write_row(block, i, max, softmax, label_slope, slot, slices);
    }
    if (p.want_d_c) {
      for (std::int64_t i = block.first + block.count; i % g_.panel != 0; ++i) {
        table.max[i] = table.weight[i] = table.label_grad[i] = 0.0f;
      }
    }
  }

 private:
  void reset(const Block& block, const LossState& state) const {
    const std::int64_t lanes = block.panels * g_.panel;
    std::fill_n(state.lanes, 5 * plan_.token_block, 0.0f);
    std::fill_n(state.lanes, plan_.token_block, std::numeric_limits<float>::lowest());
    if (plan_.problem.want_d_e) std::fill_n(state.accumulator, lanes * g_.padded_hidden, 0.0f);
  }

  bool label_owned(std::int64_t table_row, std::int64_t slice, std::int64_t slices) const {
    const std::int64_t label = context_.workspace.rows.label[table_row];
    if (label == kBadLabel) return false;
    const std::int64_t tile = label / g_.tile_rows;
    return tile >= slice * g_.tiles / slices && tile < (slice + 1) * g_.tiles / slices;
  }

  void write_row(const Block& block, std::int64_t i, double max, const RowSoftmax& softmax, double label_slope,
                 std::int64_t slot, std::int64_t slices) const {
    const Problem& p = plan_.problem;
    const RowTable& table = context_.workspace.rows;
    const Outputs& out = context_.outputs;
    const std::int64_t at = block.first + i;
    const std::int64_t row = table.row[at];
    table.nll[at] = softmax.nll;
    if (out.nll != nullptr) out.nll[row] = static_cast<float>(softmax.nll);
    if (out.lse != nullptr) out.lse[row] = static_cast<float>(softmax.lse);

    const double g = upstream(context_, row);
    const double label_grad = g * softmax.label_minus_1 * label_slope;
    if (p.want_d_c) {
      table.max[at] = static_cast<float>(max);
      table.weight[at] = static_cast<float>(g * softmax.weight);
      table.label_grad[at] = static_cast<float>(label_grad);
    }
    if (!p.want_d_e) return;
    if (d_e_dtype(p) == DType::bf16) {
      write_d_e(static_cast<Bf16*>(out.d_e) + row * p.hidden, at, i, max, g * softmax.weight, label_grad, slot, slices);
    } else {
      write_d_e(static_cast<float*>(out.d_e) + row * p.hidden, at, i, max, g * softmax.weight, label_grad, slot,
                slices);
    }
  }

  // dE = weight * sum_{v != label} exp(z_v - max) slope_v c_v + label_grad * c_label
  template <typename T>
  void write_d_e(T* to, std::int64_t table_row, std::int64_t i, double max, double weight, double label_grad,
                 std::int64_t slot, std::int64_t slices) const {
    const Problem& p = plan_.problem;
    const std::int64_t label = std::max<std::int64_t>(context_.workspace.rows.label[table_row], 0);
    const HeadStrides stride = c_strides(p);
    const auto c = [&](std::int64_t column) -> double {
      const std::int64_t at = label * stride.v + column * stride.d;
      if (p.c_dtype == DType::bf16) return ToFloat(static_cast<const Bf16*>(context_.inputs.c)[at]);
      return static_cast<const float*>(context_.inputs.c)[at];
    };
    const std::int64_t lane = i / g_.panel * g_.panel * g_.padded_hidden + i % g_.panel;
    if (slices == 1) {
      const float* accumulator = context_.workspace.loss_state(slot).accumulator + lane;
      for (std::int64_t column = 0; column < p.hidden; ++column) {
        FromFloat(static_cast<float>(weight * accumulator[column * g_.panel] + label_grad * c(column)), to[column]);
      }
      return;
    }
    for (std::int64_t column = 0; column < p.hidden; ++column) {
      double sum = 0;
      for (std::int64_t s = 0; s < slices; ++s) {
        const LossState state = context_.workspace.loss_state(slot + s);
        const double factor = std::exp(*panel_state(state, plan_.token_block, i).max - max);
        sum += factor * state.accumulator[lane + column * g_.panel];
      }
      FromFloat(static_cast<float>(weight * sum + label_grad * c(column)), to[column]);
    }
  }

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

  // Ignored rows may leave fewer than planned: spread what there is over the workers. A row's bits do not depend on
  // the block it is in, so this choice is free; only slices have their number of states fixed by the plan.
  std::int64_t blocks = ceil_div(count, plan.token_block);
  if (slices == 1) blocks = std::max(blocks, std::min<std::int64_t>(plan.threads, ceil_div(count, 8 * g.panel)));
  const std::int64_t size = ceil_div(ceil_div(count, blocks), g.panel) * g.panel;
  blocks = ceil_div(count, size);

  const auto block_at = [=](std::int64_t index) {
    const std::int64_t begin = index * size;
    const std::int64_t n = std::min(size, count - begin);
    return Block{first + begin, n, ceil_div(n, g.panel)};
  };
  const LossTask task(context, first);
  context.executor.parallel_for(blocks * slices, [&](std::int64_t index, int worker) {
    const KernelFloatEnv float_env;
    const std::int64_t slot = slices == 1 ? worker : index;
    const std::int64_t slice = index % slices;
    const Block block = block_at(index / slices);
    task.stream(block, slice * g.tiles / slices, (slice + 1) * g.tiles / slices, workspace.loss_scratch(worker),
                workspace.loss_state(slot));
    if (slices == 1) task.finish(block, slot, 1);
  });
  if (slices > 1) {
    context.executor.parallel_for(blocks, [&](std::int64_t index, int) {
      const KernelFloatEnv float_env;
      task.finish(block_at(index), index * slices, slices);
    });
  }
}

}  // namespace cutloss::cpu
