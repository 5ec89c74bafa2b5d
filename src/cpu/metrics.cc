// Metrics: what a tile adds to a row's entropy, arg-max, rank and top k, and what a row's slices come to.
#include <algorithm>
#include <cmath>
#include <limits>

#include "src/cpu/passes.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kNone = -1;

bool any(const Metrics& m) { return m.argmax || m.rank || m.top_k > 0; }

// Whether a logit comes before another: the larger, of equals the one with the lower id.
bool before(float a, std::int64_t a_id, float b, std::int64_t b_id) {
  if (b_id == kNone) return true;
  return a > b || (a == b && a_id < b_id);
}

// Into a list of k that is kept sorted.
void insert(float* top, std::int64_t* top_id, std::int64_t k, float value, std::int64_t id) {
  if (!before(value, id, top[k - 1], top_id[k - 1])) return;
  std::int64_t at = k - 1;
  for (; at > 0 && before(value, id, top[at - 1], top_id[at - 1]); --at) {
    top[at] = top[at - 1];
    top_id[at] = top_id[at - 1];
  }
  top[at] = value;
  top_id[at] = id;
}

// The lowest id of a tile's largest logit in one lane. Rows lie by rising id unless there is an order.
std::int64_t peak_id(const Context& context, const float* z, std::int64_t rows, std::int64_t tile_row, float max,
                     std::int64_t row) {
  std::int64_t id = id_at(context, tile_row + row);
  if (context.inputs.vocab_order == nullptr) return id;
  const std::int64_t w = context.workspace.geometry.panel;
  for (std::int64_t v = row + 1; v < rows; ++v) {
    if (z[v * w] == max) id = std::min(id, id_at(context, tile_row + v));
  }
  return id;
}

}  // namespace

void reset_metrics(const Context& context, const MetricState& state, std::int64_t lanes) {
  const Metrics& m = context.plan.problem.metrics;
  if (m.entropy) {
    for (float* zero : {state.below_sum, state.below_error, state.mass}) std::fill_n(zero, lanes, 0.0f);
    std::fill_n(state.peak, lanes, std::numeric_limits<float>::lowest());
  }
  if (any(m)) std::fill_n(state.label_logit, lanes, 0.0f);
  if (m.argmax) {
    std::fill_n(state.best, lanes, kLowest);
    std::fill_n(state.best_id, lanes, kNone);
  }
  if (m.rank) std::fill_n(state.rank, lanes, 0);
  if (m.top_k > 0) {
    std::fill_n(state.top, lanes * m.top_k, kLowest);
    std::fill_n(state.top_id, lanes * m.top_k, kNone);
  }
}

void label_logits(const Context& context, std::int64_t first, std::int64_t end, const float* panel_tokens,
                  const LossScratch& scratch, float* label_logit) {
  const Problem& p = context.plan.problem;
  const Geometry& g = context.workspace.geometry;
  std::int64_t ids[kMaxPanel];
  for (std::int64_t lane = 0; lane < g.panel; ++lane) {
    ids[lane] = first + lane < end ? std::max<std::int64_t>(context.workspace.rows.label[first + lane], 0) : 0;
  }
  for (std::int64_t done = 0; done < g.panel; done += g.tile_rows) {
    const std::int64_t rows = std::min(g.tile_rows, g.panel - done);
    pack_head_rows(context, ids + done, rows, scratch.head);
    context.kernels.logits(scratch.head, static_cast<std::size_t>(g.head_stride), ceil_div(rows, g.rows), panel_tokens,
                           g.depth, scratch.weights);
    const float* z = scratch.weights;
    if (p.softcap) {
      context.kernels.softcap(scratch.weights, rows, *p.softcap, scratch.z, scratch.slopes);
      z = scratch.z;
    }
    for (std::int64_t i = 0; i < rows; ++i) label_logit[done + i] = z[i * g.panel + done + i];
  }
}

