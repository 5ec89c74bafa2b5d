// The one micro-kernel, an outer product held in registers, and the three matrix products made of it.
#if defined(CUTLOSS_SRC_CPU_SIMD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUTLOSS_SRC_CPU_SIMD_PRODUCTS_INL_H_
#undef CUTLOSS_SRC_CPU_SIMD_PRODUCTS_INL_H_
#else
#define CUTLOSS_SRC_CPU_SIMD_PRODUCTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

// The loops over accumulators must vanish: an array that is indexed at run time lives in memory, at a fifth of the
// speed. GCC does not unroll them at -O2. The loop over k must stay one: unrolled by R it spills on AVX2, for no gain.
#if HWY_COMPILER_CLANG
#define CUTLOSS_UNROLL _Pragma("clang loop unroll(full)")
#define CUTLOSS_KEEP_LOOP _Pragma("clang loop unroll(disable)")
#else
#define CUTLOSS_UNROLL _Pragma("GCC unroll 32")
#define CUTLOSS_KEEP_LOOP _Pragma("GCC unroll 1")
#endif

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());
constexpr std::size_t kPanel = 2 * kLanes;

enum class Store { kOverwrite, kAdd, kRescale, kCompensate };

// Returns sum + addend, and adds to error_at what that addition rounds away (Knuth's two-sum).
template <class D, class V>
HWY_INLINE V TwoSum(D d, V sum, V addend, float* error_at) {
  const V total = hn::Add(sum, addend);
  const V added = hn::Sub(total, sum);
  const V error = hn::Add(hn::Sub(sum, hn::Sub(total, added)), hn::Sub(addend, added));
  hn::Store(hn::Add(hn::Load(d, error_at), error), d, error_at);
  return total;
}

// For i < kRows, out[i][0, W) becomes the sum over o < outer, k < inner of
//   a[i * kRowStep + o * a_outer + k * kInnerStep] * b[o * inner + k][0, W)
// or is added to, or multiplied by rescale[0, W) and added to; kCompensate adds, and keeps what the addition rounds
// away in error[], which lies like out[].
template <int kRows, std::size_t kRowStep, std::size_t kInnerStep, Store kStore>
HWY_INLINE void OuterProduct(const float* HWY_RESTRICT a, std::size_t a_outer, std::size_t outer, std::size_t inner,
                             const float* HWY_RESTRICT b, const float* HWY_RESTRICT rescale, std::size_t out_stride,
                             float* HWY_RESTRICT out, float* HWY_RESTRICT error = nullptr) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  V left[kRows];
  V right[kRows];
  CUTLOSS_UNROLL
  for (int i = 0; i < kRows; ++i) left[i] = right[i] = hn::Zero(d);
  if constexpr (kStore != Store::kOverwrite) {
    // Fetched while the products run; asked for only at the end they cost a sixth of the time (75 for 89 GFLOP/s).
    CUTLOSS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      hwy::Prefetch(out + i * out_stride);
      if (kPanel > 16) hwy::Prefetch(out + i * out_stride + 16);
    }
  }
  for (std::size_t o = 0; o < outer; ++o) {
    const float* HWY_RESTRICT column = a + o * a_outer;
    CUTLOSS_KEEP_LOOP
    for (std::size_t k = 0; k < inner; ++k) {
      const V b_left = hn::Load(d, b);
      const V b_right = hn::Load(d, b + kLanes);
      CUTLOSS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const V scalar = hn::Set(d, column[i * kRowStep]);
        left[i] = hn::MulAdd(scalar, b_left, left[i]);
        right[i] = hn::MulAdd(scalar, b_right, right[i]);
      }
      b += kPanel;
      column += kInnerStep;
    }
  }
  CUTLOSS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    float* HWY_RESTRICT to = out + i * out_stride;
    if constexpr (kStore == Store::kRescale) {
      left[i] = hn::MulAdd(hn::Load(d, to), hn::Load(d, rescale), left[i]);
      right[i] = hn::MulAdd(hn::Load(d, to + kLanes), hn::Load(d, rescale + kLanes), right[i]);
    } else if constexpr (kStore == Store::kAdd) {
      left[i] = hn::Add(hn::Load(d, to), left[i]);
      right[i] = hn::Add(hn::Load(d, to + kLanes), right[i]);
    } else if constexpr (kStore == Store::kCompensate) {
      left[i] = TwoSum(d, hn::Load(d, to), left[i], error + i * out_stride);
      right[i] = TwoSum(d, hn::Load(d, to + kLanes), right[i], error + i * out_stride + kLanes);
    }
    hn::Store(left[i], d, to);
    hn::Store(right[i], d, to + kLanes);
  }
}

