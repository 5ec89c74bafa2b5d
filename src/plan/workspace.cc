#include "src/plan/workspace.h"

#include <algorithm>

#include "src/cpu/kernels.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss {
namespace {

constexpr std::uint64_t kAlign = 64;

// Hands out aligned pieces of a region; without a region it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(std::int64_t count) {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::uint64_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return at;
  }

  std::uint64_t used() const { return used_; }

 private:
  std::byte* base_;
  std::uint64_t used_ = 0;
};

MetricState carve_metrics(const Plan& plan, Carver& carver) {
  const Metrics& m = plan.problem.metrics;
  const std::int64_t n = plan.token_block;
  MetricState state{};
  if (m.entropy) {
    for (float** lanes : {&state.below_sum, &state.below_error, &state.mass, &state.peak})
      *lanes = carver.take<float>(n);
  }
  if (m.argmax || m.rank || m.top_k > 0) state.label_logit = carver.take<float>(n);
  if (m.argmax) {
    state.best = carver.take<float>(n);
    state.best_id = carver.take<std::int64_t>(n);
  }
  if (m.rank) state.rank = carver.take<std::int64_t>(n);
  if (m.top_k > 0) {
    state.top = carver.take<float>(n * m.top_k);
    state.top_id = carver.take<std::int64_t>(n * m.top_k);
  }
  return state;
}

FilterState carve_filter(const Plan& plan, const Geometry& g, Carver& carver) {
  const std::int64_t n = plan.token_block;
  FilterState state{};
  for (float** lanes : {&state.scale_max, &state.factor, &state.below, &state.below_error, &state.tail,
                        &state.label_logit, &state.label_mass}) {
    *lanes = carver.take<float>(n);
  }
  state.kept = carver.take<std::int64_t>(n);
  state.keys = carver.take<std::uint32_t>(2 * n);
  state.flat = carver.take<std::int64_t>(n / g.panel);
  return state;
}

LossState carve_state(const Plan& plan, const Geometry& g, Carver& carver) {
  const Problem& p = plan.problem;
  LossState state{};
  for (float** lanes : {&state.max, &state.sum, &state.sum_error, &state.label_logit, &state.label_slope}) {
    *lanes = carver.take<float>(plan.token_block);
  }
  if (p.want_d_e) {
    const bool sparse = plan.mode == Mode::sparse;
    if (sparse) state.row_accumulator = carver.take<float>(plan.token_block * g.row_stride);
    if (!sparse || !wants_head(p)) state.accumulator = carver.take<float>(plan.token_block * g.padded_depth);
  }
  if (plan.mode == Mode::sparse) state.filter = carve_filter(plan, g, carver);
  if (p.softcap && p.label_smoothing > 0) {
    state.smooth_sum = carver.take<float>(plan.token_block);
    state.smooth_error = carver.take<float>(plan.token_block);
    if (p.want_d_e) state.smooth_accumulator = carver.take<float>(plan.token_block * g.padded_depth);
  }
  state.metrics = carve_metrics(plan, carver);
  return state;
}

TermLists carve_terms(std::int64_t sums, Carver& carver) {
  TermLists lists{};
  lists.factor = carver.take<float>(sums * kTerms);
  lists.row = carver.take<std::int64_t>(sums * kTerms);
  lists.count = carver.take<std::int32_t>(sums);
  return lists;
}

LossScratch carve_loss(const Plan& plan, const Geometry& g, Carver& carver) {
  LossScratch scratch{};
  scratch.tokens = carver.take<float>(plan.token_block * g.depth);
  scratch.head = carver.take<float>(g.head_tile);
  if (plan.mode != Mode::chunk) scratch.logits = carver.take<float>(g.logits_tile);
  scratch.weights = carver.take<float>(g.logits_tile);
  if (plan.problem.softcap) {
    scratch.z = carver.take<float>(g.logits_tile);
    scratch.slopes = carver.take<float>(g.logits_tile);
  }
  scratch.rescale = carver.take<float>(g.panel);
  scratch.peak = carver.take<float>(3 * g.panel);
  if (plan.problem.class_weights) scratch.class_weights = carver.take<float>(g.tile_rows);
  scratch.label_row = carver.take<std::int64_t>(g.panel);
  if (plan.mode != Mode::sparse) return scratch;
  scratch.masks = carver.take<std::uint32_t>(g.tile_rows);
  scratch.parts = carver.take<float>(3 * g.panel);
  scratch.terms = carve_terms(g.panel, carver);
  if (!rows_are_floats(plan.problem)) scratch.table = carver.take<float>(g.tile_rows * g.row_stride);
  return scratch;
}

