// The floating-point environment of the kernels, whatever the host's: round to nearest, results below 2^-126 flushed.
#ifndef CUTLOSS_SRC_CPU_FLOAT_ENV_H_
#define CUTLOSS_SRC_CPU_FLOAT_ENV_H_

#if defined(__SSE__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace cutloss::cpu {

// Holds for a scope on this thread, then puts the host's settings back, exception flags included; the host's traps do
// not fire within. Without flushing, a row whose softmax has a tail near 1e-38 takes 4 times as long on Zen 3, every
// sum of such weights being subnormal. Subnormal inputs count, in E times a table of 1e37 or a logit scale of 1e38; only
// where such a scale (other than 1) leaves a hidden state below 2^-126 is it 0.
class KernelFloatEnv {
 public:
#if defined(__SSE__)
  KernelFloatEnv() : host_(_mm_getcsr()) { _mm_setcsr(kDefault | _MM_FLUSH_ZERO_ON); }
  ~KernelFloatEnv() { _mm_setcsr(host_); }
#else  // flushing is left as the host has it
  KernelFloatEnv() {
    std::feholdexcept(&host_);
    std::fesetround(FE_TONEAREST);
  }
  ~KernelFloatEnv() { std::fesetenv(&host_); }
#endif
  KernelFloatEnv(const KernelFloatEnv&) = delete;
  KernelFloatEnv& operator=(const KernelFloatEnv&) = delete;

 private:
#if defined(__SSE__)
  static constexpr unsigned kDefault = 0x1F80;  // all exceptions masked, none raised, round to nearest
  unsigned host_;
#else
  std::fenv_t host_;
#endif
};

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_FLOAT_ENV_H_
