// Every register tile height on every vector length: a machine without AVX-512 still tests avx512's R = 14, in vectors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <vector>

#include "src/cpu/kernels.h"
#include "src/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/simd/shapes_test.cc"
#include "hwy/foreach_target.h"  // re-includes this file once per target
#include "hwy/highway.h"
#include "src/cpu/simd/pack-inl.h"
#include "src/cpu/simd/products-inl.h"

#ifndef CUTLOSS_SHAPES_TEST_ONCE
#define CUTLOSS_SHAPES_TEST_ONCE
namespace cutloss::cpu {

// Deterministic values in [-1, 1).
inline float value_at(std::size_t i) { return static_cast<float>(i * 7919 % 2003) / 1001.5f - 1.0f; }

class AlignedFloats {
 public:
  explicit AlignedFloats(std::size_t count) : data_(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64)), count_(count) {
    for (std::size_t i = 0; i < count; ++i) data()[i] = NAN;
  }
  ~AlignedFloats() { std::free(data_); }
  AlignedFloats(const AlignedFloats&) = delete;
  float* data() { return static_cast<float*>(data_); }
  std::size_t size() const { return count_; }

 private:
  void* data_;
  std::size_t count_;
};

}  // namespace cutloss::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

// The sum of n products of values below 1 in f32 is off by at most n * (n + 1) * 2^-24.
inline double bound(std::int64_t n) { return static_cast<double>(n * (n + 1)) * 0x1p-24; }

template <int R>
void TestShape(std::int64_t hidden, std::int64_t rows) {
  const std::int64_t groups = (rows + R - 1) / R;
  const std::int64_t padded = (hidden + R - 1) / R * R;
  const auto stride = head_stride(padded, R);
  std::vector<float> table(static_cast<std::size_t>(rows * hidden));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = value_at(i);

  AlignedFloats head(stride * static_cast<std::size_t>(groups));
  PackHead<R>(table.data(), DType::f32, hidden, 1, nullptr, 0, rows, hidden, padded, head.data());
  const auto packed = [&](std::int64_t v, std::int64_t d) {
    return head.data()[static_cast<std::size_t>(v / R) * stride + static_cast<std::size_t>(d * R + v % R)];
  };
  for (std::int64_t v = 0; v < groups * R; ++v) {
    for (std::int64_t d = 0; d < padded; ++d) {
      const float want = v < rows && d < hidden ? table[static_cast<std::size_t>(v * hidden + d)] : 0.0f;
      ASSERT_EQ(packed(v, d), want) << "pack R=" << R << " v=" << v << " d=" << d << " D=" << hidden;
    }
  }

  const auto w = static_cast<std::int64_t>(kPanel);
  AlignedFloats tokens(static_cast<std::size_t>(hidden * w));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens.data()[i] = value_at(i + 11);
  AlignedFloats logits(static_cast<std::size_t>(groups * R * w));
  Logits<R>(head.data(), stride, groups, tokens.data(), hidden, logits.data());
  for (std::int64_t v = 0; v < groups * R; ++v) {
    for (std::int64_t lane = 0; lane < w; ++lane) {
      double want = 0;
      for (std::int64_t d = 0; d < hidden; ++d) want += static_cast<double>(packed(v, d)) * tokens.data()[d * w + lane];
      ASSERT_NEAR(logits.data()[v * w + lane], want, bound(hidden))
          << "logits R=" << R << " v=" << v << " D=" << hidden;
    }
  }

  AlignedFloats rescale(static_cast<std::size_t>(w));
  AlignedFloats accumulator(static_cast<std::size_t>(padded * w));
  for (std::int64_t lane = 0; lane < w; ++lane) rescale.data()[lane] = value_at(static_cast<std::size_t>(lane));
  for (std::size_t i = 0; i < accumulator.size(); ++i) accumulator.data()[i] = value_at(i + 5);
  AlignedFloats weights(static_cast<std::size_t>(groups * R * w));
  for (std::size_t i = 0; i < weights.size(); ++i) weights.data()[i] = value_at(i + 3);
  HiddenGradient<R>(head.data(), stride, groups, weights.data(), padded, rescale.data(), accumulator.data());
  for (std::int64_t d = 0; d < padded; ++d) {
    for (std::int64_t lane = 0; lane < w; ++lane) {
      const auto at = static_cast<std::size_t>(d * w + lane);
      double want = static_cast<double>(value_at(at + 5)) * rescale.data()[lane];
      for (std::int64_t v = 0; v < groups * R; ++v)
        want += static_cast<double>(packed(v, d)) * weights.data()[v * w + lane];
      ASSERT_NEAR(accumulator.data()[at], want, bound(groups * R + 1)) << "hidden_gradient R=" << R << " d=" << d;
    }
  }
}

void TestShapes() {
  // D around the quads of packing and the column block of the logits; rows around both group heights.
  for (const std::int64_t hidden : {1, 3, 4, 5, 8, 13, 16, 31, 256, 257, 515}) {
    for (const std::int64_t rows : {1, 6, 7, 14, 15, 28}) {
      TestShape<6>(hidden, rows);
      TestShape<14>(hidden, rows);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "hwy/targets.h"

namespace cutloss::cpu {
namespace {

HWY_EXPORT(TestShapes);

TEST(Shapes, EveryTileHeightOnEveryVectorLength) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    SCOPED_TRACE(hwy::TargetName(target));
    HWY_DYNAMIC_DISPATCH(TestShapes)();
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace
}  // namespace cutloss::cpu

#endif  // HWY_ONCE
