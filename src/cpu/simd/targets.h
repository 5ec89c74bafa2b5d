// Which of Highway's targets are compiled. Include it before hwy/foreach_target.h.
#ifndef CUTLOSS_SRC_CPU_SIMD_TARGETS_H_
#define CUTLOSS_SRC_CPU_SIMD_TARGETS_H_

// SSSE3 and AVX3_DL would add two copies of everything: the first CPUs with FMA have AVX2, and AVX3_DL's additions
// (integer dot products) are not used. SVE's vectors have no length at compile time, which panels need.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#define HWY_COMPILE_ALL_ATTAINABLE

#endif  // CUTLOSS_SRC_CPU_SIMD_TARGETS_H_
