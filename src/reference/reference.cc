#include "src/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/cpu/element.h"
#include "src/problem/resolve.h"

namespace cutloss::reference {
namespace {

double element(const void* data, DType dtype, std::int64_t at) {
  if (dtype == DType::bf16) return cpu::ToFloat(static_cast<const cpu::Bf16*>(data)[at]);
  return static_cast<const float*>(data)[at];
}

std::int64_t label_at(const Problem& p, const Inputs& in, std::int64_t row) {
  const std::int64_t at = row * p.label_stride;
  return p.label_dtype == DType::i32 ? static_cast<const std::int32_t*>(in.labels)[at]
                                     : static_cast<const std::int64_t*>(in.labels)[at];
}

double rounding(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 0x1p-24; }

}  // namespace

// Bounds, to first order in u = 2^-24, for a computation with f32 products and sums:
//   a raw logit, a dot product of D terms:  |dr_v| <= (D + 2) u sum_d |e_d c_vd|          (call the row's largest
//   z_err) softcap multiplies dr by at most 1, its tanh and slope add 8 u |z| and 8 u relative a softmax weight p_v,
//   relative:  2 z_err + (additions + 32) u    (exp, its argument, the sum over v, the division); the slope of a capped
//   logit, relative:  4 z_err / cap            (|d log(1 - tanh^2)| <= 2 |dr| / cap) nll and lse: 2 z_err + (additions
//   + 32) u + u |value| a gradient is a sum of products weight x element: that relative error of its weights plus
//   (additions) u, times the sum of the products' magnitudes, and one rounding to the output's dtype.
Reference linear_cross_entropy(const Problem& p, const Inputs& in, const Options& options) {
  const double u = 0x1p-24;
  const Strides es = e_strides(p);
  const HeadStrides cs = c_strides(p);
  const HeadStrides ds = d_c_strides(p);
  const auto N = static_cast<std::size_t>(p.tokens);
  const auto D = static_cast<std::size_t>(p.hidden);
  const auto V = static_cast<std::size_t>(p.vocab);
  const double cap = p.softcap.value_or(0.0f);

  std::vector<double> e(N * D), c(V * D);
  for (std::size_t i = 0; i < N; ++i) {
    for (std::size_t d = 0; d < D; ++d) {
      e[i * D + d] =
          element(in.e, p.e_dtype, static_cast<std::int64_t>(i) * es.axis0 + static_cast<std::int64_t>(d) * es.axis1);
    }
  }
  for (std::size_t v = 0; v < V; ++v) {
    for (std::size_t d = 0; d < D; ++d) {
      c[v * D + d] =
          element(in.c, p.c_dtype, static_cast<std::int64_t>(v) * cs.v + static_cast<std::int64_t>(d) * cs.d);
    }
  }

  Reference r;
  for (auto* column : {&r.nll, &r.nll_bound, &r.lse, &r.lse_bound}) column->assign(N, 0.0);
  for (auto* matrix : {&r.d_e, &r.d_e_bound}) matrix->assign(N * D, 0.0);
  for (auto* matrix : {&r.d_c, &r.d_c_bound}) matrix->assign(V * D, 0.0);
  for (std::size_t i = 0; i < N; ++i) r.valid_count += label_at(p, in, static_cast<std::int64_t>(i)) != p.ignore_index;
  const double scale =
      p.reduction == Reduction::mean && r.valid_count > 0 ? 1.0 / static_cast<double>(r.valid_count) : 1;

  std::vector<double> z(V), slope(V, 1.0);
  for (std::size_t i = 0; i < N; ++i) {
    const std::int64_t label = label_at(p, in, static_cast<std::int64_t>(i));
    if (label == p.ignore_index) continue;
    const double* ei = &e[i * D];
    double z_err = 0;
    for (std::size_t v = 0; v < V; ++v) {
      double raw = 0, magnitude = 0;
      for (std::size_t d = 0; d < D; ++d) {
        raw += ei[d] * c[v * D + d];
        magnitude += std::abs(ei[d] * c[v * D + d]);
      }
      z[v] = raw;
      double err = (static_cast<double>(D) + 2) * u * magnitude;
      if (cap > 0) {
        const double t = std::tanh(raw / cap);
        z[v] = cap * t;
        slope[v] = 1 / (std::cosh(raw / cap) * std::cosh(raw / cap));
        err += 8 * u * std::abs(z[v]);
      }
      z_err = std::max(z_err, err);
    }
    const double max = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const double value : z) sum += std::exp(value - max);
    const double lse = max + std::log(sum);
    const bool bad = label < 0 || label >= p.vocab;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto y = static_cast<std::size_t>(bad ? 0 : label);
    const double relative = 2 * z_err + (options.additions + 32) * u;
    r.nll[i] = bad ? nan : lse - z[y];
    r.nll_bound[i] = relative + u * std::abs(lse - z[y]);
    r.lse[i] = lse;
    r.lse_bound[i] = relative + u * std::abs(lse);
    r.loss += r.nll[i] * scale;
    r.loss_bound += r.nll_bound[i] * scale;

    const double cotangent = in.cotangent == nullptr ? 1.0 : in.cotangent[p.reduction == Reduction::none ? i : 0];
    const double g = bad ? nan : cotangent * scale;
    const double weight_error =
        relative + (options.additions + (cap > 0 ? 8 : 0)) * u + (cap > 0 ? 4 * z_err / cap : 0);
    const double flushed = bad ? 0 : 2 * std::max(std::abs(g), 1.0) * 0x1p-126;
    for (std::size_t v = 0; v < V; ++v) {
      // p_y - 1 as a sum of the others, not by subtraction.
      double dz = std::exp(z[v] - lse);
      if (v == y) {
        dz = 0;
        for (std::size_t k = 0; k < V; ++k) dz -= k == y ? 0 : std::exp(z[k] - lse);
      }
      dz *= g * slope[v];
      for (std::size_t d = 0; d < D; ++d) {
        const std::size_t at = v * static_cast<std::size_t>(ds.v) + d * static_cast<std::size_t>(ds.d);
        r.d_e[i * D + d] += dz * c[v * D + d];
        r.d_e_bound[i * D + d] += std::abs(dz * c[v * D + d]) * weight_error + std::abs(flushed * c[v * D + d]);
        r.d_c[at] += dz * ei[d];
        r.d_c_bound[at] += std::abs(dz * ei[d]) * weight_error + std::abs(flushed * ei[d]);
      }
    }
  }
  r.loss_bound += u * std::abs(r.loss);
  // Below the smallest normal float a partial sum may be flushed: 2^-126 each.
  for (std::size_t k = 0; k < N * D; ++k)
    r.d_e_bound[k] += rounding(d_e_dtype(p)) * std::abs(r.d_e[k]) + 0x1p-126 * static_cast<double>(V + 8);
  for (std::size_t k = 0; k < V * D; ++k)
    r.d_c_bound[k] += rounding(d_c_dtype(p)) * std::abs(r.d_c[k]) + 0x1p-126 * static_cast<double>(N + 8);
  return r;
}

}  // namespace cutloss::reference
