// Every allocation of every entry point fails once: the call says "out of memory", has written nothing and leaks
// nothing, and the next call works.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/trust/failing_new.h"

namespace cutloss {
namespace {

using testing::armed;
using testing::fail_each;
using testing::machine;
using testing::Outcome;
using testing::outcome_of;

enum class Kind { smoothed, certified, unbiased, tile };
constexpr Kind kKinds[] = {Kind::smoothed, Kind::certified, Kind::unbiased, Kind::tile};

// Small problems with everything in them that takes another path.
struct Small {
  Problem problem;
  std::vector<float> e, c, bias, probabilities;
  std::vector<std::int64_t> labels, ids, order;

  explicit Small(Kind kind = Kind::smoothed)
      : e(60 * 5), c(90 * 5), bias(90), probabilities(60 * 2, 0.5f), labels(60), ids(60 * 2), order(90) {
    problem.tokens = 60;
    problem.vocab = 90;
    problem.hidden = 5;
    problem.want_d_e = problem.want_d_c = true;
    problem.metrics = {true, true, true, 3, true};
    if (kind == Kind::smoothed) problem.label_smoothing = 0.1f;
    if (kind == Kind::smoothed || kind == Kind::unbiased) problem.softcap = 5.0f;
    if (kind == Kind::certified) problem.filter = Filter::certified, problem.tolerance = 1e-3f;
    if (kind == Kind::unbiased) problem.filter = Filter::unbiased, problem.epsilon = 1e-3f, problem.soft_targets = 2;
    if (kind == Kind::tile) problem.filter = Filter::tile, problem.epsilon = 1e-3f;
    if (kind == Kind::unbiased || kind == Kind::tile) {
      problem.bias_dtype = DType::f32;
      problem.want_d_bias = problem.vocab_order = true;
    }
    for (std::size_t i = 0; i < e.size(); ++i) e[i] = static_cast<float>(i * 7 % 13) / 6 - 1;
    for (std::size_t i = 0; i < c.size(); ++i) c[i] = static_cast<float>(i * 5 % 17) / 4 - 2;
    for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<std::int64_t>(i * 11 % 90);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 13 % 90);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i * 7 % 90);
  }
  Inputs inputs() const {
    Inputs in{e.data(), c.data(), problem.soft_targets > 0 ? nullptr : labels.data()};
    if (problem.bias_dtype) in.bias = bias.data();
    if (problem.vocab_order) in.vocab_order = order.data();
    if (problem.soft_targets > 0) in.soft_ids = ids.data(), in.soft_probabilities = probabilities.data();
    return in;
  }
};

// Outputs that can be told from what they were.
struct Written {
  explicit Written(const Small& small)
      : rows(60 * 6, kUntouched),
        d_e(small.e.size(), kUntouched),
        d_c(small.c.size() + 180, kUntouched),
        ids(60 * 5, -9),
        wants_d_bias(small.problem.want_d_bias) {}

  Outputs outputs() {
    Outputs out{&rows[0], &rows[60], &rows[120], d_e.data(), d_c.data(), &valid};
    out.entropy = &rows[180];
    out.top_k_logprobs = logprobs;
    out.mean_logits = &d_c[450];
    if (wants_d_bias) out.d_bias = &d_c[540];
    out.argmax = ids.data();
    out.rank = &ids[60];
    out.top_k_ids = &ids[120];
    return out;
  }
  std::string bits() const {
    std::string all(reinterpret_cast<const char*>(rows.data()), rows.size() * 4);
    all.append(reinterpret_cast<const char*>(d_e.data()), d_e.size() * 4);
    all.append(reinterpret_cast<const char*>(d_c.data()), d_c.size() * 4);
    all.append(reinterpret_cast<const char*>(ids.data()), ids.size() * 8);
    all.append(reinterpret_cast<const char*>(logprobs), sizeof logprobs);
    return all + std::to_string(valid);
  }

  static constexpr float kUntouched = 77.5f;
  std::vector<float> rows, d_e, d_c;
  std::vector<std::int64_t> ids;
  bool wants_d_bias;
  float logprobs[180] = {};
  std::int64_t valid = -5;
};

TEST(Allocation, DetectOrValidateThrowsOrIgnoresIt) {
  Machine want = Machine::detect().value();
  EXPECT_GT(fail_each([&] {
              const Result<Machine> got = Machine::detect();
              const bool same = !got.ok() || (got->threads == want.threads && got->l1_bytes == want.l1_bytes &&
                                              got->l2_bytes == want.l2_bytes && got->l3_bytes == want.l3_bytes);
              return same ? outcome_of(got.status()) : Outcome::wrong;
            }),
            0);
  Problem bad;
  bad.tokens = 1;
  bad.hidden = 1;
  EXPECT_GT(fail_each([&] { return outcome_of(validate(bad), StatusCode::invalid_argument); }), 0);
}

