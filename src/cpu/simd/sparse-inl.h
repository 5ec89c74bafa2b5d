// What the filters need: choosing the entries of a tile that are kept, and vector work on single rows.
#if defined(CUTLOSS_SRC_CPU_SIMD_SPARSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUTLOSS_SRC_CPU_SIMD_SPARSE_INL_H_
#undef CUTLOSS_SRC_CPU_SIMD_SPARSE_INL_H_
#else
#define CUTLOSS_SRC_CPU_SIMD_SPARSE_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "src/cpu/element.h"
#include "src/cpu/kernels.h"
#include "src/cpu/simd/math-inl.h"
#include "src/cpu/simd/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using U32 = hn::RebindToUnsigned<F32>;

// Uniform in (0, 1), from two keys of the token and the position in the vocabulary: two rounds of multiply and
// shift-xor (constants of the low-bias 32-bit hash found by C. Wellons' search, 0.17 % mean avalanche bias).
HWY_INLINE Vec Uniform(F32 d, hn::Vec<U32> position, hn::Vec<U32> key_a, hn::Vec<U32> key_b) {
  const U32 du;
  auto x = hn::Xor(hn::Mul(position, hn::Set(du, 0x9E3779B1u)), key_a);
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Mul(x, hn::Set(du, 0x7FEB352Du));
  x = hn::Add(hn::Xor(x, hn::ShiftRight<15>(x)), key_b);
  x = hn::Mul(x, hn::Set(du, 0x846CA68Bu));
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  // 31 bits, the half keeps 0 out: an entry of mass 0 is never kept.
  const hn::RebindToSigned<F32> di;
  const Vec bits = hn::ConvertTo(d, hn::BitCast(di, hn::ShiftRight<1>(x)));
  return hn::Mul(hn::Add(bits, hn::Set(d, 0.5f)), hn::Set(d, 0x1p-31f));
}

inline void Select(float* weights, std::int64_t rows, const Selection& s, std::uint32_t* masks) {
  const F32 d;
  const U32 du;
  std::memset(masks, 0, static_cast<std::size_t>(rows) * sizeof(std::uint32_t));
  for (std::size_t half = 0; half < kPanel; half += kLanes) {
    const Vec others = hn::Add(hn::Load(d, s.sum + half), hn::Load(d, s.sum_error + half));
    const Vec threshold = hn::Mul(hn::Add(others, hn::Load(d, s.label_mass + half)), hn::Set(d, s.epsilon));
    const auto key_a = hn::Load(du, s.keys + half);
    const auto key_b = hn::Load(du, s.keys + kPanel + half);
    Vec below = hn::Zero(d);
    Vec tail = hn::Zero(d);
    Vec kept = hn::Zero(d);
    for (std::int64_t v = 0; v < rows; ++v) {
      float* at = weights + v * kPanel + half;
      const Vec e = hn::Load(d, at);
      const auto small = hn::Lt(e, threshold);
      below = hn::Add(below, hn::IfThenElseZero(small, e));
      auto keep = hn::Ge(e, threshold);  // not the inverse of `small` for NaN, which is kept by neither
      if (s.unbiased) {
        const auto position = hn::Set(du, static_cast<std::uint32_t>(s.first + v));
        keep = hn::Gt(e, hn::Mul(Uniform(d, position, key_a, key_b), threshold));
        hn::Store(hn::Max(e, threshold), d, at);
      } else {
        const Vec slope = s.slopes == nullptr ? e : hn::Mul(e, hn::Load(d, s.slopes + v * kPanel + half));
        tail = hn::Add(tail, hn::IfThenElseZero(small, slope));
      }
      kept = hn::Add(kept, hn::IfThenElseZero(keep, hn::Set(d, 1.0f)));
      std::uint8_t bytes[8] = {};
      hn::StoreMaskBits(d, keep, bytes);
      std::uint32_t bits;
      std::memcpy(&bits, bytes, sizeof bits);
      masks[v] |= bits << half;
    }
    hn::Store(below, d, s.below + half);
    hn::Store(tail, d, s.tail + half);
    hn::Store(kept, d, s.kept + half);
  }
}

