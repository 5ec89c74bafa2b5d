// What else is read off a logits tile, on request, while it is in L1.
#if defined(CUTLOSS_SRC_CPU_SIMD_METRICS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUTLOSS_SRC_CPU_SIMD_METRICS_INL_H_
#undef CUTLOSS_SRC_CPU_SIMD_METRICS_INL_H_
#else
#define CUTLOSS_SRC_CPU_SIMD_METRICS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "src/cpu/kernels.h"
#include "src/cpu/simd/math-inl.h"
#include "src/cpu/simd/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline void SumBelowPeak(const float* z, std::int64_t rows, PanelState state, const float* rescale, BelowPeak below) {
  const F32 d;
  const Vec zero = hn::Zero(d);
  for (std::size_t half = 0; half < kPanel; half += kLanes) {
    const Vec top = hn::Load(d, state.max + half);
    const Vec scale = hn::Load(d, rescale + half);
    // All terms are 0 or less: nothing cancels. Where exp() is 0 its argument may be -inf.
    const Vec old_mass = hn::Mul(hn::Load(d, below.mass + half), scale);
    const Vec climb = hn::Sub(hn::Load(d, below.peak + half), top);
    Vec partial = hn::IfThenZeroElse(hn::Eq(old_mass, zero), hn::Mul(old_mass, climb));
    for (std::int64_t v = 0; v < rows; ++v) {
      const Vec gap = hn::Sub(hn::Load(d, z + v * kPanel + half), top);
      const Vec e = ExpNonPositive(d, gap);
      partial = hn::Add(partial, hn::IfThenZeroElse(hn::Eq(e, zero), hn::Mul(e, gap)));
    }
    AddCompensated(d, partial, scale, below.sum + half, below.error + half);
    hn::Store(hn::Add(hn::Load(d, state.sum + half), hn::Load(d, state.sum_error + half)), d, below.mass + half);
    hn::Store(top, d, below.peak + half);
  }
}

// Row numbers are below 224 and counts as well: floats hold them.
inline void FindPeak(const float* z, std::int64_t rows, const float* label_logit, TilePeak peak) {
  const F32 d;
  const Vec one = hn::Set(d, 1.0f);
  for (std::size_t half = 0; half < kPanel; half += kLanes) {
    const Vec label = hn::Load(d, label_logit + half);
    Vec max = hn::Set(d, -std::numeric_limits<float>::infinity());
    Vec row = hn::Zero(d);
    Vec above = hn::Zero(d);
    for (std::int64_t v = 0; v < rows; ++v) {
      const Vec value = hn::Load(d, z + v * kPanel + half);
      const auto larger = hn::Gt(value, max);
      max = hn::IfThenElse(larger, value, max);
      row = hn::IfThenElse(larger, hn::Set(d, static_cast<float>(v)), row);
      above = hn::Add(above, hn::IfThenElseZero(hn::Gt(value, label), one));
    }
    hn::Store(max, d, peak.max + half);
    hn::Store(row, d, peak.row + half);
    hn::Store(above, d, peak.above + half);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#endif  // CUTLOSS_SRC_CPU_SIMD_METRICS_INL_H_
