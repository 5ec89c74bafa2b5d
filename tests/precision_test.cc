// Sums that must not be kept in 16 bits, nor added up one by one; and what must not depend on how work is divided.
#include <ctime>

#include "tests/fixtures.h"
#include "tests/sanitizers.h"

namespace cutloss {
namespace {

using testing::Objective;
using testing::Results;

class Precision : public ::testing::TestWithParam<std::string> {
 protected:
  // The best kernels do the large ones; the plain C++ ones would take ten times as long.
  bool slow() const { return GetParam() == "scalar" || GetParam() == "emu128"; }
};

// Kept in bf16, a sum of halves stops growing at 128 with steps of one token, at 2048 with steps of 16.
TEST_P(Precision, HeadGradientIsRoundedAfterEachChunk) {
  const std::int64_t n = 65536;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Objective f = testing::softplus_fixture(std::vector<float>(static_cast<std::size_t>(n), 1.0f), dtype);
    f.c.set(1, 0);
    f.problem.reduction = Reduction::sum;
    f.problem.want_d_e = false;
    f.problem.d_c_dtype = DType::bf16;  // 32768 is one of its numbers
    std::vector<Plan> plans = testing::plans_by_budget(f.problem, Mode::chunk, GetParam());
    ASSERT_GE(plans.size(), 4u);
    EXPECT_LE(plans.front().chunk_tokens, 32);
    plans.push_back(testing::plan_in(f.problem, Mode::recompute, GetParam()).value());
    plans.push_back(testing::plan_in(f.problem, Mode::sparse, GetParam()).value());
    // The smallest chunk, some on the way, and the last three.
    for (std::size_t i = 0; i < plans.size();
         i += i + 3 < plans.size() ? std::min<std::size_t>(4, plans.size() - 3 - i) : 1) {
      const Results got = testing::run_planned(f, plans[i]);
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      EXPECT_EQ(got.d_c.get(0), -32768) << name(plans[i].mode) << " in chunks of " << plans[i].chunk_tokens;
      EXPECT_EQ(got.d_c.get(1), 32768) << name(plans[i].mode) << " in chunks of " << plans[i].chunk_tokens;
    }
  }
}

// Chunks that add 2^24, then 0.5 each, then -2^24: in f32 the halves are lost one by one, whatever dC is written in.
TEST_P(Precision, CompensatedSumsOverChunksDrift) {
  Objective f = testing::softplus_fixture(std::vector<float>(8192, 1.0f));
  f.c.set(1, 0);
  testing::add_bias(f);
  f.bias.set(0, 0), f.bias.set(1, 0);
  Problem& p = f.problem;
  p.reduction = Reduction::sum;
  p.token_weights = true;
  const std::int64_t chunk = testing::plans_by_budget(p, Mode::chunk, GetParam()).front().chunk_tokens;
  const std::int64_t chunks = p.tokens / chunk;
  ASSERT_GE(chunks, 256);
  // A row adds half its weight, exactly.
  const float small = 1.0f / static_cast<float>(chunk), large = 0x1p25f * small;
  f.token_weights.assign(static_cast<std::size_t>(p.tokens), small);
  std::fill_n(f.token_weights.begin(), chunk, large);
  std::fill_n(f.token_weights.end() - chunk, chunk, -large);
  const float want = 0.5f * static_cast<float>(chunks - 2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool compensated : {false, true}) {
      p.compensated = compensated;
      p.d_c_dtype = p.bias_dtype = dtype;
      f.bias = testing::Buffer(dtype, 2);
      const Plan plan = testing::plans_by_budget(p, Mode::chunk, GetParam()).front();
      ASSERT_EQ(plan.chunk_tokens, chunk);
      const Results got = testing::run_planned(f, plan);
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      for (const testing::Buffer* sum : {&got.d_c, &got.d_bias}) {
        EXPECT_EQ(sum->get(1), compensated ? testing::Buffer(dtype, 1, want).get(0) : 0.0f)
            << name(dtype) << (compensated ? " compensated" : " plain");
      }
    }
  }
}

// Id by id in bf16, 4095 parts of 1/4096 add up to 0.0625.
TEST_P(Precision, HiddenGradientIsRoundedAfterEachTile) {
  for (const std::int64_t v : {4096, 262144}) {
    Objective f = testing::fixture(1, v, 1, DType::bf16, DType::bf16);
    f.e.set(0, 0);
    for (std::int64_t i = 0; i < v; ++i) f.c.set(i, i == 0 ? 0.0f : 1.0f);
    f.labels = {0};
    const double want = static_cast<double>(v - 1) / static_cast<double>(v);
    for (const DType d_e : {DType::f32, DType::bf16}) {
      f.problem.d_e_dtype = d_e;
      for (const bool d_c : {false, true}) {
        f.problem.want_d_c = d_c;
        for (const Mode mode : testing::modes_of(f.problem)) {
          const Results got = testing::run_in(f, mode, GetParam());
          ASSERT_TRUE(got.status.ok()) << got.status.message();
          // Each of at most 224 + V / 224 additions in a row rounds by 2^-24 of a sum below 1.
          const double additions = 224 + static_cast<double>(v) / 224;
          EXPECT_NEAR(got.d_e.get(0), want, d_e == DType::bf16 ? 0x1p-9 : additions * 0x1p-24) << name(mode) << v;
        }
      }
    }
  }
}

