// One tile of one panel under a filter: entries are chosen, used for dE at once and kept for dC; what is below epsilon
// is added up, per row for the certificate and per tail block for the correction.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "src/cpu/row_sums.h"
#include "src/cpu/sparse.h"
#include "src/cpu/two_sum.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

constexpr float kUnset = std::numeric_limits<float>::lowest();
// The rows of the accumulator are scaled down when their masses, relative to them, may pass exp(16).
constexpr float kRescaleAt = 16.0f;
// A label further above the running maximum counts as this far: exp() stays finite.
constexpr float kLargestLabel = 80.0f;

// The finalizer of splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class PanelFilter {
 public:
  PanelFilter(const Context& context, const VocabTile& tile, const SparsePanel& panel, const LossScratch& scratch,
              const LossState& state)
      : context_(context),
        p_(context.plan.problem),
        g_(context.workspace.geometry),
        tile_(tile),
        panel_(panel),
        scratch_(scratch),
        state_(state),
        filter_(state.filter) {}

  void run() const {
    for (std::int64_t i = 0; i < panel_.live; ++i) weigh_label(i);
    context_.kernels.select(
        scratch_.weights, tile_.rows,
        {scratch_.slopes, state_.sum + panel_.lane, state_.sum_error + panel_.lane, filter_.label_mass + panel_.lane,
         filter_.keys + 2 * panel_.lane, tile_.row, context_.plan.epsilon, p_.filter == Filter::unbiased,
         scratch_.parts, scratch_.parts + g_.panel, scratch_.parts + 2 * g_.panel},
        scratch_.masks);
    for (std::int64_t i = 0; i < panel_.live; ++i) update_lane(i);
    const SparseEntries entries = panel_entries();
    std::int64_t stored = stored_so_far();
    count_kept();
    const bool flat = keeps_too_much();
    filter_.flat[panel_.lane / g_.panel] = flat ? 1 : 0;
    if (flat && wants_head(p_)) return;
    use_entries(entries, stored);
    if (context_.workspace.entry_ends != nullptr) *entry_end(tile_.index) = static_cast<std::int32_t>(stored);
    if (p_.filter == Filter::certified && (flat || ends_tail())) flush_tail();
  }

 private:
  // The label is in the sum at the end, so an entry below epsilon of it is so of the sum. Without it a row would keep
  // most of the first tiles.
  void weigh_label(std::int64_t i) const {
    const std::int64_t at = panel_.lane + i;
    if (scratch_.rescale[i] == 1.0f) return;
    filter_.label_mass[at] = std::exp(std::min(filter_.label_logit[at] - state_.max[at], kLargestLabel));
  }

  void update_lane(std::int64_t i) const {
    const std::int64_t at = panel_.lane + i;
    const float rescale = scratch_.rescale[i];
    filter_.below[at] *= rescale;
    filter_.below_error[at] = filter_.below_error[at] * rescale + AddTwoSum(filter_.below[at], scratch_.parts[i]);
    filter_.tail[at] = filter_.tail[at] * rescale + scratch_.parts[g_.panel + i];
    if (rescale == 1.0f && filter_.scale_max[at] != kUnset) return;
    const float max = state_.max[at];
    if (max - filter_.scale_max[at] > kRescaleAt) {
      if (p_.want_d_e && filter_.scale_max[at] != kUnset) {
        context_.kernels.scale_row(std::exp(filter_.scale_max[at] - max), p_.hidden, accumulator(i));
      }
      filter_.scale_max[at] = max;
    }
    filter_.factor[at] = std::exp(max - filter_.scale_max[at]);
  }

  float* accumulator(std::int64_t i) const { return state_.row_accumulator + (panel_.lane + i) * g_.row_stride; }

  std::int64_t group_panel() const { return (panel_.first - panel_.group_first) / g_.panel; }

  SparseEntries panel_entries() const {
    const SparseEntries all = context_.workspace.entries;
    if (all.value == nullptr) return {};
    const std::int64_t at = group_panel() * context_.plan.vocab_slices + tile_.slice;
    return {all.value + at * context_.plan.panel_entries, all.place + at * context_.plan.panel_entries};
  }

  std::int32_t* entry_end(std::int64_t tile) const {
    return context_.workspace.entry_ends + group_panel() * g_.tiles + tile;
  }

  std::int64_t stored_so_far() const {
    if (context_.workspace.entry_ends == nullptr || tile_.index == slice_first()) return 0;
    return *entry_end(tile_.index - 1);
  }

  void count_kept() const {
    for (std::int64_t i = 0; i < panel_.live; ++i) {
      filter_.kept[panel_.lane + i] += static_cast<std::int64_t>(scratch_.parts[2 * g_.panel + i]);
    }
  }

  // Whether the panel, this tile's entries counted, is to be filtered no further. With a trainable head it is then left
  // to the exact mode; else the next tiles are added to dE by the exact mode's product, and nothing is lost.
  bool keeps_too_much() const {
    const std::int64_t capacity = context_.plan.panel_entries;
    const std::int64_t* const kept = filter_.kept + panel_.lane;
    const std::int64_t total = std::accumulate(kept, kept + panel_.live, std::int64_t{0});
    // Until the running sums have settled more is kept than later on: 1/64 of the vocabulary is free, then twice the
    // even share. On a Gemma 3 270M head with English text 1/120 is too little for one panel of 128 at 2^-20.
    const std::int64_t tiles = slice_end() - slice_first();
    const std::int64_t done = tile_.index - slice_first() + 1;
    const std::int64_t free = g_.panel * tiles * g_.tile_rows / 64;
    const std::int64_t share = wants_head(p_) ? 2 * capacity : capacity;
    return total > std::min(capacity, free + share * done / tiles);
  }

  // Adds the kept entries to dE and to `entries`.
  void use_entries(const SparseEntries& entries, std::int64_t& stored) const {
    const std::uint32_t live = panel_.live >= 32 ? ~std::uint32_t{0} : (std::uint32_t{1} << panel_.live) - 1;
    const RowSums d_e = hidden_sums();
    for (std::int64_t v = 0; v < tile_.rows; ++v) {
      std::uint32_t bits = scratch_.masks[v] & live;
      if (bits == 0) continue;  // most rows
      const std::int64_t row = scratch_.table != nullptr ? v : id_at(context_, tile_.row + v);
      for (; bits != 0; bits &= bits - 1) {
        const int i = std::countr_zero(bits);
        const std::int64_t at = panel_.lane + i;
        const float slope = scratch_.slopes == nullptr ? 1.0f : scratch_.slopes[v * g_.panel + i];
        const float mass = scratch_.weights[v * g_.panel + i] * slope;
        if (p_.want_d_e) d_e.add(i, mass * filter_.factor[at], row);
        if (entries.value != nullptr) {
          entries.value[stored] = state_.max[at] + std::log(mass);
          entries.place[stored++] = static_cast<std::uint16_t>(v * kMaxPanel + i);
        }
      }
    }
    d_e.flush();
  }

  // Sums of table rows, one for each lane.
  RowSums hidden_sums() const {
    const float* rows = scratch_.table;
    std::int64_t stride = g_.row_stride;
    if (rows == nullptr) {
      rows = static_cast<const float*>(context_.inputs.c);
      stride = c_strides(p_).v;
    }
    return {context_.kernels,
            scratch_.terms,
            g_.panel,
            {rows, stride, p_.want_d_e ? accumulator(0) : nullptr, g_.row_stride, p_.hidden}};
  }

  std::int64_t slice_first() const { return slice_begin(context_.plan, g_, tile_.slice); }
  std::int64_t slice_end() const { return slice_begin(context_.plan, g_, tile_.slice + 1); }

  bool ends_tail() const { return tile_.index + 1 == slice_end() || (tile_.index + 1) % g_.tail_tiles == 0; }

  // What the rows left out of the tail block that ends here, taken for so much of its mean row.
  void flush_tail() const {
    const std::int64_t block = tile_.index / g_.tail_tiles;
    const float* center = context_.workspace.centers + block * g_.row_stride;
    for (std::int64_t i = 0; i < panel_.live; ++i) {
      const std::int64_t at = panel_.lane + i;
      const float mass = filter_.tail[at];
      filter_.tail[at] = 0;
      if (context_.workspace.tail_masses != nullptr) {
        const std::int64_t row = panel_.first + i - panel_.group_first;
        const std::int64_t blocks = g_.tail_blocks + context_.plan.vocab_slices;
        context_.workspace.tail_masses[row * blocks + block + tile_.slice] = {mass, state_.max[at]};
      }
      if (p_.want_d_e && mass != 0) {
        add_row(context_.kernels, mass * filter_.factor[at], center, p_.hidden, accumulator(i));
      }
    }
  }

  const Context& context_;
  const Problem& p_;
  const Geometry& g_;
  const VocabTile& tile_;
  const SparsePanel& panel_;
  const LossScratch& scratch_;
  const LossState& state_;
  const FilterState& filter_;
};

}  // namespace