void observe_tile(const Context& context, const MetricState& state, std::int64_t lane, std::int64_t live,
                  const float* z, std::int64_t rows, std::int64_t tile_row, const PanelState& seen,
                  const LossScratch& scratch) {
  const Metrics& m = context.plan.problem.metrics;
  const std::int64_t w = context.workspace.geometry.panel;
  if (m.entropy) {
    context.kernels.below_peak(
        z, rows, seen, scratch.rescale,
        {state.below_sum + lane, state.below_error + lane, state.mass + lane, state.peak + lane});
  }
  if (!any(m)) return;
  const TilePeak peak{scratch.peak, scratch.peak + w, scratch.peak + 2 * w};
  context.kernels.tile_peak(z, rows, state.label_logit + lane, peak);
  for (std::int64_t i = 0; i < live; ++i) {
    const std::int64_t at = lane + i;
    if (m.rank) state.rank[at] += static_cast<std::int64_t>(peak.above[i]);
    if (peak.max[i] == kLowest) continue;
    if (m.argmax && peak.max[i] >= state.best[at]) {
      const std::int64_t id =
          peak_id(context, z + i, rows, tile_row, peak.max[i], static_cast<std::int64_t>(peak.row[i]));
      if (before(peak.max[i], id, state.best[at], state.best_id[at])) {
        state.best[at] = peak.max[i];
        state.best_id[at] = id;
      }
    }
    if (m.top_k == 0) continue;
    float* top = state.top + at * m.top_k;
    std::int64_t* top_id = state.top_id + at * m.top_k;
    // Tiles with nothing above the k-th are most of them.
    if (peak.max[i] < top[m.top_k - 1]) continue;
    for (std::int64_t v = 0; v < rows; ++v) {
      const float value = z[v * w + i];
      if (value >= top[m.top_k - 1] && value > kLowest)
        insert(top, top_id, m.top_k, value, id_at(context, tile_row + v));
    }
  }
}

void write_metrics(const Context& context, const RowMetrics& row, const RowSoftmax& softmax) {
  const Problem& p = context.plan.problem;
  const Metrics& m = p.metrics;
  const Outputs& out = context.outputs;
  const std::int64_t to = context.workspace.rows.row[row.table_row];
  const std::int64_t label = context.workspace.rows.label[row.table_row];
  const auto slice = [&](std::int64_t s) { return context.workspace.loss_state(row.slot + s); };

  if (m.entropy) {
    // sum over v of p_v (lse - z_v) in terms of 0 or more, the label's apart: no digit is lost where the row is
    // confident or all logits are large.
    double below = 0;  // sum over all but the label of exp(z - row.max) (row.max - z)
    for (std::int64_t s = 0; s < row.slices; ++s) {
      const LossState state = slice(s);
      const double factor = std::exp(state.max[row.lane] - row.max);
      if (factor == 0) continue;
      below -= factor * (static_cast<double>(state.metrics.below_sum[row.lane]) + state.metrics.below_error[row.lane]);
      below += factor * (row.max - state.max[row.lane]) *
               (static_cast<double>(state.sum[row.lane]) + state.sum_error[row.lane]);
    }
    const double others = softmax.weight == 0 ? 0 : softmax.weight * (below - row.sum * std::log(softmax.weight));
    const double own = row.has_label && softmax.label > 0 ? softmax.label * softmax.nll : 0;
    out.entropy[to] = static_cast<float>(others + own);
  }
  const auto label_logit = static_cast<float>(row.label_logit);
  const bool ordered = !std::isnan(softmax.lse);  // NaN is neither above nor below
  if (m.rank) {
    std::int64_t rank = 0;
    for (std::int64_t s = 0; s < row.slices; ++s) rank += slice(s).metrics.rank[row.lane];
    out.rank[to] = row.has_label && ordered ? rank : kNone;
  }
  if (m.argmax) {
    const bool in_play = row.has_label && label_logit > kLowest;  // where every id is masked there is none
    float best = in_play ? label_logit : kLowest;
    std::int64_t id = in_play ? label : kNone;
    for (std::int64_t s = 0; s < row.slices; ++s) {
      const MetricState state = slice(s).metrics;
      if (state.best_id[row.lane] != kNone && before(state.best[row.lane], state.best_id[row.lane], best, id)) {
        best = state.best[row.lane];
        id = state.best_id[row.lane];
      }
    }
    out.argmax[to] = ordered ? id : kNone;
    if (out.correct != nullptr) out.correct[to] = row.has_label && ordered && id == label ? 1 : 0;
  }
  if (m.top_k > 0) {
    // The first slice's list takes in the others.
    float* top = slice(0).metrics.top + row.lane * m.top_k;
    std::int64_t* top_id = slice(0).metrics.top_id + row.lane * m.top_k;
    for (std::int64_t s = 1; s < row.slices; ++s) {
      const MetricState other = slice(s).metrics;
      for (std::int64_t i = row.lane * m.top_k; i < (row.lane + 1) * m.top_k; ++i) {
        if (other.top_id[i] != kNone) insert(top, top_id, m.top_k, other.top[i], other.top_id[i]);
      }
    }
    if (row.has_label && label_logit > kLowest) insert(top, top_id, m.top_k, label_logit, label);
    for (std::int64_t k = 0; k < m.top_k; ++k) {
      out.top_k_ids[to * m.top_k + k] = ordered ? top_id[k] : kNone;
      const bool empty = ordered && top_id[k] == kNone;
      out.top_k_logprobs[to * m.top_k + k] = empty ? kLowest : static_cast<float>(top[k] - softmax.lse);
    }
  }
}

}  // namespace cutloss::cpu
