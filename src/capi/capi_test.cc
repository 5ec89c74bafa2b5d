// The C interface gives what the C++ one gives, and turns every bad call into a code and a text.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "cutloss/cutloss.h"
#include "src/cpu/test_problem.h"

namespace cutloss {
namespace {

cutloss_problem problem_of(const Problem& p) {
  cutloss_problem c;
  cutloss_problem_init(&c);
  c.tokens = p.tokens;
  c.hidden = p.hidden;
  c.vocab = p.vocab;
  c.want_d_e = p.want_d_e;
  c.want_d_c = p.want_d_c;
  return c;
}

struct CRun {
  cutloss_plan* plan = nullptr;
  std::vector<char> workspace;
  float loss = -1;
  std::vector<float> d_e;

  ~CRun() { cutloss_plan_free(plan); }
  cutloss_status run(testing::Case& test, const cutloss_executor* executor = nullptr) {
    workspace.resize(cutloss_plan_workspace_bytes(plan));
    d_e.assign(test.e.size(), NAN);
    cutloss_inputs in;
    cutloss_inputs_init(&in);
    in.e = test.e.data();
    in.c = test.c.data();
    in.labels = test.labels.data();
    cutloss_outputs out;
    cutloss_outputs_init(&out);
    out.loss = &loss;
    out.d_e = d_e.data();
    return cutloss_run(plan, &in, &out, workspace.data(), workspace.size(), executor);
  }
};

TEST(CApi, EqualsTheCppInterface) {
  testing::Case test = testing::Case::random(30, 70, 12, 1);
  test.problem.want_d_e = true;
  const cutloss_problem p = problem_of(test.problem);
  CRun c;
  ASSERT_EQ(cutloss_make_plan(&p, nullptr, &c.plan), CUTLOSS_OK) << cutloss_last_error();
  ASSERT_EQ(c.run(test), CUTLOSS_OK) << cutloss_last_error();
  const Plan plan = make_plan(test.problem, {}, Machine::detect().value()).value();
  const testing::Answer want = testing::run_plan(plan, test.inputs());
  EXPECT_EQ(c.loss, want.loss[0]);
  for (std::size_t i = 0; i < c.d_e.size(); ++i) EXPECT_EQ(c.d_e[i], want.d_e.get(i));
  EXPECT_EQ(cutloss_plan_json(c.plan), plan.json());
}

TEST(CApi, RunsOnTheHostsExecutor) {
  testing::Case test = testing::Case::random(30, 70, 12, 1);
  test.problem.want_d_e = true;
  const cutloss_problem p = problem_of(test.problem);
  CRun c;
  ASSERT_EQ(cutloss_make_plan(&p, nullptr, &c.plan), CUTLOSS_OK);
  int calls = 0;
  const cutloss_executor host{
      sizeof(cutloss_executor), &calls, 1,
      [](void* context, std::int64_t tasks, void (*body)(void*, std::int64_t, std::int32_t), void* body_context) {
        ++*static_cast<int*>(context);
        for (std::int64_t i = 0; i < tasks; ++i) body(body_context, i, 0);
      }};
  ASSERT_EQ(c.run(test, &host), CUTLOSS_OK) << cutloss_last_error();
  EXPECT_GT(calls, 0);
}

TEST(CApi, BadCallsAreCodesAndTextsNotCrashes) {
  cutloss_plan* plan = nullptr;
  EXPECT_EQ(cutloss_make_plan(nullptr, nullptr, &plan), CUTLOSS_INVALID_ARGUMENT);
  EXPECT_STREQ(cutloss_last_error(), "problem is null");
  cutloss_problem p;
  cutloss_problem_init(&p);
  EXPECT_EQ(cutloss_make_plan(&p, nullptr, nullptr), CUTLOSS_INVALID_ARGUMENT);
  EXPECT_EQ(cutloss_make_plan(&p, nullptr, &plan), CUTLOSS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(cutloss_last_error()).find("hidden"), std::string::npos);
  p.tokens = p.hidden = p.vocab = 8;
  p.reduction = 7;
  EXPECT_EQ(cutloss_make_plan(&p, nullptr, &plan), CUTLOSS_INVALID_ARGUMENT);
  EXPECT_STREQ(cutloss_last_error(), "reduction is 7; it must be in [0, 3)");
  cutloss_problem raw;
  std::memset(&raw, 0, sizeof raw);
  EXPECT_EQ(cutloss_make_plan(&raw, nullptr, &plan), CUTLOSS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(cutloss_last_error()).find("cutloss_problem_init"), std::string::npos);
  p.reduction = CUTLOSS_MEAN;
  cutloss_limits limits;
  cutloss_limits_init(&limits);
  limits.has_budget = 1;
  EXPECT_EQ(cutloss_make_plan(&p, &limits, &plan), CUTLOSS_BUDGET_TOO_SMALL);
  limits.has_budget = 0;
  limits.target = "avx9000";
  EXPECT_EQ(cutloss_make_plan(&p, &limits, &plan), CUTLOSS_UNAVAILABLE);
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(cutloss_run(nullptr, nullptr, nullptr, nullptr, 0, nullptr), CUTLOSS_INVALID_ARGUMENT);
}

// A program built against an older, shorter struct must get the defaults for what it did not know.
TEST(CApi, ShorterStructsKeepTheDefaults) {
  testing::Case test = testing::Case::random(9, 20, 4, 1, 2.0f, DType::f32, false);
  test.problem.want_d_e = true;
  cutloss_problem p = problem_of(test.problem);
  cutloss_limits limits;
  cutloss_limits_init(&limits);
  limits.size = offsetof(cutloss_limits, has_budget);
  limits.has_budget = 1;
  limits.budget_bytes = 0;
  CRun c;
  EXPECT_EQ(cutloss_make_plan(&p, &limits, &c.plan), CUTLOSS_OK) << cutloss_last_error();
}

}  // namespace
}  // namespace cutloss