void reset_filter(const Context& context, std::int64_t first, std::int64_t count, const LossState& state) {
  const Geometry& g = context.workspace.geometry;
  const FilterState& filter = state.filter;
  const std::int64_t panels = ceil_div(count, g.panel);
  const std::int64_t lanes = panels * g.panel;
  std::fill_n(filter.scale_max, lanes, kUnset);
  std::fill_n(filter.factor, lanes, 1.0f);
  for (float* zero : {filter.below, filter.below_error, filter.tail, filter.label_mass}) {
    std::fill_n(zero, lanes, 0.0f);
  }
  std::fill_n(filter.kept, lanes, 0);
  std::fill_n(filter.flat, panels, 0);
  std::fill_n(filter.keys, 2 * lanes, 0u);
  if (context.plan.problem.filter != Filter::unbiased) return;
  const std::uint64_t seed = mix(context.inputs.seed);
  for (std::int64_t lane = 0; lane < count; ++lane) {
    // Keyed by the caller's row: neither blocks nor ignored rows change a row's numbers.
    const std::uint64_t key = mix(seed ^ mix(static_cast<std::uint64_t>(context.workspace.rows.row[first + lane])));
    std::uint32_t* keys = filter.keys + lane / g.panel * 2 * g.panel + lane % g.panel;
    keys[0] = static_cast<std::uint32_t>(key);
    keys[g.panel] = static_cast<std::uint32_t>(key >> 32);
  }
}

