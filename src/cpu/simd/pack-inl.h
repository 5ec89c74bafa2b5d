// Packing a block of the head's table into a head tile: widening, transposing, padding. Every dtype, layout and stride
// ends in the one f32 form the products read, at 1-2 % of their time for blocks of 512 tokens or more.
#if defined(CUTLOSS_SRC_CPU_SIMD_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUTLOSS_SRC_CPU_SIMD_PACK_INL_H_
#undef CUTLOSS_SRC_CPU_SIMD_PACK_INL_H_
#else
#define CUTLOSS_SRC_CPU_SIMD_PACK_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "src/cpu/element.h"
#include "src/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR  // has no vectors of four

using Quad = hn::FixedTag<float, 4>;

HWY_INLINE hn::Vec<Quad> LoadQuad(const float* p) { return hn::LoadU(Quad(), p); }
HWY_INLINE hn::Vec<Quad> LoadQuad(const Bf16* p) {
  const hn::FixedTag<std::uint16_t, 4> d16;
  const hn::FixedTag<std::uint32_t, 4> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(Quad(), hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

HWY_INLINE hn::Vec<Quad> LoadQuad(const F16* p) {
  const hn::FixedTag<hwy::float16_t, 4> d16;
  return hn::PromoteTo(Quad(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

// Four columns of four table rows -> to[column * R + row]. `count` < 4 repeats a row in place of those missing.
template <int R, typename T>
HWY_INLINE void TransposeQuad(const T* const* from, std::int64_t column, int count, float* to) {
  const Quad d;
  const auto r0 = LoadQuad(from[0] + column);
  const auto r1 = LoadQuad(from[count > 1 ? 1 : 0] + column);
  const auto r2 = LoadQuad(from[count > 2 ? 2 : 0] + column);
  const auto r3 = LoadQuad(from[count > 3 ? 3 : 0] + column);
  const auto a = hn::InterleaveLower(d, r0, r2);
  const auto b = hn::InterleaveLower(d, r1, r3);
  const auto c = hn::InterleaveUpper(d, r0, r2);
  const auto e = hn::InterleaveUpper(d, r1, r3);
  hn::StoreU(hn::InterleaveLower(d, a, b), d, to);
  hn::StoreU(hn::InterleaveUpper(d, a, b), d, to + R);
  hn::StoreU(hn::InterleaveLower(d, c, e), d, to + 2 * R);
  hn::StoreU(hn::InterleaveUpper(d, c, e), d, to + 3 * R);
}

// One full group of R rows whose columns are contiguous. Rows are taken four at a time; the last quad of R = 6 or 14
// has only two rows and its stores run two floats into the next column, so it goes first and is then overwritten.
// After the last column those two floats land in the padding that head_stride() leaves.
template <int R, typename T>
HWY_INLINE void PackGroupByRows(const T* const* from, std::int64_t hidden, float* to) {
  constexpr int kFull = R / 4 * 4;
  std::int64_t column = 0;
  for (; column + 4 <= hidden; column += 4) {
    if constexpr (kFull < R) {
      TransposeQuad<R>(from + kFull, column, R - kFull, to + column * R + kFull);
    }
    for (int row = 0; row < kFull; row += 4) TransposeQuad<R>(from + row, column, 4, to + column * R + row);
  }
  for (; column < hidden; ++column) {
    for (int row = 0; row < R; ++row) to[column * R + row] = ToFloat(from[row][column]);
  }
}

#else

template <int R, typename T>
HWY_INLINE void PackGroupByRows(const T* const* from, std::int64_t hidden, float* to) {
  for (std::int64_t column = 0; column < hidden; ++column) {
    for (int row = 0; row < R; ++row) to[column * R + row] = ToFloat(from[row][column]);
  }
}

#endif

template <int R, typename T>
void PackHeadTyped(const T* table, std::int64_t stride_v, std::int64_t stride_d, const std::int64_t* order,
                   std::int64_t row, std::int64_t rows, std::int64_t hidden, std::int64_t padded_hidden, float* tile) {
  const std::size_t group_stride = head_stride(padded_hidden, R);
  for (std::int64_t done = 0; done < rows; done += R) {
    const std::int64_t count = rows - done < R ? rows - done : R;
    const T* from[R];
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = row + done + i;
      from[i] = table + (order == nullptr ? at : order[at]) * stride_v;
    }
    if (count == R && stride_d == 1) {
      PackGroupByRows<R>(from, hidden, tile);
    } else {
      for (std::int64_t column = 0; column < hidden; ++column) {
        for (std::int64_t i = 0; i < count; ++i) tile[column * R + i] = ToFloat(from[i][column * stride_d]);
        for (std::int64_t i = count; i < R; ++i) tile[column * R + i] = 0.0f;
      }
    }
    std::memset(tile + hidden * R, 0, static_cast<std::size_t>((padded_hidden - hidden) * R) * sizeof(float));
    tile += group_stride;
  }
}

template <int R>
void PackHead(const void* table, DType dtype, std::int64_t stride_v, std::int64_t stride_d, const std::int64_t* order,
              std::int64_t row, std::int64_t rows, std::int64_t hidden, std::int64_t padded_hidden, float* tile) {
  WithElement(dtype, table, [&](const auto* typed) {
    PackHeadTyped<R>(typed, stride_v, stride_d, order, row, rows, hidden, padded_hidden, tile);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#endif  // CUTLOSS_SRC_CPU_SIMD_PACK_INL_H_