TEST(Allocation, MakePlanThrowsOrPlansWithHalfOfWhatItKnows) {
  for (const Kind kind : kKinds) {
    const Small small(kind);
    const Machine m = machine();
    for (const std::uint64_t budget : {std::uint64_t{0}, std::uint64_t{1} << 20, std::uint64_t{100}}) {
      Limits limits;
      if (budget > 0) limits.budget_bytes = budget;
      const StatusCode expected = budget == 100 ? StatusCode::budget_too_small : StatusCode::ok;
      const std::string want = expected == StatusCode::ok ? make_plan(small.problem, limits, m).value().json()
                                                          : make_plan(small.problem, limits, m).status().message();
      EXPECT_GT(fail_each([&] {
                  const Result<Plan> got = make_plan(small.problem, limits, m);
                  armed = false;
                  if (got.status().code() == StatusCode::out_of_memory) return Outcome::out_of_memory;
                  const std::string text = got.ok() ? got->json() : got.status().message();
                  return text == want ? outcome_of(got.status(), expected) : Outcome::wrong;
                }),
                0);
    }
  }
}

TEST(Allocation, MaxTokensTakesAFailureForALimit) {
  const Small small;
  const Machine m = machine();
  Limits limits;
  limits.budget_bytes = 1 << 20;
  const std::int64_t want = max_tokens(small.problem, limits, m).value();
  EXPECT_GT(fail_each([&] {
              const Result<std::int64_t> got = max_tokens(small.problem, limits, m);
              return got.ok() && got.value() != want ? Outcome::wrong : outcome_of(got.status());
            }),
            0);
}

TEST(Allocation, RunThrowsOrWritesHalfItsOutputs) {
  for (const Kind kind : kKinds) {
    const Small small(kind);
    const Plan plan = make_plan(small.problem, {}, machine()).value();
    Written written(small);
    const std::string untouched = written.bits();
    ASSERT_TRUE(run(plan, small.inputs(), written.outputs()).ok());
    const std::string want = written.bits();
    const auto check = [&](bool ok) {
      EXPECT_EQ(written.bits() == want, ok);
      if (!ok) {
        EXPECT_TRUE(written.bits() == untouched);
      }
      written = Written(small);
    };
    written = Written(small);
    const Inputs in = small.inputs();
    EXPECT_GT(fail_each([&] { return outcome_of(run(plan, in, written.outputs())); }, check), 0);
    std::vector<std::byte> workspace(plan.workspace_bytes);
    EXPECT_GT(fail_each([&] { return outcome_of(run(plan, in, written.outputs(), workspace)); }, check), 0);
    // With workspace and executor of the caller's there is nothing left to allocate.
    struct Serial final : Executor {
      int concurrency() const override { return 1; }
      void parallel_for(std::int64_t tasks, const Body& body) override {
        for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
      }
    } serial;
    EXPECT_EQ(fail_each([&] { return outcome_of(run(plan, in, written.outputs(), workspace, &serial)); }, check), 0);
  }
}

TEST(Allocation, ARefusalOfRunThrows) {
  Small small;
  small.labels[7] = 1 << 20;
  const Plan plan = make_plan(small.problem, {}, machine()).value();
  Written written(small);
  const Inputs in = small.inputs();
  const std::string untouched = written.bits();
  EXPECT_GT(fail_each([&] { return outcome_of(run(plan, in, written.outputs()), StatusCode::invalid_argument); }), 0);
  EXPECT_EQ(written.bits(), untouched);
}

TEST(Allocation, LearnVocabOrderThrowsOrWritesHalfAnOrder) {
  const Small small;
  Problem p = small.problem;
  std::vector<std::int64_t> order(90, -9), want(90);
  const Inputs in = small.inputs();
  ASSERT_TRUE(learn_vocab_order(p, in, want.data()).ok());
  EXPECT_GT(fail_each([&] { return outcome_of(learn_vocab_order(p, in, order.data())); },
                      [&](bool ok) {
                        EXPECT_EQ(order, ok ? want : std::vector<std::int64_t>(90, -9));
                        order.assign(90, -9);
                      }),
            0);
}