TEST_P(Precision, Bf16InputGivesAnotherLossThanItsF32Copy) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Objective narrow = testing::fixture(64, 1000, 32, dtype, dtype);
    Objective wide = testing::fixture(64, 1000, 32);
    for (std::int64_t i = 0; i < wide.e.size(); ++i) wide.e.set(i, narrow.e.get(i));
    for (std::int64_t i = 0; i < wide.c.size(); ++i) wide.c.set(i, narrow.c.get(i));
    const double step = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;  // half a unit in the last place, relative
    for (const Mode mode : testing::modes_of(wide.problem)) {
      const Results a = testing::run_in(narrow, mode, GetParam()), b = testing::run_in(wide, mode, GetParam());
      EXPECT_NEAR(a.loss.get(0), b.loss.get(0), 1e-6 * b.loss.get(0));
      for (const auto& [x, y] : {std::pair{&a.d_e, &b.d_e}, std::pair{&a.d_c, &b.d_c}}) {
        for (std::int64_t i = 0; i < x->size(); ++i) {
          // f16 is subnormal below 2^-14: half of 2^-24 then.
          ASSERT_NEAR(x->get(i), y->get(i), step * std::abs(y->get(i)) + 0x1p-25) << name(mode) << " at " << i;
        }
      }
    }
  }
}

void check_mean_of(std::int64_t n, const std::string& target, bool weights = false) {
  Objective f = testing::softplus_fixture(std::vector<float>(static_cast<std::size_t>(n), 0.0f));
  f.problem.token_weights = weights;
  if (weights) f.token_weights.assign(static_cast<std::size_t>(n), 1.0f);
  f.problem.want_d_e = f.problem.want_d_c = false;
  const Plan plan = testing::plan_in(f.problem, Mode::loss, target).value();
  float loss = 0;
  Outputs out;
  out.loss = &loss;
  ASSERT_TRUE(run(plan, f.inputs(), out).ok());
  EXPECT_NEAR(loss, std::log(2.0), 1e-6) << n;
}

// A plain f32 sum makes 0.6886 of it.
TEST_P(Precision, MeanOverManyTokensDrifts) { check_mean_of(slow() ? 1 << 18 : 1 << 20, GetParam()); }

TEST_P(Precision, LongMeanOverManyTokensDrifts) {
  check_mean_of(1 << 22, GetParam());
  if (slow()) return;
  check_mean_of(1 << 25, GetParam());
  check_mean_of(1 << 25, GetParam(), true);  // a plain f32 sum of the weights stops at 2^24
}

// Token losses of 9.6 add up to 196778, three times the largest f16.
TEST_P(Precision, F16SumOfTokenLossesOverflows) {
  // Of the vector targets one is enough: they take seconds for 3e8 logits.
  const bool whole = GetParam() == available_targets()[0];
  const std::int64_t v = whole ? 14749 : 33, n = 20500;
  Objective f = testing::fixture(n, v, 1, DType::f16, DType::f16);
  for (std::int64_t i = 0; i < n; ++i) f.e.set(i, 0);
  for (std::int64_t i = 0; i < v; ++i) f.c.set(i, 0);
  f.problem.want_d_e = f.problem.want_d_c = false;
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    f.problem.reduction = reduction;
    const double want = std::log(static_cast<double>(v)) * (reduction == Reduction::sum ? n : 1);
    EXPECT_NEAR(testing::run_in(f, Mode::loss, GetParam()).loss.get(0), want, 1e-6 * want);
  }
}

// Logits of +-160000, which f16 does not have.
TEST_P(Precision, F16LogitsOverflow) {
  Objective f = testing::fixture(1, 2, 4, DType::f16, DType::f16);
  for (std::int64_t i = 0; i < 4; ++i) {
    f.e.set(i, 200);
    f.c.set(i, 200);
    f.c.set(4 + i, -200);
  }
  for (const std::int64_t label : {0, 1}) {
    f.labels = {label};
    for (const Mode mode : testing::modes_of(f.problem)) {
      const Results got = testing::run_in(f, mode, GetParam());
      EXPECT_EQ(got.loss.get(0), label == 0 ? 0.0f : 320000.0f) << name(mode);
      // p is 1 for id 0: 0, or c_0 - c_1 and +-e.
      EXPECT_EQ(got.d_e.get(0), label == 0 ? 0.0f : 400.0f) << name(mode);
      EXPECT_EQ(got.d_c.get(0), label == 0 ? 0.0f : 200.0f) << name(mode);
      EXPECT_EQ(got.d_c.get(4), label == 0 ? 0.0f : -200.0f) << name(mode);
    }
  }
}

