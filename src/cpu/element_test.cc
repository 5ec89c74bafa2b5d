// Widening and rounding of 16-bit floats, against arithmetic on their definition.
#include "src/cpu/element.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace cutloss::cpu {
namespace {

// The value of a half by the definition: sign, 5 bits of exponent, 10 of fraction.
double half_value(std::uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 0x1F;
  const int fraction = bits & 0x3FF;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

std::uint16_t rounded(float x) {
  F16 half;
  FromFloat(x, half);
  return half.bits;
}

TEST(F16, EveryValueIsWidenedExactlyAndComesBack) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide = ToFloat(F16{half});
    const double want = half_value(half);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
      EXPECT_EQ(rounded(wide), half | 0x200) << bits;  // NaN stays NaN, sign and payload too, and becomes quiet
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), want) << bits;
    ASSERT_EQ(std::signbit(wide), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(rounded(wide), half) << bits;
  }
}

// Between each two neighbours: the tie goes to the even one, a little to either side to the nearer.
TEST(F16, EveryTieGoesToEvenAndItsNeighboursToTheNearer) {
  for (int bits = 0; bits < 0x7C00; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits), high = static_cast<std::uint16_t>(bits + 1);
    const double above = bits == 0x7BFF ? 65536.0 : half_value(high);  // what inf stands for in rounding
    const auto tie = static_cast<float>((half_value(low) + above) / 2);
    const float before = std::nextafter(tie, 0.0f), after = std::nextafter(tie, INFINITY);
    for (const std::uint16_t sign : {0, 0x8000}) {
      const float s = sign != 0 ? -1.0f : 1.0f;
      ASSERT_EQ(rounded(s * tie), sign | (low % 2 == 0 ? low : high)) << tie;
      ASSERT_EQ(rounded(s * before), sign | low) << before;
      ASSERT_EQ(rounded(s * after), sign | high) << after;
    }
  }
}

TEST(F16, TinyGoesToZeroAndHugeToInfinityWithTheirSign) {
  EXPECT_EQ(rounded(0x1p-26f), 0);
  EXPECT_EQ(rounded(-std::numeric_limits<float>::denorm_min()), 0x8000);
  EXPECT_EQ(rounded(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(rounded(-65520.0f), 0xFC00);
  EXPECT_EQ(rounded(65519.996f), 0x7BFF);
  EXPECT_EQ(rounded(-INFINITY), 0xFC00);
}

TEST(Bf16, EveryValueComesBackAndEveryTieGoesToEven) {
  const auto bf16 = [](float x) {
    Bf16 to;
    FromFloat(x, to);
    return to.bits;
  };
  for (int bits = 0; bits < 0x7F80; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    ASSERT_EQ(bf16(ToFloat(Bf16{low})), low);
    const float tie = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16 | 0x8000);
    ASSERT_EQ(bf16(tie), low % 2 == 0 ? low : low + 1);
    ASSERT_EQ(bf16(-std::nextafter(tie, 0.0f)), 0x8000 | low);
    ASSERT_EQ(bf16(std::nextafter(tie, INFINITY)), low + 1);
  }
  EXPECT_TRUE(std::isnan(ToFloat(Bf16{bf16(std::bit_cast<float>(0x7F800001u))})));
}

}  // namespace
}  // namespace cutloss::cpu
