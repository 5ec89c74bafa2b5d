// The floating-point environment of the kernels, whatever the host's: round to nearest, results below 2^-126 flushed.
#ifndef CUTLOSS_SRC_CPU_FLOAT_ENV_H_
#define CUTLOSS_SRC_CPU_FLOAT_ENV_H_

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace cutloss::cpu {

// Holds for a scope on this thread, then puts the host's settings back. Without flushing, a row whose softmax has a
// tail near 1e-38 takes 4 times as long on Zen 3, every sum of such weights being subnormal. Subnormal inputs are not
// touched: 1e-40 times a logit scale of 1e38 counts.
class KernelFloatEnv {
 public:
#if defined(__SSE__)
  KernelFloatEnv() : host_(_mm_getcsr()) { _mm_setcsr(kDefault | _MM_FLUSH_ZERO_ON); }
  ~KernelFloatEnv() { _mm_setcsr(host_); }

 private:
  static constexpr unsigned kDefault = 0x1F80;  // all exceptions masked, none raised, round to nearest
  unsigned host_;

 public:
#else
  KernelFloatEnv() = default;
  ~KernelFloatEnv() {}
#endif
  KernelFloatEnv(const KernelFloatEnv&) = delete;
  KernelFloatEnv& operator=(const KernelFloatEnv&) = delete;
};

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_FLOAT_ENV_H_