void widen_tile(const Context& context, std::int64_t tile_row, std::int64_t rows, const LossScratch& scratch) {
  if (scratch.table == nullptr || !context.plan.problem.want_d_e) return;
  for (std::int64_t v = 0; v < rows; ++v) {
    float_table_row(context, id_at(context, tile_row + v), scratch.table + v * context.workspace.geometry.row_stride);
  }
}

void filter_tile(const Context& context, const VocabTile& tile, const SparsePanel& panel, const LossScratch& scratch,
                 const LossState& state) {
  PanelFilter(context, tile, panel, scratch, state).run();
}

void rescale_dropped(const SparsePanel& panel, const LossScratch& scratch, const LossState& state) {
  for (std::int64_t i = 0; i < panel.live; ++i) {
    state.filter.below[panel.lane + i] *= scratch.rescale[i];
    state.filter.below_error[panel.lane + i] *= scratch.rescale[i];
  }
}

FilteredRow join_filter(const Context& context, std::int64_t lane, std::int64_t slot, std::int64_t slices, double max,
                        double weight) {
  FilteredRow row{false, 0, 1};  // the label
  for (std::int64_t s = 0; s < slices; ++s) {
    const LossState state = context.workspace.loss_state(slot + s);
    const FilterState& filter = state.filter;
    row.flat = row.flat || filter.flat[lane / context.workspace.geometry.panel] != 0;
    row.below +=
        (static_cast<double>(filter.below[lane]) + filter.below_error[lane]) * std::exp(state.max[lane] - max) * weight;
    row.kept += filter.kept[lane];
  }
  // Masses are exp of f32 logits: 1 % covers logits that are off by 0.005, and their sums.
  row.below = std::min(1.0, row.below * 1.01);
  return row;
}

bool certify(const Context& context, std::int64_t table_row, const FilteredRow& row, double softmax_factor) {
  const Problem& p = context.plan.problem;
  const Workspace& w = context.workspace;
  const bool unbiased = p.filter == Filter::unbiased;
  const double share = unbiased ? std::sqrt(static_cast<double>(context.plan.epsilon) * row.below) : row.below;
  w.rows.below[table_row] = row.below;
  w.rows.kept[table_row] = row.kept;
  w.rows.bound[table_row] = std::abs(p.logit_scale * softmax_factor) * share * w.radius[w.geometry.tail_blocks];
  // A factor that is no number goes into every entry, also those that would be dropped.
  const bool exact =
      (row.flat && wants_head(p)) || !std::isfinite(softmax_factor) || (p.tolerance && share > *p.tolerance);
  w.rows.redo[table_row] = exact ? Redo::exactly : row.flat ? Redo::finished : Redo::no;
  return !exact;
}

}  // namespace cutloss::cpu
