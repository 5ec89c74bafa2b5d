// Random arrays, and elements of any float dtype.
#ifndef CUTLOSS_SRC_CLI_DATA_H_
#define CUTLOSS_SRC_CLI_DATA_H_

#include <cstdint>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cpu/element.h"

namespace cutloss::cli {

// splitmix64: the same numbers on every machine, which <random>'s distributions do not promise.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  bool chance(double p) { return uniform() < p; }
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(limit));
  }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  template <typename T>
  const T& pick(const std::vector<T>& values) {
    return values[static_cast<std::size_t>(below(static_cast<std::int64_t>(values.size())))];
  }
  // Variance 1 and near enough to normal for test data: the sum of 4 uniform numbers of 16 bits.
  float normal() {
    const std::uint64_t word = bits();
    const auto part = [&](int shift) { return static_cast<int>((word >> shift) & 0xFFFF); };
    return static_cast<float>(part(0) + part(16) + part(32) + part(48) - 131070) * 2.64289e-5f;
  }

 private:
  std::uint64_t state_;
};

// An element of an f32, bf16 or f16 array.
inline float load(DType dtype, const void* data, std::int64_t index) {
  switch (dtype) {
    case DType::bf16: return cpu::ToFloat(static_cast<const cpu::Bf16*>(data)[index]);
    case DType::f16: return cpu::ToFloat(static_cast<const cpu::F16*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

inline void store(DType dtype, void* data, std::int64_t index, float value) {
  switch (dtype) {
    case DType::bf16: cpu::FromFloat(value, static_cast<cpu::Bf16*>(data)[index]); break;
    case DType::f16: cpu::FromFloat(value, static_cast<cpu::F16*>(data)[index]); break;
    default: static_cast<float*>(data)[index] = value;
  }
}

// Memory for `count` elements; not initialised beyond what the system gives.
inline std::vector<std::byte> array_of(DType dtype, std::int64_t count) {
  return std::vector<std::byte>(static_cast<std::size_t>(count) * size_of(dtype));
}

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_DATA_H_
