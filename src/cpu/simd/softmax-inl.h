// The epilogues: what happens to a logits tile while it is still in L1. Lanes are tokens, so a row's maximum, sum and
// rescaling are lane-wise; no horizontal sum anywhere. On AVX2 at D = 640 this is about 3 % of the products' time.
#if defined(CUTLOSS_SRC_CPU_SIMD_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUTLOSS_SRC_CPU_SIMD_SOFTMAX_INL_H_
#undef CUTLOSS_SRC_CPU_SIMD_SOFTMAX_INL_H_
#else
#define CUTLOSS_SRC_CPU_SIMD_SOFTMAX_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "src/cpu/kernels.h"
#include "src/cpu/simd/math-inl.h"
#include "src/cpu/simd/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline HWY_MAYBE_UNUSED void ZeroRows(float* tile, std::int64_t from, std::int64_t to) {
  const hn::ScalableTag<float> d;
  for (std::int64_t v = from; v < to; ++v) {
    hn::Store(hn::Zero(d), d, tile + v * kPanel);
    hn::Store(hn::Zero(d), d, tile + v * kPanel + kLanes);
  }
}

// Adds a tile's partial sum to the running one; the rounding error of each addition is kept beside it. Over the 2,700
// tiles of a 262,144-entry vocabulary a plain f32 sum is off by 1e-3.
HWY_INLINE void AddCompensated(F32 d, Vec addend, Vec rescale, float* sum_at, float* error_at) {
  hn::Store(hn::Mul(hn::Load(d, error_at), rescale), d, error_at);
  hn::Store(TwoSum(d, hn::Mul(hn::Load(d, sum_at), rescale), addend, error_at), d, sum_at);
}

inline void SoftcapTile(const float* logits, std::int64_t rows, float softcap, float* z, float* slopes) {
  const F32 d;
  const Vec cap = hn::Set(d, softcap);
  const Vec inverse_cap = hn::Set(d, 1.0f / softcap);
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows) * kPanel; i += kLanes) {
    Vec slope;
    hn::Store(Softcap(d, hn::Load(d, logits + i), cap, inverse_cap, slope), d, z + i);
    hn::Store(slope, d, slopes + i);
  }
}

inline void Softmax(const float* z, std::int64_t rows, std::int64_t groups_rows, const float* slopes, PanelState state,
                    float* weights, float* rescale) {
  const F32 d;
  for (std::size_t half = 0; half < kPanel; half += kLanes) {
    const Vec old_max = hn::Load(d, state.max + half);
    Vec max_even = old_max;
    Vec max_odd = old_max;
    std::int64_t v = 0;
    for (; v + 2 <= rows; v += 2) {
      max_even = hn::Max(max_even, hn::Load(d, z + v * kPanel + half));
      max_odd = hn::Max(max_odd, hn::Load(d, z + (v + 1) * kPanel + half));
    }
    if (v < rows) max_even = hn::Max(max_even, hn::Load(d, z + v * kPanel + half));
    const Vec max = hn::Max(max_even, max_odd);
    const Vec scale = ExpNonPositive(d, hn::Sub(old_max, max));
    hn::Store(max, d, state.max + half);
    hn::Store(scale, d, rescale + half);

    Vec sum_even = hn::Zero(d);
    Vec sum_odd = hn::Zero(d);
    for (v = 0; v < rows; ++v) {
      const std::size_t at = static_cast<std::size_t>(v) * kPanel + half;
      const Vec e = ExpNonPositive(d, hn::Sub(hn::Load(d, z + at), max));
      if (v % 2 == 0) {
        sum_even = hn::Add(sum_even, e);
      } else {
        sum_odd = hn::Add(sum_odd, e);
      }
      hn::Store(slopes != nullptr ? hn::Mul(e, hn::Load(d, slopes + at)) : e, d, weights + at);
    }
    AddCompensated(d, hn::Add(sum_even, sum_odd), scale, state.sum + half, state.sum_error + half);
  }
  ZeroRows(weights, rows, groups_rows);
}

inline void Smooth(const float* z, const float* slopes, std::int64_t rows, std::int64_t groups_rows,
                   const float* class_weights, float* weights, float* sum, float* sum_error) {
  const F32 d;
  const Vec one = hn::Set(d, 1.0f);
  const Vec lowest = hn::Set(d, std::numeric_limits<float>::lowest());
  for (std::size_t half = 0; half < kPanel; half += kLanes) {
    Vec partial = hn::Zero(d);
    for (std::int64_t v = 0; v < rows; ++v) {
      const std::size_t at = static_cast<std::size_t>(v) * kPanel + half;
      const Vec class_weight = class_weights == nullptr ? one : hn::Set(d, class_weights[v]);
      const Vec value = hn::Load(d, z + at);
      partial = hn::Add(partial, hn::IfThenZeroElse(hn::Lt(value, lowest), hn::Mul(class_weight, value)));
      hn::Store(hn::Mul(class_weight, hn::Load(d, slopes + at)), d, weights + at);
    }
    hn::Store(TwoSum(d, hn::Load(d, sum + half), partial, sum_error + half), d, sum + half);
  }
  ZeroRows(weights, rows, groups_rows);
}

inline void LogitsGradient(float* logits, std::int64_t rows, std::int64_t groups_rows, const std::int64_t* label_row,
                           float softcap, PanelGradient gradient, const float* class_weights) {
  const F32 d;
  const bool capped = softcap > 0.0f;
  const bool smoothed = gradient.smooth != nullptr;
  const Vec cap = hn::Set(d, softcap);
  const Vec inverse_cap = hn::Set(d, capped ? 1.0f / softcap : 0.0f);
  for (std::size_t half = 0; half < kPanel; half += kLanes) {
    const Vec max = hn::Load(d, gradient.max + half);
    const Vec weight = hn::Load(d, gradient.weight + half);
    const Vec smooth = smoothed ? hn::Load(d, gradient.smooth + half) : hn::Zero(d);
    for (std::int64_t v = 0; v < rows; ++v) {
      float* at = logits + v * kPanel + half;
      Vec z = hn::Load(d, at);
      Vec slope = hn::Set(d, 1.0f);
      if (capped) z = Softcap(d, z, cap, inverse_cap, slope);
      Vec dz = hn::Mul(ExpNonPositive(d, hn::Sub(z, max)), weight);
      if (smoothed) dz = hn::Sub(dz, class_weights == nullptr ? smooth : hn::Mul(smooth, hn::Set(d, class_weights[v])));
      hn::Store(capped ? hn::Mul(dz, slope) : dz, d, at);
    }
  }
  for (std::size_t lane = 0; lane < kPanel; ++lane) {
    const std::int64_t row = label_row[lane];
    if (row >= 0 && row < rows) logits[static_cast<std::size_t>(row) * kPanel + lane] = gradient.label_grad[lane];
  }
  ZeroRows(logits, rows, groups_rows);
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#endif  // CUTLOSS_SRC_CPU_SIMD_SOFTMAX_INL_H_
