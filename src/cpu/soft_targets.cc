// Soft targets: the likeliest id of a row is its label, lifted out like any label; the others are entries that the
// passes meet tile by tile.
#include <algorithm>

#include "src/cpu/passes.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

constexpr std::int64_t kNowhere = std::int64_t{1} << 62;  // the position of an empty entry: behind every tile

bool earlier(const PanelTarget& a, const PanelTarget& b) {
  return a.position != b.position ? a.position < b.position : a.lane < b.lane;
}

void gather_row(const Context& context, std::int64_t at, std::int32_t lane, PanelTarget* entries) {
  const Problem& p = context.plan.problem;
  const RowTable& table = context.workspace.rows;
  double label_weight = 0;
  double sum = 0;
  for (std::int64_t k = 0; k < p.soft_targets; ++k) {
    const SoftTarget target = soft_target(p, context.inputs, table.row[at], k);
    sum += target.probability;
    entries[k] = {kNowhere, 0, lane, 0.0f, 0.0f, 1.0f};
    if (target.probability == 0 || target.id == kBadLabel) continue;
    if (target.id == table.label[at]) {
      label_weight += target.probability;
      continue;
    }
    const std::int64_t* inverse = context.workspace.order_position;
    entries[k].position = inverse == nullptr ? target.id : inverse[target.id];
    entries[k].id = target.id;
    entries[k].probability = static_cast<float>(target.probability);
  }
  table.label_weight[at] = label_weight;
  table.target_sum[at] = sum;
}

}  // namespace

std::span<PanelTarget> panel_targets(const Context& context, std::int64_t first_row) {
  const std::int64_t per_panel = context.workspace.geometry.panel * context.plan.problem.soft_targets;
  const std::int64_t panel = first_row / context.workspace.geometry.panel;
  return {context.workspace.targets + panel * per_panel, static_cast<std::size_t>(per_panel)};
}

void gather_targets(const Context& context, std::int64_t rows) {
  const std::int64_t lanes = context.workspace.geometry.panel;
  const std::int64_t k = context.plan.problem.soft_targets;
  for (std::int64_t first = 0; first < rows; first += lanes) {
    const std::span<PanelTarget> entries = panel_targets(context, first);
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      PanelTarget* row = entries.data() + lane * k;
      if (first + lane < rows) {
        gather_row(context, first + lane, static_cast<std::int32_t>(lane), row);
      } else {
        std::fill_n(row, k, PanelTarget{kNowhere, 0, static_cast<std::int32_t>(lane), 0.0f, 0.0f, 1.0f});
      }
    }
    std::sort(entries.begin(), entries.end(), earlier);
  }
}

std::span<PanelTarget> targets_in(const Context& context, std::int64_t first_row, std::int64_t begin,
                                  std::int64_t end) {
  const std::span<PanelTarget> entries = panel_targets(context, first_row);
  const auto before = [](const PanelTarget& entry, std::int64_t position) { return entry.position < position; };
  const auto from = std::lower_bound(entries.begin(), entries.end(), begin, before);
  return {from, std::lower_bound(from, entries.end(), end, before)};
}

}  // namespace cutloss::cpu
