#include <algorithm>
#include <cmath>

#include "src/analysis/passes.h"
#include "src/analysis/vectors.h"

namespace cutloss::analysis {
namespace {

GradientError compare(const Tiles& tiles, const std::vector<float>& made, const std::vector<double>& exact) {
  const std::int64_t d = tiles.hidden();
  std::vector<double> error(static_cast<std::size_t>(d)), sum(error.size(), 0.0), exact_sum(error.size(), 0.0);
  double error2 = 0, exact2 = 0, product = 0;
  GradientError result;
  for (std::int64_t i = 0; i < tiles.tokens(); ++i) {
    const double* const row = exact.data() + i * d;
    for (std::int64_t k = 0; k < d; ++k)
      error[static_cast<std::size_t>(k)] = made[static_cast<std::size_t>(i * d + k)] - row[k];
    const double row_error2 = dot(error.data(), error.data(), d), row2 = dot(row, row, d);
    error2 += row_error2, exact2 += row2;
    product += dot(error.data(), row, d);
    if (row2 > 0) result.worst_row = std::max(result.worst_row, std::sqrt(row_error2 / row2));
    add_scaled(1.0, error.data(), d, sum.data());
    add_scaled(1.0, row, d, exact_sum.data());
  }
  result.relative = exact2 > 0 ? std::sqrt(error2 / exact2) : 0;
  const double made2 = exact2 + 2 * product + error2;
  result.cosine = exact2 > 0 && made2 > 0 ? (exact2 + product) / std::sqrt(exact2 * made2) : 0;
  const double whole = dot(exact_sum.data(), exact_sum.data(), d);
  result.bias = whole > 0 ? std::sqrt(dot(sum.data(), sum.data(), d) / whole) : 0;
  return result;
}

}  // namespace

Status measure_tolerances(const Tiles& tiles, const Ids& order, const Machine& machine, const Options& options,
                          const std::vector<double>& exact_d_e, Report& report) {
  Problem problem = tiles.problem();
  problem.tokens = tiles.tokens();
  problem.e_dtype = DType::f32;
  problem.e_strides.reset();
  problem.reduction = Reduction::sum;
  problem.vocab_order = true;
  problem.want_d_e = true;
  std::vector<float> d_e(exact_d_e.size());
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
      TolerancePoint point{filter, tolerance, 0, {}, {}};
      Inputs inputs;
      inputs.e = tiles.hidden_rows(), inputs.c = tiles.table(), inputs.labels = tiles.labels().data();
      inputs.vocab_order = order.data();
      inputs.seed = options.seed;
      Outputs outputs;
      outputs.d_e = d_e.data();
      outputs.filter_report = &point.report;
      if (Status s = run(plan.value(), inputs, outputs); !s.ok()) return s;
      const double entries = static_cast<double>(tiles.tokens()) * static_cast<double>(tiles.vocab());
      const double redone = static_cast<double>(point.report.rows_redone) / static_cast<double>(tiles.tokens());
      point.kept = point.report.kept_entries / entries + redone;
      point.d_e = compare(tiles, d_e, exact_d_e);
      report.tolerances.push_back(point);
    }
  }
  if (options.progress) options.progress("tolerances", 1);
  return Status();
}

}  // namespace cutloss::analysis
