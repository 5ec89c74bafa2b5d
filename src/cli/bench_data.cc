#include "src/cli/bench_data.h"

#include <algorithm>
#include <cmath>

#include "src/cli/data.h"

namespace cutloss::cli {
namespace {

// One stream of random numbers for every 64 Ki elements, so that threads share the work; a table of 262144 x 2304
// would take a single one seconds.
void fill(DType dtype, std::vector<std::byte>& array, float scale, std::uint64_t seed, int threads) {
  constexpr std::int64_t kPart = 1 << 16;
  const std::int64_t count = static_cast<std::int64_t>(array.size() / size_of(dtype));
  const auto executor = make_thread_executor(threads);
  executor->parallel_for((count + kPart - 1) / kPart, [&](std::int64_t part, int) {
    Random random(seed + static_cast<std::uint64_t>(part) * 0x10001);
    for (std::int64_t i = part * kPart; i < std::min(count, (part + 1) * kPart); ++i) {
      store(dtype, array.data(), i, scale * random.normal());
    }
  });
}

}  // namespace

BenchArrays make_bench_arrays(const Problem& p, std::uint64_t seed, int threads) {
  BenchArrays a;
  a.e = array_of(p.e_dtype, p.tokens * p.hidden);
  a.c = array_of(p.c_dtype, p.vocab * p.hidden);
  fill(p.e_dtype, a.e, 1.0f, seed, threads);
  // Logits of variance 4: neither flat nor settled on one word.
  fill(p.c_dtype, a.c, 2.0f / std::sqrt(static_cast<float>(p.hidden)), ~seed, threads);
  Random random(seed);
  a.labels.resize(static_cast<std::size_t>(p.tokens));
  for (std::int64_t& label : a.labels) {
    do {
      label = random.below(p.vocab);
    } while (label == p.ignore_index && p.vocab > 1);
  }
  a.nll.resize(a.labels.size());
  a.lse.resize(a.labels.size());
  a.losses.resize(a.labels.size());
  if (p.want_d_e) a.d_e = array_of(p.d_e_dtype.value_or(p.e_dtype), p.tokens * p.hidden);
  if (p.want_d_c) a.d_c = array_of(p.d_c_dtype.value_or(p.c_dtype), p.vocab * p.hidden);
  return a;
}

Status run_once(const Plan& plan, BenchArrays& a) {
  return run(plan, {.e = a.e.data(), .c = a.c.data(), .labels = a.labels.data()},
             {.loss = plan.problem.reduction == Reduction::none ? a.losses.data() : &a.loss,
              .nll = a.nll.data(),
              .lse = a.lse.data(),
              .d_e = plan.problem.want_d_e ? a.d_e.data() : nullptr,
              .d_c = plan.problem.want_d_c ? a.d_c.data() : nullptr},
             a.workspace);
}

// bf16 results carry the rounding to 8 significant bits, 2^-9 at most; f32 ones the rounding of sums of D and V terms,
// seen below 2e-6 at D = 2304, V = 262144. A kernel that is wrong is wrong by far more than either.
bool acceptable(const SampledErrors& errors, const Problem& p) {
  const auto limit = [](DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 1e-4; };
  return errors.nll <= 1e-4 && errors.d_e <= limit(p.d_e_dtype.value_or(p.e_dtype)) &&
         errors.d_c <= limit(p.d_c_dtype.value_or(p.c_dtype));
}

}  // namespace cutloss::cli
