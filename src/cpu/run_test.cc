// Every mode on every kernel target against the float64 oracle, and the properties run() promises.
#include <gtest/gtest.h>

#include <cfenv>
#include <cstdlib>

#include "src/cpu/kernels.h"
#include "src/cpu/test_problem.h"

namespace cutloss {
namespace {

using testing::Answer;
using testing::Case;

class EveryTarget : public ::testing::TestWithParam<std::string> {
 protected:
  Result<Plan> plan(const Problem& problem, Mode mode = Mode::automatic, int threads = 2) {
    Limits limits;
    limits.mode = mode;
    limits.threads = threads;
    return make_plan(problem, limits, testing::machine_for(GetParam(), threads));
  }

  // Plans, runs, compares; names the repro on failure.
  void check(Case& test, Mode mode, const char* what) {
    Result<Plan> made = plan(test.problem, mode);
    ASSERT_TRUE(made.ok()) << what << ": " << made.status().message();
    const Answer answer = testing::run_plan(made.value(), test.inputs());
    ASSERT_TRUE(answer.status.ok()) << what << ": " << answer.status.message();
    const reference::Reference want =
        reference::linear_cross_entropy(test.problem, test.inputs(), {testing::additions_of(made.value())});
    const testing::Worst worst = testing::compare(made.value(), answer, want);
    EXPECT_LE(worst.ratio, 1.0) << what << " N=" << test.problem.tokens << " V=" << test.problem.vocab
                                << " D=" << test.problem.hidden << " mode " << name(mode) << ": " << worst.where;
  }

  void check_all_modes(Case test, const char* what) {
    test.problem.want_d_e = test.problem.want_d_c = false;
    check(test, Mode::loss, what);
    test.problem.want_d_e = true;
    check(test, Mode::stream, what);
    for (const bool d_e : {true, false}) {
      test.problem.want_d_e = d_e;
      test.problem.want_d_c = true;
      check(test, Mode::chunk, what);
      check(test, Mode::recompute, what);
    }
  }
};

std::vector<std::int64_t> around(std::int64_t edge) { return {edge - 1, edge, edge + 1}; }

TEST_P(EveryTarget, TokensAroundThePanelEdge) {
  const std::int64_t w = cpu::find_kernels(GetParam())->panel;
  for (const std::int64_t edge : {w, 2 * w, 8 * w}) {
    for (const std::int64_t n : around(edge)) check_all_modes(Case::random(n, 37, 19, 1), "tokens");
  }
  check_all_modes(Case::random(1, 37, 19, 2), "one token");
}

TEST_P(EveryTarget, VocabularyAroundTheGroupAndTileEdges) {
  const std::int64_t r = cpu::find_kernels(GetParam())->rows;
  for (const std::int64_t edge : {r, 2 * r, 224 / r * r, 2 * (224 / r * r)}) {
    for (const std::int64_t v : around(edge)) check_all_modes(Case::random(11, v, 9, 3), "vocab");
  }
  for (const std::int64_t v : {1, 2, 3}) check_all_modes(Case::random(7, v, 5, 4), "tiny vocab");
}

TEST_P(EveryTarget, HiddenSizeAroundTheVectorEdges) {
  for (const std::int64_t d : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129}) {
    check_all_modes(Case::random(10, 45, d, 5), "hidden");
  }
}

TEST_P(EveryTarget, Bf16InputsAndMixes) {
  for (const DType e : {DType::f32, DType::bf16}) {
    for (const DType c : {DType::f32, DType::bf16}) {
      Case test = Case::random(21, 83, 23, 6, 2.0f, DType::bf16);
      if (e == DType::f32) {
        testing::Array wide(e, test.e.size(), 0);
        for (std::size_t i = 0; i < wide.size(); ++i) wide.set(i, test.e.get(i));
        test.e = wide;
      }
      if (c == DType::f32) {
        testing::Array wide(c, test.c.size(), 0);
        for (std::size_t i = 0; i < wide.size(); ++i) wide.set(i, test.c.get(i));
        test.c = wide;
      }
      test.problem.e_dtype = e;
      test.problem.c_dtype = c;
      check_all_modes(test, "dtype mix");
    }
  }
}

TEST_P(EveryTarget, SoftcapReductionsLayoutsAndLabelTypes) {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
    for (const HeadLayout layout : {HeadLayout::vd, HeadLayout::dv}) {
      for (const float cap : {0.0f, 0.5f, 30.0f}) {
        Case test = Case::random(18, 61, 12, 7, 3.0f);
        test.problem.reduction = reduction;
        test.problem.head_layout = layout;
        if (cap > 0) test.problem.softcap = cap;
        check_all_modes(test, "objective");
      }
    }
  }
}

