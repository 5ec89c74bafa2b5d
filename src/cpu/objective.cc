// From a row's softmax to its loss and the factors of its gradient, in float64: the formulas of cutloss.hpp.
#include <algorithm>
#include <cmath>
#include <limits>

#include "src/cpu/passes.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();
}  // namespace

// Neither lse - z_label nor p_label - 1 is formed by subtraction: where the row is confident (1 - p_label near 1e-7)
// either would keep no correct digit in f32. With s = sum exp(z - max) over everything but the label:
//   nll = log1p(s exp(max - z_label)),   p_label - 1 = -s / (s + exp(z_label - max))
RowSoftmax combine(double max, double sum, double label_logit) {
  if (sum == 0 && label_logit == -kInfinity) return {kInfinity, -kInfinity, 0, 0, 0};  // every id is masked
  RowSoftmax row{};
  if (label_logit >= max) {
    const double odds = sum * std::exp(max - label_logit);
    row.nll = std::log1p(odds);
    row.lse = label_logit + row.nll;
    row.weight = std::exp(max - label_logit) / (1 + odds);
    row.label = 1 / (1 + odds);
    row.label_minus_1 = -odds / (1 + odds);
    // An infinite logit must not look like certainty.
    if (std::isinf(label_logit)) row = {NAN, NAN, NAN, NAN, NAN};
  } else {
    const double all = sum + std::exp(label_logit - max);
    row.nll = (max - label_logit) + std::log(all);
    row.lse = max + std::log(all);
    row.weight = 1 / all;
    row.label = std::exp(label_logit - max) / all;
    row.label_minus_1 = -sum / all;
  }
  return row;
}

double upstream(const Context& context, std::int64_t row) {
  const Problem& p = context.plan.problem;
  const Inputs& in = context.inputs;
  const double weight = context.objective.scale * (p.token_weights ? in.token_weights[row] : 1.0f);
  return in.cotangent == nullptr ? weight : weight * in.cotangent[p.reduction == Reduction::none ? row : 0];
}

double class_weight(const Context& context, std::int64_t id) {
  return context.inputs.class_weights == nullptr ? 1.0 : context.inputs.class_weights[id];
}

double label_class_weight(const Context& context, std::int64_t table_row) {
  const std::int64_t label = context.workspace.rows.label[table_row];
  return label < 0 ? 1.0 : class_weight(context, label);
}

RowFactors row_factors(const Context& context, std::int64_t table_row, const RowSoftmax& softmax,
                       double target_logits) {
  const Problem& p = context.plan.problem;
  const RowTable& table = context.workspace.rows;
  // Whatever weighs it: a weight of 0 would hide it.
  if (table.label[table_row] == kBadLabel) return {NAN, NAN, NAN, NAN, NAN};
  const std::int64_t row = table.row[table_row];
  const double token_weight = p.token_weights ? context.inputs.token_weights[row] : 1.0f;
  const double s = p.label_smoothing;

  // The row is label_weight x (lse - z_label) + rest_weight x lse - rest_logits + z_loss x lse^2.
  double label_weight = 0;
  double rest_weight = 0;
  double rest_logits = 0;
  double smooth = 0;
  if (p.soft_targets > 0) {
    label_weight = table.label_weight[table_row];
    rest_weight = table.target_sum[table_row] - label_weight;
    rest_logits = target_logits;
  } else {
    label_weight = (1 - s) * label_class_weight(context, table_row);
    smooth = s / static_cast<double>(p.vocab);
    rest_weight = s > 0 ? smooth * context.objective.class_weight_sum : 0;
    rest_logits = s > 0 ? smooth * target_logits : 0;
  }

  // Products of a weight of 0 and an infinite nll or lse would be NaN.
  const auto times = [](double weight, double value) { return weight == 0 ? 0 : weight * value; };
  double loss = times(label_weight, softmax.nll) + times(p.z_loss, softmax.lse * softmax.lse);
  if (rest_weight != 0 || rest_logits != 0) loss += times(rest_weight, softmax.lse) - rest_logits;
  if (softmax.lse == -kInfinity) return {token_weight * kInfinity, 0, 0, 0, 0};

  const double g = upstream(context, row);
  const double h = p.lse_cotangent ? context.inputs.lse_cotangent[row] : 0;
  const double rest = g * (rest_weight + 2 * p.z_loss * softmax.lse) + h;
  return {token_weight * loss, g * label_weight + rest, g * label_weight * softmax.label_minus_1 + rest * softmax.label,
          g * smooth, g};
}

Objective prepare_objective(const Context& context, std::int64_t rows) {
  const Problem& p = context.plan.problem;
  const Inputs& in = context.inputs;
  const RowTable& table = context.workspace.rows;
  Objective objective;
  if (p.reduction == Reduction::mean) {
    double sum = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      const double token_weight = p.token_weights ? in.token_weights[table.row[i]] : 1.0f;
      const double target = p.soft_targets > 0 ? table.target_sum[i] : label_class_weight(context, i);
      sum += token_weight * target;
    }
    const double denominator = in.denominator.value_or(sum);
    // An infinite weight must not look like no weight: inf / inf.
    objective.scale = denominator == 0 ? 0 : std::isinf(denominator) ? NAN : 1 / denominator;
  }
  if (p.label_smoothing > 0) {
    for (std::int64_t v = 0; v < p.vocab; ++v) objective.class_weight_sum += class_weight(context, v);
    if (!p.softcap) objective.bias_sum = smoothing_vector(context);
  }
  return objective;
}

}  // namespace cutloss::cpu
