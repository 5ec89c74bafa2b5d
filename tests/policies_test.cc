// tests/policies.json has one text for each rule a problem can break, tests/policy_values.json the kind of values that
// come of inputs at the edge. Here C++ and C must give them, in python/tests/test_policy_table.py and jax/ the tool,
// NumPy and JAX.
#if __has_include(<nlohmann/json.hpp>)
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cutloss/cutloss.h"
#include "tests/fixtures.h"

namespace cutloss {
namespace {

using Json = nlohmann::json;
using testing::Objective;

Json table(const char* name) {
  std::ifstream file(std::filesystem::path(__FILE__).parent_path() / name);
  return Json::parse(file);
}

// A number, or its name: JSON has no inf and no nan.
double number(const Json& value) {
  return value.is_string() ? std::strtod(value.get<std::string>().c_str(), nullptr) : value.get<double>();
}

template <typename Enum>
Enum named(const Json& value, std::initializer_list<Enum> all) {
  for (const Enum one : all) {
    if (name(one) == value.get<std::string>()) return one;
  }
  ADD_FAILURE() << value << " is no name";
  return *all.begin();
}

struct Broken {
  Objective f;
  Limits limits;
  std::string target = available_targets()[0];
  bool labels = true, overlap = false, misaligned = false;
};

Broken break_rule(const Json& set) {
  Broken b;
  const auto extent = [&](const char* what, std::int64_t otherwise) { return set.value(what, otherwise); };
  const std::int64_t n = extent("tokens", 7), v = extent("vocab", 11), d = extent("hidden", 5);
  b.f = testing::fixture(n, v < 1 ? 1 : v, d);
  Problem& p = b.f.problem;
  p.vocab = v;
  for (const auto& [word, value] : set.items()) {
    if (word == "softcap") p.softcap = static_cast<float>(number(value));
    if (word == "logit_scale") p.logit_scale = static_cast<float>(number(value));
    if (word == "label_smoothing") p.label_smoothing = static_cast<float>(number(value));
    if (word == "z_loss") p.z_loss = static_cast<float>(number(value));
    if (word == "tolerance") p.tolerance = static_cast<float>(number(value));
    if (word == "epsilon") p.epsilon = static_cast<float>(number(value));
    if (word == "top_k") p.metrics.top_k = value;
    if (word == "shift") p.shift = value;
    if (word == "ignore_index") p.ignore_index = value;
    if (word == "class_weights") p.class_weights = true;
    if (word == "denominator") b.f.denominator = number(value);
    if (word == "reduction") p.reduction = named(value, {Reduction::mean, Reduction::sum, Reduction::none});
    if (word == "filter") p.filter = named(value, {Filter::certified, Filter::unbiased, Filter::tile});
    if (word == "mode") b.limits.mode = named(value, {Mode::stream, Mode::chunk, Mode::sparse});
    if (word == "threads") b.limits.threads = value;
    if (word == "budget") b.limits.budget_bytes = value;
    if (word == "target") b.target = value;
    if (word == "label") b.f.labels[value[0].get<std::size_t>()] = value[1];
    if (word == "labels_all") b.f.labels.assign(b.f.labels.size(), value);
    if (word == "nan_labels") p.bad_labels = BadLabels::nan;
    if (word == "row") {
      for (std::int64_t k = 0; k < d; ++k)
        b.f.e.set(value[0].get<std::int64_t>() * d + k, static_cast<float>(number(value[1])));
    }
    if (word == "token_weight" || word == "token_weights_all") {
      p.token_weights = true;
      b.f.token_weights.assign(static_cast<std::size_t>(n), word == "token_weight" ? 1.0f : value.get<float>());
      if (word == "token_weight") b.f.token_weights[value[0].get<std::size_t>()] = value[1];
    }
    if (word == "class_weights_all") {
      p.class_weights = true;
      b.f.class_weights.assign(static_cast<std::size_t>(v), value);
    }
    if (word == "bias_at" || word == "bias_all") {
      p.bias_dtype = DType::f32;
      b.f.bias = testing::Buffer(DType::f32, v, word == "bias_all" ? static_cast<float>(number(value)) : 0.0f);
      if (word == "bias_at") b.f.bias.set(value[0], static_cast<float>(number(value[1])));
    }
    if (word == "soft_padding") {
      p.soft_targets = 2;
      b.labels = false;
      b.f.soft_ids.assign(static_cast<std::size_t>(2 * n), p.ignore_index);
      b.f.soft_probabilities.assign(b.f.soft_ids.size(), 0.5f);
    }
    if (word == "vocab_order") {
      p.vocab_order = true;
      b.f.order = value.get<std::vector<std::int64_t>>();
    }
    if (word == "soft_targets") {
      p.soft_targets = value;
      b.labels = false;
      b.f.soft_ids.assign(static_cast<std::size_t>(n * p.soft_targets), 1);
      b.f.soft_probabilities.assign(b.f.soft_ids.size(), 0.5f);
    }
    if (word == "wrt") {
      const auto wanted = value.get<std::vector<std::string>>();
      const auto has = [&](const char* what) { return std::count(wanted.begin(), wanted.end(), what) > 0; };
      p.want_d_e = has("e"), p.want_d_c = has("c"), p.want_d_bias = has("bias");
    }
    if (word == "accumulate") p.accumulate_d_c = true;
    if (word == "overlap") b.overlap = true;
    if (word == "misaligned") b.misaligned = true;
  }
  if (set.contains("soft_id")) {
    const Json& at = set["soft_id"];
    b.f.soft_ids[at[0].get<std::size_t>() * 2 + at[1].get<std::size_t>()] = at[2];
  }
  if (set.contains("labels")) b.labels = set["labels"];
  return b;
}

Inputs inputs_of(const Broken& b) {
  Inputs in = b.f.inputs();
  in.labels = b.labels ? b.f.labels.data() : nullptr;
  if (b.misaligned) in.e = static_cast<const char*>(in.e) + 1;
  return in;
}

// "" if nothing was refused.
std::string refusal_in_cpp(const Broken& b) {
  const Result<Plan> plan = make_plan(b.f.problem, b.limits, testing::machine_for(b.target));
  if (!plan.ok()) return plan.status().message();
  testing::Results results(b.f.problem);
  const Inputs in = inputs_of(b);
  Outputs out = results.outputs();
  if (b.overlap) out.d_c = const_cast<void*>(in.c);
  const Status status = run(plan.value(), in, out);
  EXPECT_TRUE(std::isnan(results.loss.get(0))) << "written before the check";
  return status.message();
}

cutloss_problem to_c(const Problem& p) {
  cutloss_problem c;
  cutloss_problem_init(&c);
  c.tokens = p.tokens, c.vocab = p.vocab, c.hidden = p.hidden;
  c.reduction = static_cast<std::int32_t>(p.reduction);
  c.ignore_index = p.ignore_index;
  c.softcap = p.softcap.value_or(0.0f);
  c.logit_scale = p.logit_scale;
  c.label_smoothing = p.label_smoothing;
  c.z_loss = p.z_loss;
  c.bad_labels = static_cast<std::int32_t>(p.bad_labels);
  c.has_bias = p.bias_dtype.has_value();
  c.token_weights = p.token_weights;
  c.class_weights = p.class_weights;
  c.vocab_order = p.vocab_order;
  c.soft_targets = p.soft_targets;
  c.shift = p.shift;
  c.top_k = p.metrics.top_k;
  c.want_d_e = p.want_d_e, c.want_d_c = p.want_d_c, c.want_d_bias = p.want_d_bias;
  c.accumulate_d_e = p.accumulate_d_e, c.accumulate_d_c = p.accumulate_d_c, c.accumulate_d_bias = p.accumulate_d_bias;
  c.e_dtype = static_cast<std::int32_t>(p.e_dtype), c.c_dtype = static_cast<std::int32_t>(p.c_dtype);
  c.label_dtype = static_cast<std::int32_t>(p.label_dtype), c.label_stride = p.label_stride;
  c.bias_dtype = static_cast<std::int32_t>(p.bias_dtype.value_or(DType::f32));
  c.has_d_e_dtype = p.d_e_dtype.has_value(), c.d_e_dtype = static_cast<std::int32_t>(d_e_dtype(p));
  c.has_d_c_dtype = p.d_c_dtype.has_value(), c.d_c_dtype = static_cast<std::int32_t>(d_c_dtype(p));
  c.has_e_strides = p.e_strides.has_value(), c.has_c_strides = p.c_strides.has_value();
  c.e_strides[0] = e_strides(p).axis0, c.e_strides[1] = e_strides(p).axis1;
  if (p.c_strides) c.c_strides[0] = p.c_strides->axis0, c.c_strides[1] = p.c_strides->axis1;
  c.sequence = p.sequence;
  c.filter = static_cast<std::int32_t>(p.filter);
  c.tolerance = p.tolerance.value_or(0.0f);
  c.epsilon = p.epsilon.value_or(0.0f);
  return c;
}

cutloss_status run_in_c(const Broken& b, testing::Results& results) {
  const cutloss_problem problem = to_c(b.f.problem);
  cutloss_limits limits;
  cutloss_limits_init(&limits);
  limits.mode = static_cast<std::int32_t>(b.limits.mode);
  limits.threads = b.limits.threads;
  limits.has_budget = b.limits.budget_bytes.has_value();
  limits.budget_bytes = b.limits.budget_bytes.value_or(0);
  limits.target = b.target.c_str();
  cutloss_plan* plan = nullptr;
  if (const auto failure = cutloss_make_plan(&problem, &limits, &plan); failure != CUTLOSS_OK) return failure;
  const Inputs in = inputs_of(b);
  const Outputs out = results.outputs();
  cutloss_inputs inputs;
  cutloss_inputs_init(&inputs);
  inputs.e = in.e, inputs.c = in.c, inputs.labels = in.labels;
  inputs.bias = in.bias;
  inputs.token_weights = in.token_weights, inputs.class_weights = in.class_weights;
  inputs.soft_ids = in.soft_ids, inputs.soft_probabilities = in.soft_probabilities;
  inputs.vocab_order = in.vocab_order;
  inputs.has_denominator = in.denominator.has_value();
  inputs.denominator = in.denominator.value_or(0);
  cutloss_outputs outputs;
  cutloss_outputs_init(&outputs);
  outputs.loss = out.loss, outputs.d_e = out.d_e, outputs.d_c = out.d_c, outputs.valid_count = out.valid_count;
  outputs.top_k_ids = out.top_k_ids, outputs.top_k_logprobs = out.top_k_logprobs;
  if (b.overlap) outputs.d_c = const_cast<void*>(in.c);
  std::vector<char> workspace(cutloss_plan_workspace_bytes(plan));
  const cutloss_status status = cutloss_run(plan, &inputs, &outputs, workspace.data(), workspace.size(), nullptr);
  cutloss_plan_free(plan);
  return status;
}

std::string refusal_in_c(const Broken& b) {
  testing::Results results(b.f.problem);
  return run_in_c(b, results) == CUTLOSS_OK ? "" : cutloss_last_error();
}

TEST(Policies, ARuleIsNotKeptOrHasAnotherTextInCOrCpp) {
  const Json policies = table("policies.json");
  ASSERT_GT(policies.size(), 40u);
  for (const Json& policy : policies) {
    const Broken b = break_rule(policy["set"]);
    std::string text = policy["text"];
    const bool open = text.ends_with("...");
    if (open) text.resize(text.size() - 3);
    for (const auto refusal : {refusal_in_cpp, refusal_in_c}) {
      const std::string said = refusal(b);
      EXPECT_EQ(open ? said.substr(0, text.size()) : said, text)
          << policy["set"] << (refusal == refusal_in_c ? " in C" : "");
    }
  }
}

// Rules that no array of another front end can break, or only one that NumPy or the tool speaks of by its own names.
TEST(Policies, AnExtentStrideOrDtypeIsTakenOrHasAnotherText) {
  constexpr std::int64_t k2to46 = std::int64_t{1} << 46;
  const struct {
    void (*breaks)(Problem&);
    std::string text;
  } rules[] = {
      {[](Problem& p) { p.tokens = -1; }, "tokens (N) is -1; it must be 0 or more"},
      {[](Problem& p) { p.hidden = (1 << 24) + 1; }, "hidden (D) is 16777217; it must be at most 2^24"},
      {[](Problem& p) { p.tokens = k2to46; }, "tokens x hidden is 70368744177664 x 5, more than 2^46 elements"},
      {[](Problem& p) { p.vocab = k2to46 / 5 + 1; }, "vocab x hidden is 14073748835533 x 5, more than 2^46 elements"},
      {[](Problem& p) { p.soft_targets = k2to46; },
       "tokens x soft_targets is 7 x 70368744177664, more than 2^46 elements"},
      {[](Problem& p) {
         p.e_strides = Strides{k2to46, 1};
       },
       "e has stride 70368744177664 over 7 entries, which spans more than 2^46 elements"},
      {[](Problem& p) {
         p.e_strides = Strides{5, INT64_MIN};
       },
       "e has stride -9223372036854775808 over 5 entries, which spans more than 2^46 elements"},
      {[](Problem& p) {
         p.c_strides = Strides{-k2to46 / 5, 1};
       },
       "c has stride -14073748835532 over 11 entries, which spans more than 2^46 elements"},
      {[](Problem& p) { p.label_stride = k2to46 / 7 + 1; },
       "labels has stride 10052677739667 over 7 entries, which spans more than 2^46 elements"},
      {[](Problem& p) { p.e_dtype = DType::i32; }, "e_dtype is i32; f32, bf16 and f16 are taken"},
      {[](Problem& p) { p.c_dtype = DType::i64; }, "c_dtype is i64; f32, bf16 and f16 are taken"},
      {[](Problem& p) { p.bias_dtype = DType::i64; }, "bias_dtype is i64; f32, bf16 and f16 are taken"},
      {[](Problem& p) { p.d_e_dtype = DType::i32; }, "d_e_dtype is i32; f32, bf16 and f16 are taken"},
      {[](Problem& p) { p.d_c_dtype = DType::i32; }, "d_c_dtype is i32; f32, bf16 and f16 are taken"},
      {[](Problem& p) { p.label_dtype = DType::f16; }, "label_dtype is f16; i32 and i64 are taken"},
      {[](Problem& p) { p.sequence = 3; }, "sequence is 3, which does not divide tokens (7)"},
      {[](Problem& p) { p.sequence = -1; }, "sequence is -1; it must be 0 (all tokens) or more"},
      {[](Problem& p) { p.soft_targets = -1; }, "soft_targets (K) is -1; it must be 0 (labels) or more"},
      {[](Problem& p) { p.want_d_e = false, p.accumulate_d_e = true; }, "accumulate_d_e is set, but d_e is not wanted"},
      {[](Problem& p) { p.accumulate_d_bias = true; }, "accumulate_d_bias is set, but d_bias is not wanted"},
  };
  for (const auto& rule : rules) {
    Problem p = testing::fixture(7, 11, 5).problem;
    rule.breaks(p);
    EXPECT_EQ(make_plan(p, {}, testing::machine_for(available_targets()[0])).status().message(), rule.text);
    const cutloss_problem c = to_c(p);
    cutloss_plan* plan = nullptr;
    EXPECT_EQ(cutloss_make_plan(&c, nullptr, &plan), CUTLOSS_INVALID_ARGUMENT) << rule.text;
    EXPECT_EQ(cutloss_last_error(), rule.text) << "in C";
  }
  // The very limits are taken: where the plan fails it is for want of memory.
  Problem p = testing::fixture(7, 11, 5).problem;
  p.e_strides = Strides{k2to46 / 7, 1}, p.c_strides = Strides{-(k2to46 / 11), 1}, p.label_stride = -(k2to46 / 7);
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  p.tokens = k2to46 / 5, p.e_strides.reset(), p.label_stride = 1;
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
}

// "zero", "nan", "inf", "finite", or a mix of these.
std::string kind_of(const testing::Buffer& values, std::int64_t begin, std::int64_t end) {
  bool zero = true, finite = true, nan = true, inf = true;
  for (std::int64_t i = begin; i < end; ++i) {
    const float x = values.get(i);
    zero &= x == 0, finite &= std::isfinite(x), nan &= std::isnan(x), inf &= std::isinf(x) && x > 0;
  }
  return zero ? "zero" : finite ? "finite" : nan ? "nan" : inf ? "inf" : "mixed";
}

void check_values(const Json& policy, const Problem& p, const testing::Results& got, const std::string& where) {
  const Json& want = policy["want"];
  const std::string text = policy["name"].get<std::string>() + where;
  EXPECT_EQ(kind_of(got.loss, 0, 1), want["loss"]) << text;
  EXPECT_EQ(got.valid_count, want["valid_count"]) << text;
  for (const auto& [name, gradient] : {std::pair("d_e", &got.d_e), std::pair("d_c", &got.d_c)}) {
    if (want.contains(name)) {
      EXPECT_EQ(kind_of(*gradient, 0, gradient->size()), want[name]) << text << ": " << name;
    }
  }
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const std::string kind = kind_of(got.d_e, i * p.hidden, (i + 1) * p.hidden);
    if (want.contains("zero_row")) {
      EXPECT_EQ(kind == "zero", i == want["zero_row"]) << text << ": row " << i;
    }
    if (want.contains("nan_row")) {
      EXPECT_EQ(kind, i == want["nan_row"] ? "nan" : "finite") << text << ": row " << i;
    }
  }
}

TEST(Policies, ARulesValueDiffersInCOrCpp) {
  const Json policies = table("policy_values.json");
  ASSERT_GT(policies.size(), 12u);
  for (const Json& policy : policies) {
    const Broken b = break_rule(policy["set"]);
    const Problem& p = b.f.problem;
    testing::Results cpp(p), c(p);
    const Result<Plan> plan = make_plan(p, b.limits, testing::machine_for(b.target));
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const Status status = run(plan.value(), inputs_of(b), cpp.outputs());
    EXPECT_TRUE(status.ok()) << status.message();
    check_values(policy, p, cpp, "");
    EXPECT_EQ(run_in_c(b, c), CUTLOSS_OK) << cutloss_last_error();
    check_values(policy, p, c, " in C");
  }
}

}  // namespace
}  // namespace cutloss
#endif
