// Bounds, to first order in u = 2^-24, for a computation with f32 products and sums:
//   a logit before softcap, a dot product of T terms (D, and one for the bias; one more rounding of e for the scale):
//     raw_err = (T + 2) u (sum_d |scale e_d c_vd| + |bias_v|), the row's largest; an id at -inf has none
//   softcap multiplies raw_err by at most 1; its tanh adds 8 u |z|:  z_err = raw_err + 8 u |z|, the row's largest
//   a softmax weight p_v, relative:  relative = exp(2 z_err + (additions + 128) u) - 1: its own logit and the sum's,
//     the sum over v, and 128 = 88 for the argument of exp, up to 87 and rounded once, and 40 for exp and the division
//   the slope of a capped logit, relative:  slope_err = 8 u + 4 raw_err / cap   (|d log(1 - tanh^2)| <= 2 |dr| / cap)
//   nll = log1p(odds), odds = (1 - p_y) / p_y with the relative error of a weight:  relative (1 - p_y) + u |nll|
//   lse:  relative + u |lse|
//   dz_v = (A p_v - S w_v - T_v) j_v   A softmax's factor, S smoothing, T_v soft target v; the label's entry is formed
//     as B (p_y - 1) + (A - B) p_y, B the label's factor. With mag_v the sum of the magnitudes of those parts:
//     dz_err_v = mag_v (relative + slope_err + 8 u) + dA p_v j_v + flushed,   dA = |2 g z_loss| (error of lse)
//     (what is below 2^-126 may be flushed: a weight, a factor, a product, each times at most max(|factors|, 1))
//   a gradient, a sum of dz times an element x:  sum |x| (dz_err + (additions + 8) u mag), and one rounding to its
//   dtype
//   under a filter each entry of the softmax is off by epsilon at most (certified: left out below epsilon, or its
//     block's mean of such; unbiased: 0 or epsilon in place of less; tile: a |dz| below epsilon |g| in all), which adds
//     |A| epsilon (1 + relative) to dz_err, for a tile |g| epsilon. Rows that are redone are added to a rounded dC
//   entropy = (lse - max) + sum_v p_v (max - z_v), all terms >= 0:  relative (1 + both) + u |entropy|
//   a mean of logits over rows: the mean of z_err, (additions + 8) u the mean of |z|, one rounding
#include "src/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "src/cpu/element.h"
#include "src/problem/resolve.h"