TEST_P(EveryTarget, StridedInputsEqualTheirContiguousCopies) {
  Case flat = Case::random(17, 40, 11, 8);
  flat.problem.want_d_e = flat.problem.want_d_c = true;
  const std::string want = testing::run_plan(plan(flat.problem).value(), flat.inputs()).bits();

  // e as big[::-2, :11] of a wider array, c as a transposed view of a wider array, labels[::3].
  Case strided = flat;
  const std::int64_t n = 17, v = 40, d = 11, wide = 16;
  strided.e = testing::Array(DType::f32, static_cast<std::size_t>(2 * n * wide), NAN);
  strided.c = testing::Array(DType::f32, static_cast<std::size_t>(d * 2 * v), NAN);
  strided.labels.assign(static_cast<std::size_t>(3 * n), 1 << 30);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t k = 0; k < d; ++k) {
      strided.e.set(static_cast<std::size_t>((n - 1 - i) * 2 * wide + k),
                    flat.e.get(static_cast<std::size_t>(i * d + k)));
    }
    strided.labels[static_cast<std::size_t>(3 * i)] = flat.labels[static_cast<std::size_t>(i)];
  }
  for (std::int64_t r = 0; r < v; ++r) {
    for (std::int64_t k = 0; k < d; ++k) {
      strided.c.set(static_cast<std::size_t>(k * 2 * v + 2 * r), flat.c.get(static_cast<std::size_t>(r * d + k)));
    }
  }
  strided.problem.e_strides = Strides{-2 * wide, 1};
  strided.problem.c_strides = Strides{2, 2 * v};
  strided.problem.label_stride = 3;
  Inputs inputs = strided.inputs();
  inputs.e = static_cast<float*>(strided.e.data()) + (n - 1) * 2 * wide;
  EXPECT_EQ(testing::run_plan(plan(strided.problem).value(), inputs).bits(), want);
}

TEST_P(EveryTarget, SameBitsForAnyNumberOfThreads) {
  for (const Mode mode : {Mode::stream, Mode::chunk, Mode::recompute}) {
    Case test = Case::random(150, 700, 33, 9);
    test.problem.want_d_e = true;
    test.problem.want_d_c = mode != Mode::stream;
    const Plan made = plan(test.problem, mode, 4).value();
    std::string first;
    for (const int threads : {1, 2, 3, 4, 9}) {
      const auto executor = make_thread_executor(threads);
      const Answer answer = testing::run_plan(made, test.inputs(), executor.get());
      ASSERT_TRUE(answer.status.ok()) << answer.status.message();
      if (first.empty()) first = answer.bits();
      EXPECT_EQ(answer.bits(), first) << name(mode) << " on " << threads << " threads";
    }
  }
}

TEST_P(EveryTarget, SameBitsForPlansOfAnyNumberOfThreads) {
  for (const std::int64_t n : {16, 300}) {
    Case test = Case::random(n, 6000, 16, 9);
    for (const bool d_c : {false, true}) {
      test.problem.want_d_e = true;
      test.problem.want_d_c = d_c;
      const std::string want = testing::run_plan(plan(test.problem, Mode::automatic, 1).value(), test.inputs()).bits();
      for (const int threads : {2, 3, 8}) {
        EXPECT_EQ(testing::run_plan(plan(test.problem, Mode::automatic, threads).value(), test.inputs()).bits(), want)
            << threads << " threads, " << n << " tokens";
      }
    }
  }
}

TEST_P(EveryTarget, VocabularySlicesAgreeWithTheOracle) {
  Case test = Case::random(5, 30000, 64, 10, 4.0f);
  test.problem.want_d_e = true;
  const Plan made = plan(test.problem, Mode::stream, 4).value();
  ASSERT_GT(made.vocab_slices, 1) << "the case no longer reaches the sliced path";
  check(test, Mode::stream, "slices");
}

TEST_P(EveryTarget, ManyChunksSumToOne) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case test = Case::random(100, 50, 16, 11, 2.0f, dtype);
    test.problem.want_d_e = test.problem.want_d_c = true;
    Limits limits;
    limits.mode = Mode::chunk;
    limits.threads = 1;
    const Machine machine = testing::machine_for(GetParam());
    Plan small = make_plan(test.problem, limits, machine).value();
    // The smallest budget the mode takes: chunks of one panel.
    limits.budget_bytes = 1;
    const Result<Plan> refused = make_plan(test.problem, limits, machine);
    ASSERT_EQ(refused.status().code(), StatusCode::budget_too_small);
    limits.budget_bytes = std::strtoull(
        refused.status().message().substr(refused.status().message().find("here is ") + 8).c_str(), nullptr, 10);
    small = make_plan(test.problem, limits, machine).value();
    ASSERT_LT(small.chunk_tokens, test.problem.tokens);
    const Answer answer = testing::run_plan(small, test.inputs());
    ASSERT_TRUE(answer.status.ok()) << answer.status.message();
    const auto want = reference::linear_cross_entropy(test.problem, test.inputs(), {testing::additions_of(small)});
    const auto worst = testing::compare(small, answer, want);
    EXPECT_LE(worst.ratio, 1.0) << worst.where;
  }
}

