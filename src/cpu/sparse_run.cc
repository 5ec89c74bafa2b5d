// Mode sparse from group to group, and the exact pass over the rows that it left.
#include <algorithm>

#include "src/cpu/sparse.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

void add_to_report(const Context& context, std::int64_t first, std::int64_t count, FilterReport& report) {
  const RowTable& rows = context.workspace.rows;
  for (std::int64_t i = first; i < first + count; ++i) {
    if (rows.redo[i] != Redo::no) ++report.rows_redone;
    if (rows.redo[i] == Redo::exactly) continue;
    if (rows.redo[i] == Redo::no) report.kept_entries += static_cast<double>(rows.kept[i]);
    report.dropped_mass_mean += rows.below[i];
    report.dropped_mass_max = std::max(report.dropped_mass_max, rows.below[i]);
    report.error_bound = std::max(report.error_bound, rows.bound[i]);
  }
}

// Moves the rows of a group that are to be redone behind the `left` earlier ones, at the front of the row table.
std::int64_t collect_left(const Context& context, std::int64_t first, std::int64_t count, std::int64_t left) {
  const RowTable& rows = context.workspace.rows;
  for (std::int64_t i = first; i < first + count; ++i) {
    if (rows.redo[i] != Redo::exactly) continue;
    rows.row[left] = rows.row[i];
    rows.label[left] = rows.label[i];
    rows.position[left] = rows.position[i];
    ++left;
  }
  return left;
}

}  // namespace

FilterReport run_sparse(const Context& context, std::int64_t rows) {
  const Plan& plan = context.plan;
  const Problem& p = plan.problem;
  FilterReport report;
  report.rows = rows;
  summarize_head(context);
  const std::int64_t step = wants_head(p) ? plan.group_tokens : rows;
  std::int64_t left = 0;
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    loss_pass(context, first, count);
    add_to_report(context, first, count, report);
    const bool final = first + count == rows;
    if (wants_head(p)) {
      scatter_pass(context, {first, count, first > 0, final, final && report.rows_redone == 0});
    }
    left = collect_left(context, first, count, left);
  }
  if (rows > left) report.dropped_mass_mean /= static_cast<double>(rows - left);
  if (left == 0) return report;

  const Workspace workspace = map_workspace(*plan.exact, context.base);
  Context exact{*plan.exact, context.inputs,   context.outputs, context.kernels,
                workspace,   context.executor, context.base,    context.objective};
  if (p.soft_targets > 0) gather_targets(exact, left);
  run_exact(exact, left, true);
  return report;
}

}  // namespace cutloss::cpu
