// Array elements as they lie in the caller's memory, and their widening and rounding.
#ifndef CUTLOSS_SRC_CPU_ELEMENT_H_
#define CUTLOSS_SRC_CPU_ELEMENT_H_

#include <bit>
#include <cstdint>

namespace cutloss::cpu {

struct Bf16 {
  std::uint16_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

inline void FromFloat(float x, float& to) { to = x; }
// Round to nearest, ties to even; NaN stays NaN (the quiet bit is set, so that dropping the low bits cannot leave inf).
inline void FromFloat(float x, Bf16& to) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  to.bits = static_cast<std::uint16_t>(x == x ? rounded >> 16 : (bits >> 16) | 0x40);
}

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_ELEMENT_H_