TEST_P(EveryTarget, NanInIgnoredRowsReachesNothing) {
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const Mode mode : {Mode::chunk, Mode::recompute}) {
      Case clean = Case::random(23, 41, 7, 12);
      clean.problem.want_d_e = clean.problem.want_d_c = true;
      Case poisoned = clean;
      for (std::size_t i = 0; i < 23; ++i) {
        for (std::size_t d = 0; i % 5 == 3 && d < 7; ++d) poisoned.e.set(i * 7 + d, poison);
      }
      const Plan made = plan(clean.problem, mode).value();
      EXPECT_EQ(testing::run_plan(made, poisoned.inputs()).bits(), testing::run_plan(made, clean.inputs()).bits());
    }
  }
}

TEST_P(EveryTarget, NanOrInfInAValidRowReachesTheLoss) {
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const std::size_t at : {0, 3}) {
      Case test = Case::random(9, 30, 5, 13, 2.0f, DType::f32, false);
      test.e.set(at * 5, poison);
      const Answer answer = testing::run_plan(plan(test.problem).value(), test.inputs());
      EXPECT_FALSE(std::isfinite(answer.loss[0]));
      EXPECT_TRUE(std::isfinite(answer.nll[1]));
    }
  }
}

// Logits inf and -inf: the running sum over the others is 0, which must not read as a loss of 0.
TEST_P(EveryTarget, AnInfiniteLabelLogitIsNotCertainty) {
  Case test = Case::random(1, 2, 1, 13, 1.0f, DType::f32, false);
  test.e.set(0, std::numeric_limits<float>::infinity());
  test.c.set(0, 1.0f);
  test.c.set(1, -1.0f);
  test.labels = {0};
  EXPECT_FALSE(std::isfinite(testing::run_plan(plan(test.problem).value(), test.inputs()).loss[0]));
}

TEST_P(EveryTarget, NothingValidIsZeroNotNan) {
  for (const std::int64_t n : {0, 6}) {
    for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
      Case test = Case::random(n, 11, 5, 14);
      test.problem.reduction = reduction;
      test.problem.want_d_e = test.problem.want_d_c = true;
      test.labels.assign(static_cast<std::size_t>(n), test.problem.ignore_index);
      const Answer answer = testing::run_plan(plan(test.problem).value(), test.inputs());
      ASSERT_TRUE(answer.status.ok()) << answer.status.message();
      for (const float loss : answer.loss) EXPECT_EQ(loss, 0.0f);
      for (std::size_t i = 0; i < answer.d_e.size(); ++i) EXPECT_EQ(answer.d_e.get(i), 0.0f);
      for (std::size_t i = 0; i < answer.d_c.size(); ++i) EXPECT_EQ(answer.d_c.get(i), 0.0f);
      EXPECT_EQ(answer.valid_count, 0);
    }
  }
}

TEST_P(EveryTarget, IgnoreIndexInsideTheVocabularyStaysInTheSoftmax) {
  Case test = Case::random(12, 11, 5, 15, 2.0f, DType::f32, false);
  test.problem.ignore_index = 4;
  test.labels[1] = 4;
  check_all_modes(test, "ignore_index 4");
}

// 1 - p_label from 1e-7 to 1e-12: by subtraction an f32 gradient would be all rounding.
TEST_P(EveryTarget, ConfidentRowsKeepThreeDigits) {
  for (const float gap : {16.0f, 20.0f, 24.0f, 27.0f}) {
    Case test = Case::random(1, 3, 1, 16, 1.0f, DType::f32, false);
    test.problem.want_d_e = test.problem.want_d_c = true;
    test.e.set(0, 1.0f);
    test.c.set(0, gap);
    test.c.set(1, 0.25f);
    test.c.set(2, -0.5f);
    test.labels = {0};
    for (const Mode mode : {Mode::chunk, Mode::recompute}) {
      const Answer answer = testing::run_plan(plan(test.problem, mode).value(), test.inputs());
      const auto want = reference::linear_cross_entropy(test.problem, test.inputs());
      EXPECT_NEAR(answer.loss[0] / want.loss, 1.0, 1e-3);
      EXPECT_NEAR(answer.d_e.get(0) / want.d_e[0], 1.0, 1e-3);
      EXPECT_NEAR(answer.d_c.get(0) / want.d_c[0], 1.0, 1e-3);
    }
  }
}