namespace cutloss::reference {
namespace {

constexpr double u = 0x1p-24;
constexpr double kTiny = 0x1p-126;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double element(const void* data, DType dtype, std::int64_t at) {
  if (dtype == DType::bf16) return cpu::ToFloat(static_cast<const cpu::Bf16*>(data)[at]);
  if (dtype == DType::f16) return cpu::ToFloat(static_cast<const cpu::F16*>(data)[at]);
  return static_cast<const float*>(data)[at];
}

std::int64_t integer(const void* data, DType dtype, std::int64_t at) {
  return dtype == DType::i32 ? static_cast<const std::int32_t*>(data)[at] : static_cast<const std::int64_t*>(data)[at];
}

double or_one(const float* values, std::int64_t at) { return values == nullptr ? 1.0 : values[at]; }

// 0 times an infinite logarithm is a term that is not there.
double times(double weight, double value) { return weight == 0 ? 0 : weight * value; }

// -------------------------------------------------------------------------------------------------- inputs, widened

struct Data {
  std::int64_t N, D, V;
  std::vector<double> e, c, bias, class_weights;  // e times logit_scale; rows that do not count are 0
  double class_weight_sum = 0;
};

struct Target {
  std::int64_t id;
  double probability;
};

// What a row is matched with.
struct Row {
  bool valid = false;       // it has a label that is not ignore_index
  bool counts = false;      // and a weight: something of it reaches the loss
  std::int64_t label = -1;  // -1: outside [0, V). Of soft targets the likeliest, the first of equals; or kNoTarget.
  double weight = 1;        // token weight
  double share = 0;         // of the default denominator of a mean
  std::vector<Target> targets;
};

void read_label(const Problem& p, const Inputs& in, std::int64_t at, Row& row) {
  const std::int64_t label = integer(in.labels, p.label_dtype, at * p.label_stride);
  if (label == p.ignore_index) return;
  row.valid = true;
  if (label >= 0 && label < p.vocab) row.label = label;
  const double class_weight = row.label < 0 ? 1 : or_one(in.class_weights, row.label);
  row.share = row.weight * class_weight;
  row.counts = row.label < 0 || class_weight != 0 || p.label_smoothing > 0 || p.z_loss != 0 || p.lse_cotangent;
}

void read_soft_targets(const Problem& p, const Inputs& in, std::int64_t at, Row& row) {
  row.valid = true;
  row.counts = p.z_loss != 0 || p.lse_cotangent;
  row.label = kNoTarget;
  double best = 0;
  bool bad = false;
  for (std::int64_t k = 0; k < p.soft_targets; ++k) {
    const std::int64_t id = integer(in.soft_ids, p.label_dtype, at * p.soft_targets + k);
    const double probability = in.soft_probabilities[at * p.soft_targets + k];
    if (id == p.ignore_index) continue;
    bad = bad || id < 0 || id >= p.vocab;
    if (probability > best || row.label == kNoTarget) {
      best = probability;
      row.label = id;
    }
    row.share += row.weight * probability;
    row.counts = row.counts || probability != 0;
    row.targets.push_back({id, probability});
  }
  if (bad) {
    row.label = -1;
    row.counts = true;
  }
}

Row read_row(const Problem& p, const Inputs& in, std::int64_t i) {
  Row row;
  const std::int64_t length = sequence_or_tokens(p);
  if (i % length + p.shift >= length) return row;
  row.weight = or_one(in.token_weights, i);
  if (p.soft_targets > 0) {
    read_soft_targets(p, in, i + p.shift, row);
  } else {
    read_label(p, in, i + p.shift, row);
  }
  row.counts = row.counts && row.weight != 0;
  return row;
}

Data read_data(const Problem& p, const Inputs& in, const std::vector<Row>& rows) {
  Data data{p.tokens, p.hidden, p.vocab, {}, {}, {}, {}, 0};
  const Strides es = e_strides(p);
  const HeadStrides cs = c_strides(p);
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    for (std::int64_t d = 0; d < p.hidden; ++d) {
      const bool counts = rows[static_cast<std::size_t>(i)].counts;
      data.e.push_back(counts ? p.logit_scale * element(in.e, p.e_dtype, i * es.axis0 + d * es.axis1) : 0);
    }
  }
  for (std::int64_t v = 0; v < p.vocab; ++v) {
    for (std::int64_t d = 0; d < p.hidden; ++d) data.c.push_back(element(in.c, p.c_dtype, v * cs.v + d * cs.d));
    data.bias.push_back(p.bias_dtype ? element(in.bias, *p.bias_dtype, v) : 0);
    data.class_weights.push_back(or_one(in.class_weights, v));
    data.class_weight_sum += data.class_weights.back();
  }
  return data;
}

// ----------------------------------------------------------------------------------------------- logits and softmax

struct Softmax {
  std::vector<double> z, slope, p;
  double max = -kInfinity, lse = -kInfinity;
  double raw_err = 0, z_err = 0, relative = 0, slope_err = 0, lse_err = 0;
};

void form_logits(const Problem& problem, const Data& data, const double* e, Softmax& s) {
  const double cap = problem.softcap.value_or(0.0f);
  const double terms =
      static_cast<double>(data.D) + 2 + (problem.bias_dtype ? 1 : 0) + (problem.logit_scale != 1.0f ? 1 : 0);
  for (std::int64_t v = 0; v < data.V; ++v) {
    const auto at = static_cast<std::size_t>(v);
    const double* c = &data.c[at * static_cast<std::size_t>(data.D)];
    double raw = data.bias[at], magnitude = std::abs(data.bias[at]);
    for (std::int64_t d = 0; d < data.D; ++d) {
      raw += e[d] * c[d];
      magnitude += std::abs(e[d] * c[d]);
    }
    s.z[at] = cap > 0 ? cap * std::tanh(raw / cap) : raw;
    s.slope[at] = cap > 0 ? 1 / (std::cosh(raw / cap) * std::cosh(raw / cap)) : 1;
    const double err = std::isinf(raw) ? 0 : terms * u * magnitude + kTiny * terms;
    s.raw_err = std::max(s.raw_err, err);
    s.z_err = std::max(s.z_err, err + (cap > 0 ? 8 * u * std::abs(s.z[at]) : 0));
  }
  if (cap > 0) s.slope_err = 8 * u + 4 * s.raw_err / cap;
}

Softmax softmax_of(const Problem& problem, const Data& data, const double* e, double additions) {
  const auto V = static_cast<std::size_t>(data.V);
  Softmax s{std::vector<double>(V), std::vector<double>(V), std::vector<double>(V)};
  form_logits(problem, data, e, s);
  s.relative = std::expm1(2 * s.z_err + (additions + 128) * u);
  for (const double z : s.z) s.max = z > s.max || std::isnan(z) ? z : s.max;
  if (s.max == -kInfinity) return s;  // every id is masked: p = 0
  double sum = 0;
  for (const double z : s.z) sum += std::exp(z - s.max);
  s.lse = s.max + std::log(sum);
  for (std::size_t v = 0; v < V; ++v) s.p[v] = std::exp(s.z[v] - s.lse);
  s.lse_err = s.relative + u * std::abs(s.lse);
  return s;
}

// 1 - p_v as the sum of the others, not by subtraction.
double rest_of(const Softmax& s, std::int64_t v) {
  double rest = 0;
  for (std::size_t k = 0; k < s.p.size(); ++k) rest += k == static_cast<std::size_t>(v) ? 0 : s.p[k];
  return rest;
}

// ------------------------------------------------------------------------------------------------------ loss of a row

// The loss and, for its gradient, how it weighs the label, the other soft targets, the uniform part and lse.
struct RowLoss {
  double nll = 0, nll_err = 0;
  double loss = 0, loss_err = 0;
  double label_weight = 0;  // of lse - z_label
  double rest_weight = 0;   // of lse in the other parts; rest_slope: their derivative by lse
  double rest_slope = 0, rest_slope_err = 0;
};

// weight x (lse - z_v), where lse is only known to its own error and z_v to z_err.
void add_term(RowLoss& row, const Softmax& s, double weight, std::size_t v, double additions) {
  row.rest_weight += weight;
  row.loss += times(weight, s.lse - s.z[v]);
  if (std::isfinite(s.z[v])) {
    row.loss_err += std::abs(weight) * (s.relative + s.z_err + (additions + 8) * u * std::abs(s.z[v]));
  }
}

RowLoss loss_of(const Problem& p, const Data& data, const Row& row, const Softmax& s, double additions) {
  RowLoss out;
  if (row.label == kBadLabel) return {kNan, 0, kNan, 0, kNan, kNan, kNan, 0};
  const bool has_target = row.label != kNoTarget;
  const auto y = static_cast<std::size_t>(has_target ? row.label : 0);
  if (has_target) {
    const double rest = rest_of(s, row.label);
    out.nll = s.z[y] == -kInfinity ? kInfinity : s.lse - s.z[y];
    if (rest < 0.5) out.nll = -std::log1p(-rest);
    if (std::isfinite(out.nll)) out.nll_err = s.relative * rest + u * std::abs(out.nll) + kTiny;
  }
  if (s.max == -kInfinity) return {has_target ? kInfinity : 0, 0, row.weight * kInfinity, 0, 0, 0, 0, 0};

  if (p.soft_targets == 0) {
    out.label_weight = (1 - static_cast<double>(p.label_smoothing)) * data.class_weights[y];
    const double each = p.label_smoothing / static_cast<double>(data.V);
    for (std::size_t v = 0; each > 0 && v < s.z.size(); ++v)
      add_term(out, s, each * data.class_weights[v], v, additions);
  }
  for (const Target& t : row.targets) {
    if (t.id == row.label) {
      out.label_weight += t.probability;
    } else {
      add_term(out, s, t.probability, static_cast<std::size_t>(t.id), additions);
    }
  }
  const double zeta = p.z_loss;
  out.loss += times(out.label_weight, out.nll) + zeta * s.lse * s.lse;
  out.loss_err +=
      std::abs(out.label_weight) * out.nll_err + std::abs(zeta) * s.lse_err * (2 * std::abs(s.lse) + s.lse_err);
  out.rest_slope = out.rest_weight + 2 * zeta * s.lse;
  out.rest_slope_err = 2 * std::abs(zeta) * s.lse_err;
  out.loss *= row.weight;
  out.loss_err = std::abs(row.weight) * out.loss_err + u * std::abs(out.loss) + kTiny;
  return out;
}

// ----------------------------------------------------------------------------------------------- gradient of a row

struct Gradient {
  std::vector<double> dz, mag, err;  // of the logits before softcap
};

// g: upstream gradient of the row's loss, token weight inside; h: of its lse.
Gradient gradient_of(const Problem& p, const Data& data, const Row& row, const Softmax& s, const RowLoss& loss,
                     double g, double h, double epsilon) {
  const auto V = static_cast<std::size_t>(data.V);
  Gradient out{std::vector<double>(V), std::vector<double>(V), std::vector<double>(V)};
  if (row.label == kBadLabel) {
    std::fill(out.dz.begin(), out.dz.end(), kNan);
    return out;
  }
  if (s.max == -kInfinity || (g == 0 && h == 0)) return out;
  const double label_factor = g * loss.label_weight;
  const double rest_factor = g * loss.rest_slope + h;
  const double smooth = p.soft_targets > 0 ? 0 : g * p.label_smoothing / static_cast<double>(data.V);
  const double softmax_factor = std::abs(label_factor + rest_factor) + std::abs(g) * loss.rest_slope_err;
  const double filtered = epsilon * (p.filter == Filter::tile ? std::abs(g) : softmax_factor) * (1 + s.relative);
  for (std::size_t v = 0; v < V; ++v) {
    const bool is_label = static_cast<std::int64_t>(v) == row.label;
    const double rest = is_label ? rest_of(s, row.label) : 0;
    const double factor = is_label ? rest_factor : label_factor + rest_factor;
    out.dz[v] = factor * s.p[v] - smooth * data.class_weights[v] - (is_label ? label_factor * rest : 0);
    out.mag[v] = std::abs(factor) * s.p[v] + std::abs(smooth * data.class_weights[v]) +
                 (is_label ? std::abs(label_factor) * rest : 0);
    out.err[v] = std::abs(g) * loss.rest_slope_err * s.p[v];
  }
  for (const Target& t : row.targets) {
    if (t.id == row.label) continue;
    out.dz[static_cast<std::size_t>(t.id)] -= g * t.probability;
    out.mag[static_cast<std::size_t>(t.id)] += std::abs(g * t.probability);
  }
  const double flushed =
      4 * kTiny * std::max({std::abs(label_factor), std::abs(rest_factor), std::abs(label_factor + rest_factor), 1.0});
  for (std::size_t v = 0; v < V; ++v) {
    out.dz[v] *= s.slope[v];
    out.mag[v] *= s.slope[v];
    out.err[v] = out.err[v] * s.slope[v] + out.mag[v] * (s.relative + s.slope_err + 8 * u) + flushed + filtered;
  }
  return out;
}

// -------------------------------------------------------------------------------------------------------- reductions

double scale_of(const Problem& p, const Inputs& in, const std::vector<Row>& rows) {
  if (p.reduction != Reduction::mean) return 1;
  double denominator = 0;
  for (const Row& row : rows) denominator += row.counts ? row.share : 0;
  denominator = in.denominator.value_or(denominator);
  return denominator == 0 ? 0 : 1 / denominator;
}

// The rounding of numbers up to `magnitude` to a dtype.
double rounding(DType dtype, double magnitude) {
  if (dtype == DType::f32) return u * magnitude;
  if (dtype == DType::bf16) return 0x1p-8 * magnitude;
  // From 65520 on the nearest f16 is infinity.
  return magnitude < 65504 ? 0x1p-11 * magnitude + 0x1p-25 : kInfinity;
}

// What is in the buffer already, and the rounding to its dtype. between: the magnitude of what is rounded in between.
void store(DType dtype, const void* before, std::size_t at, double flushes, double between, double& value,
           double& bound) {
  bound += kTiny * flushes;
  const double old = before == nullptr ? 0 : element(before, dtype, static_cast<std::int64_t>(at));
  if (between > 0) bound += rounding(dtype, between + std::abs(old));
  if (before != nullptr) {
    bound += u * std::abs(value);
    value += old;
    bound += u * std::abs(value);
  }
  if (dtype == DType::f16 && std::abs(value) - bound >= 65536) value = std::copysign(kInfinity, value);
  bound += rounding(dtype, std::abs(value) + bound);
}

class Oracle {
 public:
  Oracle(const Problem& p, const Inputs& in, const Options& options) : p_(p), in_(in), options_(options) {
    for (std::int64_t i = 0; i < p.tokens; ++i) rows_.push_back(read_row(p, in, i));
    data_ = read_data(p, in, rows_);
    scale_ = scale_of(p, in, rows_);
    const auto N = static_cast<std::size_t>(p.tokens), D = static_cast<std::size_t>(p.hidden),
               V = static_cast<std::size_t>(p.vocab);
    for (auto* of_rows : {&r_.row_loss, &r_.row_loss_bound, &r_.nll, &r_.nll_bound, &r_.lse, &r_.lse_bound, &r_.entropy,
                          &r_.entropy_bound, &r_.logit_error}) {
      of_rows->assign(N, 0.0);
    }
    for (auto* of_ids : {&r_.d_bias, &r_.d_bias_bound, &r_.mean_logits, &r_.mean_logits_bound, &d_bias_between_}) {
      of_ids->assign(V, 0.0);
    }
    for (auto* matrix : {&r_.d_e, &r_.d_e_bound}) matrix->assign(N * D, 0.0);
    for (auto* matrix : {&r_.d_c, &r_.d_c_bound, &d_c_between_}) matrix->assign(V * D, 0.0);
    r_.logits.assign(N * V, 0.0);
    r_.label.assign(N, -1);
    r_.counts.assign(N, 0);
  }

