// Array elements as they lie in the caller's memory, and their widening and rounding.
#ifndef CUTLOSS_SRC_CPU_ELEMENT_H_
#define CUTLOSS_SRC_CPU_ELEMENT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cutloss/cutloss.hpp"

namespace cutloss::cpu {

struct Bf16 {
  std::uint16_t bits;
};

// IEEE 754 binary16, by bit operations alone: no compiler type, no instruction set, and the same in every build.
struct F16 {
  std::uint16_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
inline float ToFloat(F16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000) << 16;
  const std::uint32_t magnitude = x.bits & 0x7FFF;
  if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  // Exponents differ by 112. A subnormal is a multiple of 2^-24, which f32 holds exactly as a normal number.
  if (magnitude >= 0x400) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -value : value;
}

inline void FromFloat(float x, float& to) { to = x; }
// Round to nearest, ties to even; NaN stays NaN (the quiet bit is set, so that dropping the low bits cannot leave inf).
inline void FromFloat(float x, Bf16& to) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  to.bits = static_cast<std::uint16_t>(x == x ? rounded >> 16 : (bits >> 16) | 0x40);
}
// The same; from 65520 on the nearest is inf.
inline void FromFloat(float x, F16& to) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  std::uint32_t half;
  if (magnitude > 0x7F800000) {
    half = 0x7E00 | (magnitude >> 13 & 0x1FF);
  } else if (magnitude >= 0x477FF000) {
    half = 0x7C00;
  } else if (magnitude >= 0x38800000) {  // 2^-14, the smallest normal
    half = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  } else if (magnitude >= 0x33000000) {  // 2^-25, half of the smallest subnormal
    const std::uint32_t shift = 126 - (magnitude >> 23);
    const std::uint32_t fraction = (magnitude & 0x7FFFFF) | 0x800000;
    const std::uint32_t below_half = (1u << (shift - 1)) - 1;
    half = (fraction + below_half + (fraction >> shift & 1)) >> shift;
  } else {
    half = 0;
  }
  to.bits = static_cast<std::uint16_t>(sign | half);
}

// visit(data as a pointer to its element type), for the three float dtypes.
template <typename Data, typename Visit>
void WithElement(DType dtype, Data* data, const Visit& visit) {
  using As = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  const auto as = [&]<typename T>(T) {
    using To = std::conditional_t<std::is_const_v<As>, const T, T>;
    visit(static_cast<To*>(data));
  };
  switch (dtype) {
    case DType::bf16: return as(Bf16{});
    case DType::f16: return as(F16{});
    default: return as(float{});
  }
}

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_ELEMENT_H_
