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

LossState carve_state(const Plan& plan, const Geometry& g, Carver& carver) {
  LossState state{};
  state.lanes = carver.take<float>(5 * plan.token_block);
  if (plan.problem.want_d_e) state.accumulator = carver.take<float>(plan.token_block * g.padded_hidden);
  return state;
}

LossScratch carve_loss(const Plan& plan, const Geometry& g, Carver& carver) {
  LossScratch scratch{};
  scratch.tokens = carver.take<float>(plan.token_block * plan.problem.hidden);
  scratch.head = carver.take<float>(g.head_tile);
  if (plan.mode != Mode::chunk) scratch.logits = carver.take<float>(g.logits_tile);
  scratch.weights = carver.take<float>(g.logits_tile);
  if (plan.problem.softcap) scratch.slopes = carver.take<float>(g.logits_tile);
  scratch.rescale = carver.take<float>(g.panel);
  scratch.label_row = carver.take<std::int64_t>(g.panel);
  return scratch;
}

HeadScratch carve_head(const Plan& plan, const Geometry& g, Carver& carver) {
  HeadScratch scratch{};
  scratch.out = carver.take<float>(plan.head_tiles * g.tile_rows * g.slice_hidden);
  scratch.out_error = carver.take<float>(plan.head_tiles * g.tile_rows * g.slice_hidden);
  scratch.label_row = carver.take<std::int64_t>(g.panel);
  if (plan.mode == Mode::recompute) {
    scratch.heads = carver.take<float>(plan.head_tiles * g.head_tile);
    scratch.tokens = carver.take<float>(plan.head_tokens * plan.problem.hidden);
    scratch.slices = carver.take<float>(plan.head_tokens * g.slice_hidden);
    scratch.logits = carver.take<float>(plan.head_tokens / g.panel * g.logits_tile);
  }
  return scratch;
}

}  // namespace

Geometry geometry_of(const Plan& plan) {
  const cpu::Kernels& kernels = *cpu::find_kernels(plan.target);
  const Problem& p = plan.problem;
  Geometry g{};
  g.panel = kernels.panel;
  g.rows = kernels.rows;
  g.padded_hidden = round_up(p.hidden, g.rows);
  g.slice_hidden = round_up(p.hidden, g.panel);
  g.tile_groups = plan.vocab_tile / g.rows;
  g.tile_rows = plan.vocab_tile;
  g.tiles = ceil_div(p.vocab, g.tile_rows);
  g.head_stride = static_cast<std::int64_t>(cpu::head_stride(g.padded_hidden, kernels.rows));
  g.head_tile = g.tile_groups * g.head_stride;
  g.logits_tile = g.tile_rows * g.panel;
  const std::int64_t at_once = plan.mode == Mode::chunk ? plan.chunk_tokens : round_up(p.tokens, g.panel);
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
  w.rows.row = carver.take<std::int64_t>(p.tokens);
  w.rows.label = carver.take<std::int64_t>(p.tokens);
  w.rows.nll = carver.take<double>(p.tokens);
  if (p.want_d_c) {
    const std::int64_t lanes = round_up(p.tokens, g.panel);
    w.rows.max = carver.take<float>(lanes);
    w.rows.weight = carver.take<float>(lanes);
    w.rows.label_grad = carver.take<float>(lanes);
  }
  if (plan.mode == Mode::chunk) {
    w.saved_logits = carver.take<float>(g.tiles * (plan.chunk_tokens / g.panel) * g.logits_tile);
    w.chunk_slices = carver.take<float>(plan.chunk_tokens * g.slice_hidden);
    if (plan.chunk_tokens < p.tokens && d_c_dtype(p) != DType::f32) w.d_c_sum = carver.take<float>(p.vocab * p.hidden);
  }

  // A worker runs either pass, never both at once: they share its scratch.
  Carver state(nullptr);
  carve_state(plan, g, state);
  w.state_bytes = state.used();
  Carver loss(nullptr);
  carve_loss(plan, g, loss);
  Carver head(nullptr);
  if (p.want_d_c) carve_head(plan, g, head);
  w.worker_bytes = std::max(loss.used(), head.used());
  const std::int64_t states = plan.vocab_slices == 1 ? plan.threads : g.loss_blocks * plan.vocab_slices;
  w.states = carver.take<std::byte>(static_cast<std::int64_t>(w.state_bytes) * states);
  w.workers = carver.take<std::byte>(static_cast<std::int64_t>(w.worker_bytes) * plan.threads);
  w.bytes = carver.used() + kAlign;
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