  Reference run() {
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      r_.valid_count += rows_[i].valid;
      if (rows_[i].counts) add_row(i);
    }
    r_.loss *= scale_;
    r_.loss_bound = r_.loss_bound * std::abs(scale_) + u * std::abs(r_.loss) + kTiny;
    if (scale_ == 0) r_.loss = r_.loss_bound = 0;  // a mean over no weight, be its rows infinite
    finish();
    return std::move(r_);
  }

 private:
  void add_row(std::size_t i) {
    const double* e = &data_.e[i * static_cast<std::size_t>(data_.D)];
    const Softmax s = softmax_of(p_, data_, e, options_.additions);
    const RowLoss loss = loss_of(p_, data_, rows_[i], s, options_.additions);
    r_.counts[i] = 1;
    r_.label[i] = rows_[i].label;
    r_.nll[i] = loss.nll;
    r_.nll_bound[i] = loss.nll_err;
    r_.lse[i] = s.lse;
    r_.lse_bound[i] = s.lse_err;
    r_.row_loss[i] = loss.loss;
    r_.row_loss_bound[i] = loss.loss_err;
    r_.loss += loss.loss;
    r_.loss_bound += loss.loss_err;
    add_metrics(i, s);
    const double cotangent = in_.cotangent == nullptr ? 1 : in_.cotangent[p_.reduction == Reduction::none ? i : 0];
    const double h = p_.lse_cotangent ? in_.lse_cotangent[i] : 0;
    const double g = cotangent * rows_[i].weight * scale_;
    add_gradient(i, e, gradient_of(p_, data_, rows_[i], s, loss, g, h, options_.epsilon));
  }

