#include "src/analysis/vectors.h"

namespace cutloss::analysis {
namespace {

template <typename T>
[[gnu::always_inline]] inline void add_loop(double a, const T* x, std::int64_t n, double* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += a * static_cast<double>(x[i]);
}

#if defined(__x86_64__) && defined(__GNUC__)
template <typename T>
__attribute__((target("avx2,fma"))) void add_avx2(double a, const T* x, std::int64_t n, double* y) {
  add_loop(a, x, n, y);
}
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}
#else
template <typename T>
void add_avx2(double a, const T* x, std::int64_t n, double* y) {
  add_loop(a, x, n, y);
}
bool has_avx2() { return false; }
#endif

}  // namespace

void add_scaled(double a, const float* x, std::int64_t n, double* y) {
  has_avx2() ? add_avx2(a, x, n, y) : add_loop(a, x, n, y);
}

void add_scaled(double a, const double* x, std::int64_t n, double* y) {
  has_avx2() ? add_avx2(a, x, n, y) : add_loop(a, x, n, y);
}

double dot(const double* x, const double* y, std::int64_t n) {
  double parts[8] = {};  // one sum after the other would wait four cycles for each
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int k = 0; k < 8; ++k) parts[k] += x[i + k] * y[i + k];
  }
  double sum = 0;
  for (; i < n; ++i) sum += x[i] * y[i];
  for (const double part : parts) sum += part;
  return sum;
}

}  // namespace cutloss::analysis
