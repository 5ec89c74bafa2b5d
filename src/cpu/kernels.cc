// Compiles the simd/ headers once per target of kernels.inc and hands out the resulting tables.
#include "src/cpu/kernels.h"

#include "src/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/kernels.cc"
#include "hwy/foreach_target.h"  // re-includes this file once per target
#include "hwy/highway.h"
#include "src/cpu/simd/math-inl.h"
#include "src/cpu/simd/metrics-inl.h"
#include "src/cpu/simd/pack-inl.h"
#include "src/cpu/simd/products-inl.h"
#include "src/cpu/simd/softmax-inl.h"
#include "src/cpu/simd/sparse-inl.h"

#ifndef CUTLOSS_KERNEL_LINES
#define CUTLOSS_KERNEL_LINES
namespace cutloss::cpu {
namespace {

struct KernelLine {
  std::int64_t target;
  const char* name;
  int rows;
};

constexpr KernelLine kKernelLines[] = {
#define CUTLOSS_KERNELS(target, name, rows) {HWY_##target, name, rows},
#include "src/cpu/kernels.inc"
#undef CUTLOSS_KERNELS
};

constexpr KernelLine LineOf(std::int64_t target) {
  for (const KernelLine& line : kKernelLines) {
    if (line.target == target) return line;
  }
  return {0, "", 0};
}

}  // namespace
}  // namespace cutloss::cpu
#endif  // CUTLOSS_KERNEL_LINES

HWY_BEFORE_NAMESPACE();
namespace cutloss::cpu {
namespace HWY_NAMESPACE {

template <int R>
void SoftmaxOf(const float* z, std::int64_t rows, std::int64_t groups, const float* slopes, PanelState state,
               float* weights, float* rescale) {
  Softmax(z, rows, groups * R, slopes, state, weights, rescale);
}

template <int R>
void SmoothOf(const float* z, const float* slopes, std::int64_t rows, std::int64_t groups, const float* class_weights,
              float* weights, float* sum, float* sum_error) {
  Smooth(z, slopes, rows, groups * R, class_weights, weights, sum, sum_error);
}

template <int R>
void LogitsGradientOf(float* logits, std::int64_t rows, std::int64_t groups, const std::int64_t* label_row,
                      float softcap, PanelGradient gradient, const float* class_weights) {
  LogitsGradient(logits, rows, groups * R, label_row, softcap, gradient, class_weights);
}

inline void ExpForTest(const float* x, std::size_t n, float* y) {
  const F32 d;
  for (std::size_t i = 0; i < n; i += kLanes) hn::StoreU(ExpNonPositive(d, hn::LoadU(d, x + i)), d, y + i);
}

template <int R>
constexpr Kernels MakeKernels(const char* name) {
  return Kernels{name,
                 HWY_TARGET,
                 static_cast<int>(kPanel),
                 R,
                 &PackHead<R>,
                 &Logits<R>,
                 &SoftcapTile,
                 &SoftmaxOf<R>,
                 &SmoothOf<R>,
                 &SumBelowPeak,
                 &FindPeak,
                 &Select,
                 &AddRows,
                 &ScaleRow,
                 &SquaredDistance,
                 &WidenRow,
                 &HiddenGradient<R>,
                 &LogitsGradientOf<R>,
                 &LargestMagnitude,
                 &HeadGradient<R>,
                 &MultiplyAddChains<R>,
                 &ExpForTest};
}

const Kernels* Table() {
  static constexpr KernelLine kLine = LineOf(HWY_TARGET);
  static constexpr Kernels kKernels = MakeKernels<kLine.rows>(kLine.name);
  return &kKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace cutloss::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <bit>
#include <vector>

#include "hwy/targets.h"

namespace cutloss::cpu {
namespace {

HWY_EXPORT(Table);

// Highway's table has one slot per target of the architecture, and a last one for the plain C++ target.
const Kernels* TableOf(std::int64_t target) {
#if (HWY_TARGETS & (HWY_TARGETS - 1)) == 0
  (void)target;
  return HWY_STATIC_DISPATCH(Table)();
#else
  const bool plain = target == HWY_SCALAR || target == HWY_EMU128;
  const std::int64_t slot = plain ? HWY_CHOSEN_TARGET_MASK_SCALAR : HWY_CHOSEN_TARGET_SHIFT(target);
  return HWY_DISPATCH_TABLE(Table)[std::countr_zero(static_cast<std::uint64_t>(slot))]();
#endif
}

std::vector<const Kernels*> Supported() {
  std::vector<const Kernels*> found;
  // The plain C++ target is not in SupportedTargets() where a better baseline exists, yet always runs.
  const std::int64_t runnable = (hwy::SupportedTargets() | HWY_SCALAR | HWY_EMU128) & HWY_TARGETS;
  for (const KernelLine& line : kKernelLines) {
    if (line.target & runnable) found.push_back(TableOf(line.target));
  }
  return found;
}

}  // namespace

std::span<const Kernels* const> supported_kernels() {
  static const std::vector<const Kernels*> kernels = Supported();
  return kernels;
}

const Kernels* find_kernels(std::string_view name) {
  for (const Kernels* kernels : supported_kernels()) {
    if (name == kernels->name) return kernels;
  }
  return nullptr;
}

}  // namespace cutloss::cpu

#endif  // HWY_ONCE
