#include <algorithm>
#include <cmath>

#include "src/analysis/passes.h"
#include "src/analysis/vectors.h"

namespace cutloss::analysis {
namespace {

// Of `made`, [rows][D] or with `turned` [D][rows], against `exact`, [rows][D]; of dC also the rows that got nothing.
template <typename Exact>
GradientError compare(const std::vector<float>& made, const std::vector<Exact>& exact, std::int64_t d, bool of_table,
                      bool turned = false) {
  std::vector<double> error(static_cast<std::size_t>(d)), row(error), sum(error.size(), 0.0), exact_sum(sum);
  double error2 = 0, exact2 = 0, product = 0, nothing2 = 0;
  std::int64_t nothing = 0;
  GradientError result;
  const auto rows = static_cast<std::int64_t>(exact.size()) / d;
  for (std::int64_t i = 0; i < rows; ++i) {
    bool zero = true;
    for (std::int64_t k = 0; k < d; ++k) {
      const float value = made[static_cast<std::size_t>(turned ? k * rows + i : i * d + k)];
      row[static_cast<std::size_t>(k)] = exact[static_cast<std::size_t>(i * d + k)];
      error[static_cast<std::size_t>(k)] = value - row[static_cast<std::size_t>(k)];
      zero = zero && value == 0;
    }
    const double row_error2 = dot(error.data(), error.data(), d), row2 = dot(row.data(), row.data(), d);
    error2 += row_error2, exact2 += row2;
    product += dot(error.data(), row.data(), d);
    if (row2 > 0) result.worst_row = std::max(result.worst_row, std::sqrt(row_error2 / row2));
    if (zero) ++nothing, nothing2 += row2;
    add_scaled(1.0, error.data(), d, sum.data());
    add_scaled(1.0, row.data(), d, exact_sum.data());
  }
  result.relative = exact2 > 0 ? std::sqrt(error2 / exact2) : 0;
  const double made2 = exact2 + 2 * product + error2;
  result.cosine = exact2 > 0 && made2 > 0 ? (exact2 + product) / std::sqrt(exact2 * made2) : 0;
  if (of_table) {
    result.nothing = static_cast<double>(nothing) / static_cast<double>(rows);
    result.nothing_norm = exact2 > 0 ? nothing2 / exact2 : 0;
  } else {
    const double whole = dot(exact_sum.data(), exact_sum.data(), d);
    result.bias = whole > 0 ? std::sqrt(dot(sum.data(), sum.data(), d) / whole) : 0;
  }
  return result;
}

}  // namespace

Status measure_tolerances(const Tiles& tiles, const Ids& order, const Machine& machine, const Options& options,
                          const std::vector<double>& exact_d_e, const std::vector<float>& exact_d_c, Report& report) {
  Problem problem = tiles.problem();
  problem.tokens = tiles.tokens();
  problem.e_dtype = DType::f32;
  problem.e_strides.reset();
  problem.reduction = Reduction::sum;
  problem.vocab_order = true;
  problem.want_d_e = true;
  problem.want_d_c = !exact_d_c.empty();
  problem.d_c_dtype = DType::f32;
  std::vector<float> d_e(exact_d_e.size()), d_c(exact_d_c.size());
  const std::size_t total = 2 * options.tolerances.size();
  for (const Filter filter : {Filter::certified, Filter::unbiased}) {
    for (const float tolerance : options.tolerances) {
      if (options.progress) {
        options.progress("tolerances", static_cast<double>(report.tolerances.size()) / static_cast<double>(total));
      }
      problem.filter = filter;
      problem.tolerance = tolerance;
      const Result<Plan> plan = make_plan(problem, {Mode::automatic, std::nullopt, options.threads}, machine);
      if (!plan.ok()) return plan.status();
      TolerancePoint point{filter, tolerance, 0, {}, {}, {}};
      Inputs inputs;
      inputs.e = tiles.hidden_rows(), inputs.c = tiles.table(), inputs.labels = tiles.labels().data();
      inputs.vocab_order = order.data();
      inputs.seed = options.seed;
      Outputs outputs;
      outputs.d_e = d_e.data();
      outputs.d_c = exact_d_c.empty() ? nullptr : d_c.data();
      outputs.filter_report = &point.report;
      if (Status s = run(plan.value(), inputs, outputs); !s.ok()) return s;
      const double entries = static_cast<double>(tiles.tokens()) * static_cast<double>(tiles.vocab());
      const double redone = static_cast<double>(point.report.rows_redone) / static_cast<double>(tiles.tokens());
      point.kept = point.report.kept_entries / entries + redone;
      point.d_e = compare(d_e, exact_d_e, tiles.hidden(), false);
      if (!exact_d_c.empty())
        point.d_c = compare(d_c, exact_d_c, tiles.hidden(), true, problem.head_layout == HeadLayout::dv);
      report.tolerances.push_back(point);
    }
  }
  if (options.progress) options.progress("tolerances", 1);
  return Status();
}

}  // namespace cutloss::analysis