  void add_metrics(std::size_t i, const Softmax& s) {
    double below = 0;  // sum of p (max - z)
    for (std::size_t v = 0; v < s.z.size(); ++v) {
      below += times(s.p[v], s.max - s.z[v]);
      r_.logits[i * s.z.size() + v] = s.z[v];
      r_.mean_logits[v] += s.z[v];
      if (std::isfinite(s.z[v])) {
        r_.mean_logits_bound[v] += s.z_err + (options_.additions + 8) * u * std::abs(s.z[v]);
      }
    }
    r_.logit_error[i] = s.z_err;
    if (s.max == -kInfinity) return;
    r_.entropy[i] = s.lse - s.max + below;
    r_.entropy_bound[i] = s.relative * (1 + r_.entropy[i]) + u * std::abs(r_.entropy[i]);
  }

  void add_gradient(std::size_t i, const double* e, const Gradient& g) {
    const auto D = static_cast<std::size_t>(data_.D);
    const HeadStrides ds = d_c_strides(p_);
    for (std::size_t v = 0; v < g.dz.size(); ++v) {
      const double err = g.err[v] + (options_.additions + 8) * u * g.mag[v];
      r_.d_bias[v] += g.dz[v];
      r_.d_bias_bound[v] += err;
      const double between = options_.rounds_twice ? g.mag[v] + err : 0;
      d_bias_between_[v] += between;
      for (std::size_t d = 0; d < D; ++d) {
        const std::size_t at = v * static_cast<std::size_t>(ds.v) + d * static_cast<std::size_t>(ds.d);
        r_.d_e[i * D + d] += p_.logit_scale * g.dz[v] * data_.c[v * D + d];
        r_.d_e_bound[i * D + d] += std::abs(p_.logit_scale * data_.c[v * D + d]) * err;
        r_.d_c[at] += g.dz[v] * e[d];
        r_.d_c_bound[at] += std::abs(e[d]) * err;
        d_c_between_[at] += std::abs(e[d]) * between;
      }
    }
  }