inline void LargestMagnitude(const float* tile, std::int64_t rows, float* largest) {
  const F32 d;
  for (std::size_t half = 0; half < kPanel; half += kLanes) {
    Vec max = hn::Zero(d);
    auto numbers = hn::Eq(max, max);
    for (std::int64_t v = 0; v < rows; ++v) {
      const Vec value = hn::Abs(hn::Load(d, tile + v * kPanel + half));
      numbers = hn::And(numbers, hn::Eq(value, value));
      max = hn::Max(max, value);
    }
    hn::StoreU(hn::IfThenElse(numbers, max, hn::NaN(d)), d, largest + half);
  }
}

// y[0, K vectors) += sum over k of factor[k] * row index[k]
template <std::size_t K>
HWY_INLINE void AddColumns(const float* HWY_RESTRICT rows, std::int64_t stride, const std::int64_t* index,
                           const float* factor, std::int64_t count, float* HWY_RESTRICT y) {
  const F32 d;
  Vec sum[K];
  for (std::size_t i = 0; i < K; ++i) sum[i] = hn::LoadU(d, y + i * kLanes);
  for (std::int64_t k = 0; k < count; ++k) {
    const Vec f = hn::Set(d, factor[k]);
    const float* x = rows + index[k] * stride;
    for (std::size_t i = 0; i < K; ++i) sum[i] = hn::MulAdd(f, hn::LoadU(d, x + i * kLanes), sum[i]);
  }
  for (std::size_t i = 0; i < K; ++i) hn::StoreU(sum[i], d, y + i * kLanes);
}

inline void AddRows(const float* rows, std::int64_t stride, const std::int64_t* index, const float* factor,
                    std::int64_t count, std::int64_t n, float* y) {
  // Ten sums, a factor and loads from memory fill 16 registers; D is mostly a multiple of 64 or 80 floats.
  constexpr std::size_t kMany = 10;
  std::int64_t i = 0;
  for (; i + static_cast<std::int64_t>(kMany * kLanes) <= n; i += kMany * kLanes) {
    AddColumns<kMany>(rows + i, stride, index, factor, count, y + i);
  }
  for (; i + static_cast<std::int64_t>(4 * kLanes) <= n; i += 4 * kLanes) {
    AddColumns<4>(rows + i, stride, index, factor, count, y + i);
  }
  for (; i + static_cast<std::int64_t>(kLanes) <= n; i += kLanes) {
    AddColumns<1>(rows + i, stride, index, factor, count, y + i);
  }
  for (; i < n; ++i) {
    for (std::int64_t k = 0; k < count; ++k) y[i] += factor[k] * rows[index[k] * stride + i];
  }
}

inline void ScaleRow(float factor, std::int64_t n, float* y) {
  const F32 d;
  const Vec f = hn::Set(d, factor);
  std::int64_t i = 0;
  for (; i + static_cast<std::int64_t>(kLanes) <= n; i += kLanes) hn::StoreU(hn::Mul(f, hn::LoadU(d, y + i)), d, y + i);
  for (; i < n; ++i) y[i] *= factor;
}

// sum of (x - center)^2; four partial sums, so that the error is below (n / (4 W) + 4) 2^-24 relative.
inline float SquaredDistance(const float* x, const float* center, std::int64_t n) {
  const F32 d;
  Vec sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + static_cast<std::int64_t>(kLanes) <= n; i += kLanes) {
    const Vec difference = hn::Sub(hn::LoadU(d, x + i), hn::LoadU(d, center + i));
    sum = hn::MulAdd(difference, difference, sum);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i) total += (x[i] - center[i]) * (x[i] - center[i]);
  return total;
}

HWY_INLINE Vec Widen(F32 d, const float* p) { return hn::LoadU(d, p); }
HWY_INLINE Vec Widen(F32 d, const Bf16* p) {
  const hn::Rebind<std::uint16_t, F32> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(U32(), bits)));
}
HWY_INLINE Vec Widen(F32 d, const F16* p) {
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

inline void WidenRow(const void* row, DType dtype, std::int64_t stride, std::int64_t n, float* out) {
  WithElement(dtype, row, [&](const auto* from) {
    const F32 d;
    std::int64_t i = 0;
    if (stride == 1) {
      for (; i + static_cast<std::int64_t>(kLanes) <= n; i += kLanes) hn::StoreU(Widen(d, from + i), d, out + i);
    }
    for (; i < n; ++i) out[i] = ToFloat(from[i * stride]);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#endif  // CUTLOSS_SRC_CPU_SIMD_SPARSE_INL_H_