// bf16 numbers near 18 are 0.125 apart, near 36 0.25.
TEST_P(Precision, LossIsRoundedToBf16) {
  const Objective f = testing::softplus_fixture({0, 36.25f}, DType::bf16);
  for (const Mode mode : testing::modes_of(f.problem)) {
    EXPECT_NEAR(testing::run_in(f, mode, GetParam()).loss.get(0), 18.471574, 2e-6) << name(mode);
  }
}

// Means of chunks, their sum, a tail that floor(N / chunk) forgets: all right while one chunk holds everything.
TEST_P(Precision, ChunkLengthChangesTheAnswer) {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
    std::vector<float> x;
    for (int i = 0; i < 165; ++i) x.push_back(static_cast<float>(i % 5));
    Objective f = testing::softplus_fixture(x);
    f.problem.reduction = reduction;
    const double sum = 33 * 11.2000742;
    for (const Mode mode : {Mode::chunk, Mode::recompute, Mode::sparse}) {
      for (const Plan& plan : testing::plans_by_budget(f.problem, mode, GetParam())) {
        const Results got = testing::run_planned(f, plan);
        const double want = reduction == Reduction::mean ? sum / 165 : reduction == Reduction::sum ? sum : 0.6931472;
        EXPECT_NEAR(got.loss.get(0), want, 1e-6 * want) << name(mode) << " " << plan.chunk_tokens;
        EXPECT_EQ(testing::off(f, plan, got), "") << name(mode) << " " << plan.chunk_tokens;
      }
    }
  }
}

TEST_P(Precision, RaggedLastChunkIsDropped) {
  Objective first = testing::softplus_fixture(std::vector<float>(300, 1.0f));
  for (const Plan& chunked : testing::plans_by_budget(first.problem, Mode::chunk, GetParam())) {
    const std::int64_t chunk = chunked.chunk_tokens;
    for (const std::int64_t n : {std::int64_t{1}, std::int64_t{5}, chunk - 1, chunk, chunk + 1, 2 * chunk - 1}) {
      const Objective f = testing::softplus_fixture(std::vector<float>(static_cast<std::size_t>(n), 1.0f));
      const Results got = testing::run_in(f, Mode::chunk, GetParam(), chunked.workspace_bytes);
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      EXPECT_NEAR(got.loss.get(0), 1.3132617, 1.4e-6) << n << " tokens in chunks of " << chunk;
      // A mean of n equal numbers: at most 512 of them are added one by one, see the drift test of run_test.cc.
      EXPECT_NEAR(got.d_c.get(1), 0.7310586, 0.7310586 * 512 * 0x1p-25) << n << " tokens in chunks of " << chunk;
    }
  }
}

TEST_P(Precision, LongChunkLengthChangesTheAnswer) {
  const Objective f = testing::fixture(4096, 257, 16);
  const Results want = testing::run_in(f, Mode::recompute, GetParam());
  for (const Plan& plan : testing::plans_by_budget(f.problem, Mode::chunk, GetParam())) {
    const Results got = testing::run_planned(f, plan);
    EXPECT_NEAR(got.loss.get(0), want.loss.get(0), 1e-6 * want.loss.get(0)) << plan.chunk_tokens;
    EXPECT_NEAR(testing::total(got.d_e), testing::total(want.d_e), 1e-5 * testing::total(want.d_e));
    EXPECT_NEAR(testing::total(got.d_c), testing::total(want.d_c), 1e-5 * testing::total(want.d_c));
  }
}

// Also with whatever was in the memory before, which Results and the workspace fill with NaN.
TEST_P(Precision, OddNumbersOfTokensChangeFromRunToRun) {
  for (const std::int64_t n : {1, 31, 32, 33, 91, 1017}) {
    const Objective f = testing::fixture(n, 257, 9);
    for (const Mode mode : testing::modes_of(f.problem)) {
      std::string first;
      for (const int threads : {1, 2}) {
        for (int i = 0; i < (slow() ? 2 : 5); ++i) {
          const Results got = testing::run_in(f, mode, GetParam(), {}, threads);
          std::string bits;
          for (const testing::Buffer* b : {&got.loss, &got.nll, &got.d_e, &got.d_c}) {
            bits.append(static_cast<const char*>(b->data()), static_cast<std::size_t>(b->size()) * 4);
          }
          if (first.empty()) first = bits;
          ASSERT_TRUE(bits == first) << n << " tokens, mode " << name(mode) << ", run " << i << ", " << threads;
        }
      }
    }
  }
}

