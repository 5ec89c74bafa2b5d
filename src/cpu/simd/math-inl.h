// exp and tanh for the softmax epilogues.
#if defined(CUTLOSS_SRC_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUTLOSS_SRC_CPU_SIMD_MATH_INL_H_
#undef CUTLOSS_SRC_CPU_SIMD_MATH_INL_H_
#else
#define CUTLOSS_SRC_CPU_SIMD_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using Vec = hn::Vec<F32>;

// exp(x) for x <= 0, at most 1 ULP off down to -87.3; below that, and at -inf, 0 (results that would be subnormal are
// flushed). NaN stays NaN: the power of two is applied by a multiplication, since adding it to the exponent bits of a
// NaN could make it a number.
HWY_INLINE Vec ExpNonPositive(F32 d, Vec x) {
  const hn::RebindToSigned<F32> di;
  const Vec lowest = hn::Set(d, -87.33654f);  // log of the smallest normal float
  const auto underflow = hn::Lt(x, lowest);
  const auto n = hn::NearestInt(hn::Mul(hn::IfThenElse(underflow, hn::Zero(d), x), hn::Set(d, 1.44269504f)));
  const Vec nf = hn::ConvertTo(d, n);
  // ln 2 in two parts, the first with 9 low bits clear, so that n * part is exact for |n| < 512.
  Vec r = hn::NegMulAdd(nf, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(nf, hn::Set(d, -2.12194440e-4f), r);
  // exp(r) = 1 + r + r^2 P(r): minimax in relative error over |r| <= ln(2)/2, 3e-9.
  Vec p = hn::Set(d, 0.001381453999f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.008368745246f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416683908f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.166665204f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.4999999343f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const Vec power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127))));
  return hn::IfThenZeroElse(underflow, hn::Mul(p, power));
}

// softcap * tanh(x / softcap), and its derivative 1 - tanh^2. With t = exp(-2|u|), u = x / softcap, tanh is
// (1 - t) / (1 + t) and the derivative 4t / (1 + t)^2, which keeps its relative accuracy where tanh rounds to 1.
// Near 0, where 1 - t cancels, an odd polynomial (minimax over |u| < 0.625, 4e-9 relative) takes over.
HWY_INLINE Vec Softcap(F32 d, Vec x, Vec cap, Vec inverse_cap, Vec& slope) {
  const Vec one = hn::Set(d, 1.0f);
  const Vec u = hn::Mul(x, inverse_cap);
  const Vec magnitude = hn::Abs(u);
  const Vec t = ExpNonPositive(d, hn::Mul(hn::Set(d, -2.0f), magnitude));
  const Vec inverse = hn::Div(one, hn::Add(one, t));
  slope = hn::Mul(hn::Mul(hn::Set(d, 4.0f), t), hn::Mul(inverse, inverse));
  const Vec far = hn::CopySign(hn::Mul(hn::Sub(one, t), inverse), u);
  const Vec u2 = hn::Mul(u, u);
  Vec p = hn::Set(d, -0.00570498439f);
  p = hn::MulAdd(p, u2, hn::Set(d, 0.02063908505f));
  p = hn::MulAdd(p, u2, hn::Set(d, -0.05373971446f));
  p = hn::MulAdd(p, u2, hn::Set(d, 0.1333144219f));
  p = hn::MulAdd(p, u2, hn::Set(d, -0.3333328194f));
  const Vec near = hn::MulAdd(hn::Mul(p, u2), u, u);
  return hn::Mul(cap, hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625f)), near, far));
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#endif  // CUTLOSS_SRC_CPU_SIMD_MATH_INL_H_