  void finish() {
    const auto n = static_cast<double>(data_.N), v = static_cast<double>(data_.V);
    const double counted = static_cast<double>(std::count(r_.counts.begin(), r_.counts.end(), 1));
    for (std::size_t k = 0; k < r_.mean_logits.size() && counted > 0; ++k) {
      r_.mean_logits[k] /= counted;
      r_.mean_logits_bound[k] = r_.mean_logits_bound[k] / counted + u * std::abs(r_.mean_logits[k]) + kTiny;
    }
    const void* const e_before = p_.accumulate_d_e ? options_.d_e_before : nullptr;
    const void* const c_before = p_.accumulate_d_c ? options_.d_c_before : nullptr;
    const void* const bias_before = p_.accumulate_d_bias ? options_.d_bias_before : nullptr;
    for (std::size_t k = 0; k < r_.d_e.size(); ++k) {
      store(d_e_dtype(p_), e_before, k, v + 8, 0, r_.d_e[k], r_.d_e_bound[k]);
    }
    for (std::size_t k = 0; k < r_.d_c.size(); ++k) {
      store(d_c_dtype(p_), c_before, k, n + 8, d_c_between_[k], r_.d_c[k], r_.d_c_bound[k]);
    }
    for (std::size_t k = 0; k < r_.d_bias.size(); ++k) {
      store(p_.bias_dtype.value_or(DType::f32), bias_before, k, n + 8, d_bias_between_[k], r_.d_bias[k],
            r_.d_bias_bound[k]);
    }
  }

  const Problem& p_;
  const Inputs& in_;
  const Options& options_;
  std::vector<Row> rows_;
  Data data_{};
  double scale_ = 1;
  std::vector<double> d_c_between_, d_bias_between_;  // like d_c and d_bias: magnitudes of parts of them
  Reference r_;
};

}  // namespace

Reference linear_cross_entropy(const Problem& p, const Inputs& in, const Options& options) {
  return Oracle(p, in, options).run();
}

}  // namespace cutloss::reference
