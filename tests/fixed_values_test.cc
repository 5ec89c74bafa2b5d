// Losses and gradients known beforehand, from float64 programs that share nothing with this library.
#include "cutloss/cutloss.h"
#include "tests/fixtures.h"

namespace cutloss {
namespace {

using testing::Objective;
using testing::Results;

struct Row {
  std::int64_t n, v, d;
  double loss, d_e, d_c;  // the sums of the gradients' absolute values
};

constexpr Row kRows[] = {
    {7, 11, 1, 2.74546126, 0.59975318, 1.81261774},      {7, 11, 3, 3.74773958, 1.72333942, 6.95038226},
    {7, 11, 5, 3.77654999, 2.08603829, 8.70248578},      {7, 11, 7, 4.22534900, 3.41802242, 13.76985409},
    {7, 11, 9, 4.93517514, 4.41998660, 17.97179284},     {7, 11, 17, 4.54169594, 8.63247315, 31.25736752},
    {7, 11, 31, 7.17644465, 16.82973918, 60.79915554},   {7, 11, 33, 7.26833110, 18.04339557, 65.78575404},
    {7, 11, 63, 7.93035362, 38.96718008, 133.25423443},  {7, 11, 65, 7.94322682, 39.21581416, 134.85822579},
    {7, 11, 129, 6.96454588, 56.43996493, 227.16597183}, {7, 1, 5, 0, 0, 0},
    {7, 2, 5, 0.82140781, 0.37840971, 2.51352900},       {7, 15, 5, 3.79740677, 1.91947087, 9.11849063},
    {7, 17, 5, 5.15826676, 2.65750388, 11.14191354},     {7, 63, 5, 4.26038358, 1.88591752, 11.86156338},
    {7, 65, 5, 4.31331403, 1.98209777, 11.33778596},     {7, 127, 5, 8.03326771, 3.44441613, 13.48125517},
    {7, 129, 5, 8.77075644, 4.15845205, 13.08685876},    {7, 257, 5, 7.84321461, 3.11330279, 13.40614590},
    {7, 1000, 5, 9.26790530, 3.02682733, 13.43570583},   {7, 1025, 5, 8.31534509, 2.53292525, 13.39684837},
};

// Labels with two rows left out; bias and softcap by the name of the case.
struct Term {
  const char* what;
  bool bias;
  float softcap;
  Reduction reduction;
  double loss, d_e, d_c, d_bias;
};

constexpr Term kTerms[] = {
    {"mask", false, 0, Reduction::mean, 3.72740049, 2.10268485, 10.01176701, 0},
    {"bias", true, 0, Reduction::mean, 4.22264260, 2.04413950, 11.05120661, 1.46773728},
    {"softcap", false, 2, Reduction::mean, 2.99038656, 1.38972126, 5.94975858, 0},
    {"bias and softcap", true, 2, Reduction::mean, 3.28572188, 1.17292519, 5.72517245, 0.81191299},
    {"sum", true, 2, Reduction::sum, 16.42860940, 5.86462597, 28.62586226, 4.05956497},
};

Objective objective_of(const Term& term, DType e = DType::f32, DType c = DType::f32, DType bias = DType::f32) {
  Objective f = testing::fixture(7, 11, 5, e, c);
  f.labels = {5, 4, -100, 2, 1, -100, 10};
  if (term.bias) testing::add_bias(f, bias);
  if (term.softcap > 0) f.problem.softcap = term.softcap;
  f.problem.reduction = term.reduction;
  return f;
}

void expect_near(double got, double want, double relative, const std::string& what) {
  EXPECT_NEAR(got, want, relative * std::abs(want) + 1e-7) << what;
}

// Each gradient with and without the others. The sum of a gradient's entries is off by 1e-5, the loss by 1e-6.
void check(Objective f, const std::string& target, double loss, double d_e, double d_c, double d_bias,
           const std::string& what, double loss_tolerance = 1e-6, double tolerance = 1e-5) {
  const bool bias = f.problem.bias_dtype.has_value();
  for (int wanted = 0; wanted < 8; ++wanted) {
    Problem& p = f.problem;
    p.want_d_e = (wanted & 1) != 0;
    p.want_d_c = (wanted & 2) != 0;
    p.want_d_bias = (wanted & 4) != 0;
    if (p.want_d_bias && !bias) continue;
    for (const Mode mode : testing::modes_of(p)) {
      const std::string where = what + ", mode " + std::string(name(mode)) + ", gradients " + std::to_string(wanted);
      const Results got = testing::run_in(f, mode, target);
      ASSERT_TRUE(got.status.ok()) << where << ": " << got.status.message();
      expect_near(got.loss.get(0), loss, loss_tolerance, "loss: " + where);
      if (p.want_d_e) expect_near(testing::total(got.d_e), d_e, tolerance, "d_e: " + where);
      if (p.want_d_c) expect_near(testing::total(got.d_c), d_c, tolerance, "d_c: " + where);
      if (p.want_d_bias) expect_near(testing::total(got.d_bias), d_bias, tolerance, "d_bias: " + where);
    }
  }
}

class FixedValues : public ::testing::TestWithParam<std::string> {};

TEST_P(FixedValues, EdgesOfVocabularyAndHiddenSize) {
  for (const Row& row : kRows) {
    check(testing::fixture(row.n, row.v, row.d), GetParam(), row.loss, row.d_e, row.d_c, 0,
          "V=" + std::to_string(row.v) + " D=" + std::to_string(row.d));
  }
}

TEST_P(FixedValues, MaskBiasSoftcapAndSumAreAppliedOnce) {
  for (const Term& t : kTerms) check(objective_of(t), GetParam(), t.loss, t.d_e, t.d_c, t.d_bias, t.what);
}

// Against the oracle, which reads the rounded arrays; and within 2e-2 of what the unrounded ones give.
TEST_P(FixedValues, EveryMixOfDtypesIsTakenAndGradientsKeepTheirs) {
  const DType all[] = {DType::f32, DType::bf16, DType::f16};
  for (const DType e : all) {
    for (const DType c : all) {
      for (const DType bias : all) {
        const Objective f = objective_of(kTerms[1], e, c, bias);
        for (const Mode mode : testing::modes_of(f.problem)) {
          const Plan plan = testing::plan_in(f.problem, mode, GetParam()).value();
          const Results got = testing::run_planned(f, plan);
          const std::string what = std::string(name(e)) + " " + std::string(name(c)) + " " + std::string(name(bias));
          EXPECT_EQ(testing::off(f, plan, got), "") << what << ", mode " << name(mode);
          expect_near(got.loss.get(0), kTerms[1].loss, 2e-2, what);
        }
        Objective frozen = f;
        frozen.problem.want_d_c = frozen.problem.want_d_bias = false;
        expect_near(testing::run_in(frozen, Mode::stream, GetParam()).loss.get(0), kTerms[1].loss, 2e-2, "frozen");
      }
    }
  }
}

TEST_P(FixedValues, SoftplusOfEveryRowAndOfTheirMean) {
  Objective f = testing::softplus_fixture({0, 1, 2, 3, 4});
  const double want[] = {0.6931472, 1.3132617, 2.1269280, 3.0485874, 4.0181499};
  double d_e = 0, d_c = 0;  // sigmoid(x) / 5, and twice that times x
  for (int i = 0; i < 5; ++i) d_e += 0.2 / (1 + std::exp(-i));
  for (int i = 0; i < 5; ++i) d_c += 0.4 * i / (1 + std::exp(-i));
  check(f, GetParam(), 2.2400148, d_e, d_c, 0, "mean");
  f.problem.reduction = Reduction::none;
  for (const Mode mode : testing::modes_of(f.problem)) {
    const Results got = testing::run_in(f, mode, GetParam());
    for (int i = 0; i < 5; ++i) {
      EXPECT_NEAR(got.loss.get(i), want[i], 1e-6);
      EXPECT_NEAR(got.d_e.get(i), 1 / (1 + std::exp(-i)), 1e-6);
    }
  }
}

// The cap for label 3 of logits 124, -124, 40, 0: 124 without it, 22.99 with it twice, 124.63 with z tanh(z / cap).
TEST_P(FixedValues, SoftcapIsMissingOrAppliedTwiceOrAnotherFormula) {
  Objective f = testing::fixture(1, 4, 1);
  f.e.set(0, 1);
  for (std::int64_t v = 0; v < 4; ++v)
    f.c.set(v, std::vector{124.0f, -124.0f, 40.0f, 0.0f}[static_cast<std::size_t>(v)]);
  f.labels = {3};
  f.problem.softcap = 30.0f;
  for (const Mode mode : testing::modes_of(f.problem)) {
    expect_near(testing::run_in(f, mode, GetParam()).loss.get(0), 30.004973, 1e-6, "softcap");
  }
}

// Logits of -20: each row of padding that is counted as a logit of 0 adds exp(20) times as much as a real one.
TEST_P(FixedValues, PaddedHeadRowsAreNotCounted) {
  for (std::int64_t v = 1; v <= 300; v = v < 40 ? v + 1 : v + 7) {
    Objective f = testing::fixture(1, v, 1);
    f.e.set(0, 1);
    for (std::int64_t i = 0; i < v; ++i) f.c.set(i, -20);
    f.labels = {v - 1};
    f.problem.want_d_c = v % 2 == 0;
    for (const Mode mode : testing::modes_of(f.problem)) {
      expect_near(testing::run_in(f, mode, GetParam()).loss.get(0), std::log(static_cast<double>(v)), 1e-6,
                  "V=" + std::to_string(v));
    }
  }
}

TEST_P(FixedValues, IgnoreIndexIsOnlyHonouredAtItsDefault) {
  const auto loss = [&](std::int64_t ignored, std::vector<std::int64_t> labels, Mode mode) {
    Objective f = testing::fixture(7, 11, 5);
    f.problem.ignore_index = ignored;
    if (!labels.empty()) f.labels = std::move(labels);
    const Results got = testing::run_in(f, mode, GetParam());
    EXPECT_TRUE(got.status.ok()) << got.status.message();
    return got.loss.get(0);
  };
  for (const Mode mode : {Mode::chunk, Mode::recompute, Mode::sparse}) {
    // Row 1 has label 4; the id stays in the softmax of the others.
    expect_near(loss(4, {}, mode), 3.72800438, 1e-6, "an id of the vocabulary");
    for (const std::int64_t ignored : {-1, 255}) {
      expect_near(loss(ignored, {}, mode), 3.77654999, 1e-6, "nothing to ignore");
      expect_near(loss(ignored, {5, 4, ignored, 2, 1, ignored, 10}, mode), kTerms[0].loss, 1e-6, "two to ignore");
    }
  }
}

// The same through the C interface.
TEST(FixedValuesInC, BiasAndSoftcapReachTheKernels) {
  for (const Term& term : kTerms) {
    Objective f = objective_of(term);
    cutloss_problem problem;
    cutloss_problem_init(&problem);
    problem.tokens = 7;
    problem.vocab = 11;
    problem.hidden = 5;
    problem.want_d_e = problem.want_d_c = 1;
    problem.has_bias = problem.want_d_bias = term.bias;
    problem.softcap = term.softcap;
    problem.reduction = term.reduction == Reduction::sum ? CUTLOSS_SUM : CUTLOSS_MEAN;
    cutloss_plan* plan = nullptr;
    ASSERT_EQ(cutloss_make_plan(&problem, nullptr, &plan), CUTLOSS_OK) << cutloss_last_error();
    std::vector<char> workspace(cutloss_plan_workspace_bytes(plan));
    Results got(f.problem);
    const Inputs in = f.inputs();
    cutloss_inputs inputs;
    cutloss_inputs_init(&inputs);
    inputs.e = in.e;
    inputs.c = in.c;
    inputs.labels = in.labels;
    inputs.bias = in.bias;
    cutloss_outputs outputs;
    cutloss_outputs_init(&outputs);
    const Outputs out = got.outputs();
    outputs.loss = out.loss;
    outputs.d_e = out.d_e;
    outputs.d_c = out.d_c;
    outputs.d_bias = out.d_bias;
    EXPECT_EQ(cutloss_run(plan, &inputs, &outputs, workspace.data(), workspace.size(), nullptr), CUTLOSS_OK)
        << cutloss_last_error();
    cutloss_plan_free(plan);
    expect_near(got.loss.get(0), term.loss, 1e-6, term.what);
    expect_near(testing::total(got.d_e), term.d_e, 1e-5, term.what);
    expect_near(testing::total(got.d_c), term.d_c, 1e-5, term.what);
    expect_near(testing::total(got.d_bias), term.d_bias, 1e-5, term.what);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, FixedValues, ::testing::ValuesIn(available_targets()), testing::target_name);

}  // namespace
}  // namespace cutloss