HeadScratch carve_head(const Plan& plan, const Geometry& g, Carver& carver) {
  HeadScratch scratch{};
  scratch.out = carver.take<float>(plan.head_tiles * g.tile_rows * g.slice_hidden);
  if (plan.mode == Mode::sparse) {
    scratch.terms = carve_terms(g.tile_rows, carver);
    return scratch;
  }
  scratch.out_error = carver.take<float>(plan.head_tiles * g.tile_rows * g.slice_hidden);
  if (plan.problem.class_weights) scratch.class_weights = carver.take<float>(g.tile_rows);
  scratch.label_row = carver.take<std::int64_t>(g.panel);
  if (plan.mode == Mode::recompute) {
    scratch.heads = carver.take<float>(plan.head_tiles * g.head_tile);
    scratch.tokens = carver.take<float>(plan.head_tokens * g.depth);
    scratch.slices = carver.take<float>(plan.head_tokens * g.slice_hidden);
    scratch.logits = carver.take<float>(plan.head_tokens / g.panel * g.logits_tile);
  }
  return scratch;
}

RowTable carve_rows(const Problem& p, const Geometry& g, Carver& carver) {
  RowTable rows{};
  const std::int64_t lanes = round_up(p.tokens, g.panel);
  rows.row = carver.take<std::int64_t>(p.tokens);
  rows.label = carver.take<std::int64_t>(p.tokens);
  rows.position = p.vocab_order ? carver.take<std::int64_t>(p.tokens) : rows.label;
  rows.loss = carver.take<double>(p.tokens);
  if (p.soft_targets > 0) {
    rows.label_weight = carver.take<double>(p.tokens);
    rows.target_sum = carver.take<double>(p.tokens);
  }
  if (wants_head(p) || p.filter == Filter::tile) {
    rows.max = carver.take<float>(lanes);
    rows.weight = carver.take<float>(lanes);
    rows.label_grad = carver.take<float>(lanes);
    if (p.label_smoothing > 0) rows.smooth = carver.take<float>(lanes);
    if (p.soft_targets > 0) rows.target = carver.take<float>(lanes);
  }
  if (p.filter == Filter::certified || p.filter == Filter::unbiased) {
    rows.redo = carver.take<Redo>(p.tokens);
    rows.below = carver.take<double>(p.tokens);
    rows.bound = carver.take<double>(p.tokens);
    rows.kept = carver.take<std::int64_t>(p.tokens);
  }
  if (p.filter == Filter::tile) {
    rows.scale = carver.take<float>(lanes);
    rows.kept = carver.take<std::int64_t>(std::max(p.tokens, g.tiles));
  }
  return rows;
}

void carve_sparse(const Plan& plan, const Geometry& g, Carver& carver, Workspace& w) {
  const Problem& p = plan.problem;
  w.centers = carver.take<float>(g.tail_blocks * g.row_stride);
  w.radius = carver.take<double>(g.tail_blocks + 1);
  if (!wants_head(p)) return;
  const std::int64_t panels = plan.group_tokens / g.panel;
  w.entries.value = carver.take<float>(panels * plan.vocab_slices * plan.panel_entries);
  w.entries.place = carver.take<std::uint16_t>(panels * plan.vocab_slices * plan.panel_entries);
  w.entry_ends = carver.take<std::int32_t>(panels * g.tiles);
  w.token_rows = carver.take<float>(plan.group_tokens * g.slice_hidden);
  if (p.label_smoothing > 0) w.smooth_row = carver.take<double>(g.slice_columns);
  if (p.filter != Filter::certified) return;
  w.tail_masses = carver.take<TailMass>(plan.group_tokens * (g.tail_blocks + plan.vocab_slices));
  w.tail_rows = carver.take<float>(g.tail_blocks * g.slice_hidden);
}

}  // namespace