template <int R>
void MultiplyAddChains(std::int64_t iterations, float* sink) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  V chain[2 * R];
  CUTLOSS_UNROLL
  for (int i = 0; i < 2 * R; ++i) chain[i] = hn::Set(d, static_cast<float>(i));
  const V factor = hn::Set(d, 0.5f);
  const V term = hn::Set(d, sink[0]);
  for (std::int64_t k = 0; k < iterations; ++k) {
    CUTLOSS_UNROLL
    for (int i = 0; i < 2 * R; ++i) chain[i] = hn::MulAdd(chain[i], factor, term);
  }
  CUTLOSS_UNROLL
  for (int i = 1; i < 2 * R; ++i) chain[0] = hn::Add(chain[0], chain[i]);
  hn::StoreU(chain[0], d, sink);
}

// Columns of the hidden states per sweep over the groups: 256 keep that part of the panel (16 KiB on AVX2) in L1, where
// a whole panel of D = 640 would come from L2 for every group (92 for 85 GFLOP/s).
constexpr std::int64_t kColumnBlock = 256;

template <int R>
void Logits(const float* head, std::size_t head_stride, std::int64_t groups, const float* tokens, std::int64_t hidden,
            float* logits) {
  for (std::int64_t column = 0; column < hidden; column += kColumnBlock) {
    const auto columns = static_cast<std::size_t>(hidden - column < kColumnBlock ? hidden - column : kColumnBlock);
    for (std::int64_t g = 0; g < groups; ++g) {
      const float* rows = head + g * head_stride + column * R;
      const float* panel = tokens + column * kPanel;
      float* out = logits + g * R * kPanel;
      if (column == 0) {
        OuterProduct<R, 1, R, Store::kOverwrite>(rows, 0, 1, columns, panel, nullptr, kPanel, out);
      } else {
        OuterProduct<R, 1, R, Store::kAdd>(rows, 0, 1, columns, panel, nullptr, kPanel, out);
      }
    }
  }
}

template <int R>
void HiddenGradient(const float* head, std::size_t head_stride, std::int64_t groups, const float* weights,
                    std::int64_t padded_hidden, const float* rescale, float* accumulator) {
  for (std::int64_t column = 0; column < padded_hidden; column += R) {
    OuterProduct<R, R, 1, Store::kRescale>(head + column * R, head_stride, static_cast<std::size_t>(groups), R, weights,
                                           rescale, kPanel, accumulator + column * kPanel);
  }
}

template <int R>
void HeadGradient(const float* gradient, std::size_t panel_stride, std::int64_t panels, const float* slices,
                  std::int64_t token_rows, std::int64_t groups, std::int64_t out_stride, bool accumulate, float* out,
                  float* error) {
  if (!accumulate) std::memset(error, 0, static_cast<std::size_t>(groups * R * out_stride) * sizeof(float));
  // Slice outermost: its panels * W rows (32 KiB at 512 tokens on AVX2) stay in L1 while the gradient streams from L2.
  for (std::int64_t column = 0; column < out_stride; column += kPanel) {
    const float* slice = slices + column * token_rows;
    for (std::int64_t g = 0; g < groups; ++g) {
      const float* rows = gradient + g * R * kPanel;
      const std::int64_t at = g * R * out_stride + column;
      const auto outer = static_cast<std::size_t>(panels);
      const auto stride = static_cast<std::size_t>(out_stride);
      if (accumulate) {
        OuterProduct<R, kPanel, 1, Store::kCompensate>(rows, panel_stride, outer, kPanel, slice, nullptr, stride,
                                                       out + at, error + at);
      } else {
        OuterProduct<R, kPanel, 1, Store::kOverwrite>(rows, panel_stride, outer, kPanel, slice, nullptr, stride,
                                                      out + at);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#endif  // CUTLOSS_SRC_CPU_SIMD_PRODUCTS_INL_H_