// Planning and running a problem with all its options through cutloss.h.
void fail_each_of_the_c_interface(const Small& small) {
  const Problem& problem = small.problem;
  cutloss_problem p;
  cutloss_problem_init(&p);
  p.tokens = problem.tokens, p.hidden = problem.hidden, p.vocab = problem.vocab;
  p.want_d_e = p.want_d_c = 1;
  p.want_d_bias = p.has_bias = problem.bias_dtype.has_value();
  p.softcap = problem.softcap.value_or(0), p.label_smoothing = problem.label_smoothing;
  p.soft_targets = problem.soft_targets, p.vocab_order = problem.vocab_order;
  p.filter = static_cast<std::int32_t>(problem.filter);
  p.tolerance = problem.tolerance.value_or(0), p.epsilon = problem.epsilon.value_or(0);
  p.entropy = p.argmax = p.rank = p.mean_logits = 1, p.top_k = 3;
  cutloss_limits limits;
  cutloss_limits_init(&limits);
  limits.threads = 3;
  EXPECT_GT(fail_each([&] {
              cutloss_plan* plan = nullptr;
              const cutloss_status status = cutloss_make_plan(&p, &limits, &plan);
              const bool consistent = (status == CUTLOSS_OK) == (plan != nullptr);
              cutloss_plan_free(plan);
              return consistent ? outcome_of(status) : Outcome::wrong;
            }),
            0);
  cutloss_plan* plan = nullptr;
  ASSERT_EQ(cutloss_make_plan(&p, &limits, &plan), CUTLOSS_OK) << cutloss_last_error();
  std::vector<char> workspace(cutloss_plan_workspace_bytes(plan));
  const Inputs from = small.inputs();
  cutloss_inputs in;
  cutloss_inputs_init(&in);
  in.e = from.e, in.c = from.c, in.labels = from.labels, in.bias = from.bias, in.vocab_order = from.vocab_order;
  in.soft_ids = from.soft_ids, in.soft_probabilities = from.soft_probabilities;
  Written written(small);
  const std::string untouched = written.bits();
  cutloss_filter_report report;
  cutloss_filter_report_init(&report);
  const auto outputs = [&] {
    const Outputs to = written.outputs();
    cutloss_outputs out;
    cutloss_outputs_init(&out);
    out.loss = to.loss, out.nll = to.nll, out.lse = to.lse, out.valid_count = to.valid_count;
    out.d_e = to.d_e, out.d_c = to.d_c, out.d_bias = to.d_bias;
    out.entropy = to.entropy, out.mean_logits = to.mean_logits, out.argmax = to.argmax, out.rank = to.rank;
    out.top_k_ids = to.top_k_ids, out.top_k_logprobs = to.top_k_logprobs, out.filter_report = &report;
    return out;
  };
  EXPECT_GT(fail_each(
                [&] {
                  const cutloss_outputs out = outputs();
                  return outcome_of(cutloss_run(plan, &in, &out, workspace.data(), workspace.size(), nullptr));
                },
                [&](bool ok) {
                  EXPECT_EQ(written.bits() == untouched, !ok);
                  written = Written(small);
                }),
            0);
  cutloss_plan_free(plan);
}

TEST(Allocation, TheCInterfaceThrowsOrHasNothingToSay) {
  const Small small;
  cutloss_problem p;
  cutloss_problem_init(&p);
  p.tokens = 60;
  p.hidden = 5;
  p.vocab = 90;
  p.want_d_e = p.want_d_c = 1;
  EXPECT_GT(fail_each([&] {
              cutloss_plan* plan = nullptr;
              const cutloss_status status = cutloss_make_plan(&p, nullptr, &plan);
              const bool consistent =
                  (status == CUTLOSS_OK) == (plan != nullptr) &&
                  (plan == nullptr || cutloss_plan_json(plan)[std::strlen(cutloss_plan_json(plan)) - 1] == '}');
              cutloss_plan_free(plan);
              return consistent ? outcome_of(status) : Outcome::wrong;
            }),
            0);

  cutloss_plan* plan = nullptr;
  ASSERT_EQ(cutloss_make_plan(&p, nullptr, &plan), CUTLOSS_OK);
  std::vector<char> workspace(cutloss_plan_workspace_bytes(plan));
  std::vector<float> d_e(small.e.size(), -1), d_c(small.c.size(), -1);
  float loss = -1;
  cutloss_inputs in;
  cutloss_inputs_init(&in);
  in.e = small.e.data();
  in.c = small.c.data();
  in.labels = small.labels.data();
  cutloss_outputs out;
  cutloss_outputs_init(&out);
  out.loss = &loss;
  out.d_e = d_e.data();
  out.d_c = d_c.data();
  EXPECT_GT(
      fail_each([&] { return outcome_of(cutloss_run(plan, &in, &out, workspace.data(), workspace.size(), nullptr)); },
                [&](bool ok) {
                  EXPECT_EQ(loss != -1, ok);
                  loss = -1;
                }),
      0);
  std::vector<std::int64_t> labels(small.labels);
  labels[3] = -2;
  in.labels = labels.data();
  EXPECT_GT(fail_each([&] {
              return outcome_of(cutloss_run(plan, &in, &out, workspace.data(), workspace.size(), nullptr),
                                CUTLOSS_INVALID_ARGUMENT);
            }),
            0);
  EXPECT_EQ(loss, -1);
  in.labels = small.labels.data();
  std::vector<std::int64_t> order(90);
  EXPECT_GT(fail_each([&] { return outcome_of(cutloss_learn_vocab_order(&p, &in, order.data())); }), 0);
  cutloss_plan_free(plan);

  for (const Kind kind : kKinds) fail_each_of_the_c_interface(Small(kind));

  const float one = 1, negative = -1;
  EXPECT_EQ(fail_each([&] { return outcome_of(cutloss_combine_shards(1, 1, &one, &one, &one, nullptr, nullptr)); }), 0);
  EXPECT_GT(fail_each([&] {
              return outcome_of(cutloss_combine_shards(1, 1, &one, &negative, &one, nullptr, nullptr),
                                CUTLOSS_INVALID_ARGUMENT);
            }),
            0);
}

}  // namespace
}  // namespace cutloss
