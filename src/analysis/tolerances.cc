#include "src/analysis/owner_sums.h"
#include "src/analysis/passes.h"
#include "src/analysis/vectors.h"

namespace cutloss::analysis {
namespace {

// Of `made`, [rows][D] or with `turned` [D][rows], against `exact`, [rows][D]; of dC also the rows that got nothing.
template <typename Exact>
GradientError compare(const std::vector<float>& made, const std::vector<Exact>& exact, std::int64_t d, bool of_table,
                      bool turned = false) {
  ErrorTable table(0, d, !of_table);
  ErrorSum sum;
  sum.sum.assign(table.exact_sum.size(), 0.0);
  std::vector<double> error(static_cast<std::size_t>(d)), row(error);
  const auto rows = static_cast<std::int64_t>(exact.size()) / d;
  for (std::int64_t i = 0; i < rows; ++i) {
    bool nothing = of_table;
    for (std::int64_t k = 0; k < d; ++k) {
      const float value = made[static_cast<std::size_t>(turned ? k * rows + i : i * d + k)];
      row[static_cast<std::size_t>(k)] = exact[static_cast<std::size_t>(i * d + k)];
      error[static_cast<std::size_t>(k)] = value - row[static_cast<std::size_t>(k)];
      nothing = nothing && value == 0;
    }
    const double row2 = dot(row.data(), row.data(), d);
    table.exact2 += row2, table.owners += 1;
    for (std::size_t k = 0; k < table.exact_sum.size(); ++k) table.exact_sum[k] += row[k];
    sum.add(error.data(), row.data(), d, row2, nothing, 0, false);
  }
  return table.result(sum, false);
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