TEST_P(EveryTarget, BadLabelIsNamedOrBecomesNan) {
  for (const std::int64_t bad : {std::int64_t{11}, std::int64_t{12}, std::int64_t{-1}, std::int64_t{-99},
                                 std::int64_t{1} << 31, (std::int64_t{1} << 32) + 5}) {
    Case test = Case::random(7, 11, 5, 17, 2.0f, DType::f32, false);
    test.problem.want_d_e = true;
    test.labels[3] = bad;
    const Answer refused = testing::run_plan(plan(test.problem).value(), test.inputs());
    EXPECT_EQ(refused.status.code(), StatusCode::invalid_argument);
    EXPECT_NE(refused.status.message().find("labels[3] is " + std::to_string(bad)), std::string::npos)
        << refused.status.message();
    EXPECT_TRUE(std::isnan(refused.loss[0])) << "written before the check";

    test.problem.bad_labels = BadLabels::nan;
    const Answer answer = testing::run_plan(plan(test.problem).value(), test.inputs());
    ASSERT_TRUE(answer.status.ok());
    EXPECT_TRUE(std::isnan(answer.loss[0]));
    for (std::size_t i = 0; i < 7; ++i) {
      EXPECT_EQ(std::isnan(answer.nll[i]), i == 3);
      EXPECT_EQ(std::isnan(answer.d_e.get(i * 5)), i == 3);
    }
  }
}

// Equal terms round the same way each time: added up step by step in f32, dC over 2^20 tokens is off by 1.6e-5.
TEST_P(EveryTarget, HeadGradientDoesNotDriftWithTheNumberOfTokens) {
  const std::int64_t n = GetParam() == "scalar" ? 1 << 18 : 1 << 20;
  Case test = Case::random(n, 2, 1, 19, 1.0f, DType::f32, false);
  test.problem.want_d_c = true;
  for (std::size_t i = 0; i < test.e.size(); ++i) test.e.set(i, 1.0f);
  test.c.set(0, 0.0f);
  test.c.set(1, 1.0f);
  test.labels.assign(test.labels.size(), 0);
  const Answer answer = testing::run_plan(plan(test.problem, Mode::recompute).value(), test.inputs());
  const double want = 1 / (1 + std::exp(-1.0));
  // One step sums 512 equal terms in a register, each addition rounding by at most 2^-25 of a sum that is on average
  // half the final one.
  EXPECT_NEAR(answer.d_c.get(1), want, want * 512 * 0x1p-26);
}

// The host may round upward; the answer is the same, and the host's setting stays.
TEST_P(EveryTarget, RoundingModeOfTheHostIsNeitherUsedNorChanged) {
  Case test = Case::random(40, 90, 17, 20);
  test.problem.want_d_e = test.problem.want_d_c = true;
  const Plan made = plan(test.problem).value();
  const std::string want = testing::run_plan(made, test.inputs()).bits();
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  const std::string got = testing::run_plan(made, test.inputs()).bits();
  const int after = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(after, FE_UPWARD);
  EXPECT_EQ(got, want);
}

// A plain f32 running sum over this vocabulary is off by about 1e-3.
TEST_P(EveryTarget, SumOverALargeVocabularyIsCompensated) {
  const std::int64_t v = 262144;
  Case test = Case::random(1, v, 1, 18, 1.0f, DType::f32, false);
  test.problem.want_d_e = true;
  test.e.set(0, 1.0f);
  check(test, Mode::stream, "large vocabulary");
  const Answer answer = testing::run_plan(plan(test.problem).value(), test.inputs());
  const auto want = reference::linear_cross_entropy(test.problem, test.inputs());
  EXPECT_NEAR(answer.lse[0], want.lse[0], 4e-6);  // 2 units in the last place of 13
}

TEST_P(EveryTarget, FullyMaskedRowsHaveAnInfiniteLossAndNoArgmax) {
  Case test = Case::random(3, 20, 4, 21, 1.0f, DType::f32, false);
  test.problem.bias_dtype = DType::f32;
  test.problem.metrics.argmax = true;
  test.problem.want_d_e = true;
  std::vector<float> bias(20, -std::numeric_limits<float>::infinity());
  Inputs in = test.inputs();
  in.bias = bias.data();
  float loss = 0, d_e[12];
  std::int64_t argmax[3] = {5, 5, 5};
  std::uint8_t correct[3] = {1, 1, 1};
  Outputs out{&loss};
  out.d_e = d_e;
  out.argmax = argmax;
  out.correct = correct;
  ASSERT_TRUE(run(plan(test.problem).value(), in, out).ok());
  EXPECT_EQ(loss, std::numeric_limits<float>::infinity());
  for (const float value : d_e) EXPECT_EQ(value, 0.0f);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(argmax[i], -1);
    EXPECT_EQ(correct[i], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryTarget, ::testing::ValuesIn(available_targets()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace cutloss