double processor_seconds(const Objective& f, const Plan& plan) {
  double best = HUGE_VAL;
  for (int i = 0; i < 4; ++i) {
    timespec from, to;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    EXPECT_TRUE(testing::run_planned(f, plan).status.ok());
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    best = std::min(
        best, static_cast<double>(to.tv_sec - from.tv_sec) + 1e-9 * static_cast<double>(to.tv_nsec - from.tv_nsec));
  }
  return best;
}

// Subnormal inputs, and a softmax whose tail is subnormal: less than three times as long as ordinary numbers.
TEST_P(Precision, SubnormalNumbersMakeItCrawl) {
  const std::int64_t n = 64, v = 1024, d = 32;
  Objective ordinary = testing::fixture(n, v, d);
  Objective tiny_e = ordinary, tiny_c = ordinary, tail = ordinary;
  for (std::int64_t i = 0; i < n * d; ++i) tiny_e.e.set(i, 1e-40f);
  for (std::int64_t i = 0; i < v * d; ++i) tiny_c.c.set(i, 1e-40f);
  // Logits from 0 down to -103, where exp is the smallest subnormal.
  for (std::int64_t i = 0; i < n * d; ++i) tail.e.set(i, i % d == 0 ? 1.0f : 0.0f);
  for (std::int64_t i = 0; i < v; ++i) tail.c.set(i * d, -103.0f * static_cast<float>(i) / static_cast<float>(v));
  // Worker threads have a floating-point environment of their own.
  for (const auto& [mode, threads] :
       {std::pair{Mode::chunk, 1}, std::pair{Mode::recompute, 1}, std::pair{Mode::recompute, 2},
        std::pair{Mode::sparse, 1}, std::pair{Mode::stream, 1}, std::pair{Mode::loss, 1}}) {
    for (Objective* f : {&ordinary, &tiny_e, &tiny_c, &tail}) {
      f->problem.want_d_e = mode != Mode::loss;
      f->problem.want_d_c = mode != Mode::loss && mode != Mode::stream;
    }
    const Plan plan = testing::plan_in(ordinary.problem, mode, GetParam(), {}, threads).value();
    const double base = processor_seconds(ordinary, plan);
    for (const Objective* f : {&tiny_e, &tiny_c, &tail}) {
      EXPECT_LE(processor_seconds(*f, plan), 3 * base) << name(mode) << (f == &tail ? " tail" : " inputs");
      EXPECT_EQ(testing::off(*f, plan, testing::run_planned(*f, plan)), "") << name(mode);
    }
  }
}

// A twentieth of the work is left: it may take a quarter of the time.
TEST_P(Precision, IgnoredTokensCostAsMuchAsOthers) {
  if (testing::kSanitized) GTEST_SKIP() << "fixed costs are the sanitizer's";
  Objective all = testing::fixture(1024, 2048, 32);
  Objective few = all;
  for (std::int64_t i = 0; i < 1024; ++i) {
    if (i % 20 != 0) few.labels[static_cast<std::size_t>(i)] = few.problem.ignore_index;
  }
  for (const Mode mode : {Mode::chunk, Mode::recompute}) {
    const Plan plan = testing::plan_in(all.problem, mode, GetParam(), {}, 1).value();
    EXPECT_LE(processor_seconds(few, plan), 0.25 * processor_seconds(all, plan)) << name(mode);
  }
}

// 1e-38 times a table of 1e37 is a logit like any other, and so is the reverse.
TEST_P(Precision, SubnormalNumbersCountAsZero) {
  for (const bool hidden_states : {true, false}) {
    Objective f = testing::fixture(7, 11, 5);
    const auto scale = [](testing::Buffer& values, float by) {
      for (std::int64_t i = 0; i < values.size(); ++i) values.set(i, values.get(i) * by);
    };
    scale(f.e, hidden_states ? 1e-39f : 1e36f);
    scale(f.c, hidden_states ? 1e36f : 1e-39f);
    f.e.set(7, f.e.get(7) * 100);  // a normal number among them
    EXPECT_EQ(std::fpclassify((hidden_states ? f.e : f.c).get(3)), FP_SUBNORMAL);
    for (const Mode mode : testing::modes_of(f.problem)) {
      const Plan plan = testing::plan_in(f.problem, mode, GetParam()).value();
      const Results got = testing::run_planned(f, plan);
      EXPECT_EQ(testing::off(f, plan, got), "") << name(mode) << (hidden_states ? " E" : " C");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Precision, ::testing::ValuesIn(available_targets()), testing::target_name);

}  // namespace
}  // namespace cutloss