Geometry geometry_of(const Plan& plan) {
  const cpu::Kernels& kernels = *cpu::find_kernels(plan.target);
  const Problem& p = plan.problem;
  Geometry g{};
  g.panel = kernels.panel;
  g.rows = kernels.rows;
  g.depth = p.hidden + (p.bias_dtype ? 1 : 0);
  g.padded_depth = round_up(g.depth, g.rows);
  g.slice_columns = (p.want_d_c ? p.hidden : 0) + (p.want_d_bias ? 1 : 0);
  g.slice_hidden = round_up(g.slice_columns, g.panel);
  g.tile_groups = plan.vocab_tile / g.rows;
  g.tile_rows = plan.vocab_tile;
  g.tiles = ceil_div(p.vocab, g.tile_rows);
  g.head_stride = static_cast<std::int64_t>(cpu::head_stride(g.padded_depth, kernels.rows));
  g.head_tile = g.tile_groups * g.head_stride;
  g.logits_tile = g.tile_rows * g.panel;
  g.row_stride = round_up(p.hidden, 16);
  // About 1024 rows: at 256 and fewer the tail costs more than 1 % of a product, at 4096 it corrects half as well.
  g.tail_tiles = std::max<std::int64_t>(1, 1024 / g.tile_rows);
  g.tail_blocks = ceil_div(g.tiles, g.tail_tiles);
  const std::int64_t at_once = plan.mode == Mode::chunk    ? plan.chunk_tokens
                               : plan.mode == Mode::sparse ? plan.group_tokens
                                                           : round_up(p.tokens, g.panel);
  g.loss_blocks = std::max<std::int64_t>(1, ceil_div(at_once, plan.token_block));
  return g;
}

Workspace map_workspace(const Plan& plan, std::byte* base) {
  const Problem& p = plan.problem;
  Workspace w;
  w.plan = &plan;
  w.geometry = geometry_of(plan);
  const Geometry& g = w.geometry;

  const std::uint64_t misaligned = reinterpret_cast<std::uintptr_t>(base) % kAlign;
  Carver carver(base == nullptr ? nullptr : base + (misaligned ? kAlign - misaligned : 0));
  w.rows = carve_rows(p, g, carver);
  if (p.vocab_order) w.order_position = carver.take<std::int64_t>(p.vocab);
  if (p.soft_targets > 0) {
    w.targets = carver.take<PanelTarget>(round_up(p.tokens, g.panel) * p.soft_targets);
  }
  if ((p.label_smoothing > 0 || p.metrics.mean_logits) && !p.softcap) {
    w.vector = carver.take<double>(p.hidden + 1);
    w.vector_parts = carver.take<double>(kVectorParts * (p.hidden + 1));
  }
  // Up to here a plan and its exact one agree: rows and sums pass from one to the other.
  if (plan.head_sum) w.d_c_sum = carver.take<float>(p.vocab * g.slice_columns);
  if (plan.head_sum && p.compensated) w.d_c_error = carver.take<float>(p.vocab * g.slice_columns);
  if (plan.mode == Mode::sparse) carve_sparse(plan, g, carver, w);
  if (plan.mode == Mode::chunk) {
    w.saved_logits = carver.take<float>(g.tiles * (plan.chunk_tokens / g.panel) * g.logits_tile);
    w.chunk_slices = carver.take<float>(plan.chunk_tokens * g.slice_hidden);
  }

  // A worker runs either pass, never both at once: they share its scratch.
  Carver state(nullptr);
  carve_state(plan, g, state);
  w.state_bytes = state.used();
  Carver loss(nullptr);
  carve_loss(plan, g, loss);
  Carver head(nullptr);
  if (wants_head(p)) carve_head(plan, g, head);
  w.worker_bytes = std::max(loss.used(), head.used());
  const std::int64_t states = plan.vocab_slices == 1 ? plan.threads : g.loss_blocks * plan.vocab_slices;
  w.states = carver.take<std::byte>(static_cast<std::int64_t>(w.state_bytes) * states);
  w.workers = carver.take<std::byte>(static_cast<std::int64_t>(w.worker_bytes) * plan.threads);
  w.bytes = carver.used() + kAlign;
  if (plan.exact) w.bytes = std::max(w.bytes, map_workspace(*plan.exact, nullptr).bytes);
  return w;
}

LossState Workspace::loss_state(std::int64_t slot) const {
  Carver carver(states + static_cast<std::uint64_t>(slot) * state_bytes);
  return carve_state(*plan, geometry, carver);
}

LossScratch Workspace::loss_scratch(int worker) const {
  Carver carver(workers + static_cast<std::uint64_t>(worker) * worker_bytes);
  return carve_loss(*plan, geometry, carver);
}

HeadScratch Workspace::head_scratch(int worker) const {
  Carver carver(workers + static_cast<std::uint64_t>(worker) * worker_bytes);
  return carve_head(*plan, geometry, carver);
}

}  // namespace cutloss
