// Every field of the C structs lands in its own place, and structs of other sizes are met halfway.
#include "src/capi/convert.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "src/capi/old_abi.h"
#include "src/cpu/test_problem.h"

namespace cutloss::capi {
namespace {

// Memory full of what a stack holds, with a guard behind it.
template <typename T>
struct Dirty {
  Dirty() { std::memset(static_cast<void*>(this), 0x5A, sizeof *this); }
  bool guard_intact() const {
    for (const unsigned char byte : guard) {
      if (byte != 0x5A) return false;
    }
    return true;
  }
  T value;
  unsigned char guard[256];
};

Problem converted(const cutloss_problem& from) {
  Problem to;
  const Status status = to_problem(&from, to);
  EXPECT_TRUE(status.ok()) << status.message();
  return to;
}

TEST(CApiConvert, DefaultsDifferFromThoseOfCpp) {
  Dirty<cutloss_problem> dirty;
  cutloss_problem_init(&dirty.value);
  EXPECT_TRUE(dirty.guard_intact());
  const Problem got = converted(dirty.value);
  const Problem want;
  EXPECT_EQ(got.label_stride, want.label_stride);
  EXPECT_EQ(got.label_dtype, want.label_dtype);
  EXPECT_EQ(got.ignore_index, want.ignore_index);
  EXPECT_EQ(got.logit_scale, want.logit_scale);
  EXPECT_EQ(got.label_smoothing, want.label_smoothing);
  EXPECT_EQ(got.z_loss, want.z_loss);
  EXPECT_EQ(got.filter, want.filter);
  EXPECT_FALSE(got.softcap || got.tolerance || got.epsilon || got.bias_dtype || got.d_e_dtype || got.d_c_dtype);
  EXPECT_FALSE(got.token_weights || got.class_weights || got.lse_cotangent || got.vocab_order || got.compensated);
  EXPECT_FALSE(got.want_d_e || got.want_d_c || got.want_d_bias);
  EXPECT_FALSE(got.accumulate_d_e || got.accumulate_d_c || got.accumulate_d_bias);
  EXPECT_EQ(got.soft_targets + got.shift + got.sequence + got.metrics.top_k, 0);
}

// One field at a time: a field read for another would show in that other.
TEST(CApiConvert, AFieldIsDroppedOrReadForAnother) {
  struct Flag {
    const char* name;
    std::int32_t cutloss_problem::*from;
    bool (*to)(const Problem&);
  };
#define CUTLOSS_FLAG(field)                                                   \
  Flag {                                                                      \
#field, &cutloss_problem::field, [](const Problem& p) { return p.field; } \
  }
#define CUTLOSS_METRIC(field)                                                         \
  Flag {                                                                              \
#field, &cutloss_problem::field, [](const Problem& p) { return p.metrics.field; } \
  }
  const Flag flags[] = {CUTLOSS_FLAG(want_d_e),          CUTLOSS_FLAG(want_d_c),
                        CUTLOSS_FLAG(want_d_bias),       CUTLOSS_FLAG(token_weights),
                        CUTLOSS_FLAG(class_weights),     CUTLOSS_FLAG(lse_cotangent),
                        CUTLOSS_FLAG(vocab_order),       CUTLOSS_FLAG(accumulate_d_e),
                        CUTLOSS_FLAG(accumulate_d_c),    CUTLOSS_FLAG(compensated),
                        CUTLOSS_FLAG(accumulate_d_bias), CUTLOSS_METRIC(entropy),
                        CUTLOSS_METRIC(argmax),          CUTLOSS_METRIC(rank),
                        CUTLOSS_METRIC(mean_logits)};
  for (const Flag& set : flags) {
    cutloss_problem p;
    cutloss_problem_init(&p);
    p.*set.from = 1;
    const Problem got = converted(p);
    for (const Flag& flag : flags) EXPECT_EQ(flag.to(got), &flag == &set) << set.name << " shows in " << flag.name;
  }
}

TEST(CApiConvert, AValueIsDroppedOrReadForAnother) {
  cutloss_problem p;
  cutloss_problem_init(&p);
  p.has_bias = p.has_d_e_dtype = p.has_d_c_dtype = 1;
  p.bias_dtype = CUTLOSS_F16;
  p.d_e_dtype = CUTLOSS_BF16;
  p.d_c_dtype = CUTLOSS_F32;
  p.e_dtype = CUTLOSS_F16;
  p.c_dtype = CUTLOSS_BF16;
  p.label_dtype = CUTLOSS_I32;
  p.logit_scale = 2;
  p.label_smoothing = 0.25f;
  p.z_loss = 3;
  p.softcap = 4;
  p.tolerance = 5;
  p.epsilon = 6;
  p.soft_targets = 7;
  p.shift = 8;
  p.sequence = 9;
  p.top_k = 10;
  p.filter = CUTLOSS_FILTER_UNBIASED;
  const Problem got = converted(p);
  EXPECT_EQ(got.bias_dtype, DType::f16);
  EXPECT_EQ(got.d_e_dtype, DType::bf16);
  EXPECT_EQ(got.d_c_dtype, DType::f32);
  EXPECT_EQ(got.e_dtype, DType::f16);
  EXPECT_EQ(got.c_dtype, DType::bf16);
  EXPECT_EQ(got.label_dtype, DType::i32);
  EXPECT_EQ(got.logit_scale, 2);
  EXPECT_EQ(got.label_smoothing, 0.25f);
  EXPECT_EQ(got.z_loss, 3);
  EXPECT_EQ(got.softcap, 4);
  EXPECT_EQ(got.tolerance, 5);
  EXPECT_EQ(got.epsilon, 6);
  EXPECT_EQ(got.soft_targets, 7);
  EXPECT_EQ(got.shift, 8);
  EXPECT_EQ(got.sequence, 9);
  EXPECT_EQ(got.metrics.top_k, 10);
  EXPECT_EQ(got.filter, Filter::unbiased);
}

// Each pointer is the address of its own byte.
TEST(CApiConvert, APointerIsDroppedOrReadForAnother) {
  static std::int64_t at[16];
  cutloss_inputs in;
  cutloss_inputs_init(&in);
  in.e = &at[0];
  in.c = &at[1];
  in.labels = &at[2];
  in.cotangent = reinterpret_cast<float*>(&at[3]);
  in.bias = &at[4];
  in.token_weights = reinterpret_cast<float*>(&at[5]);
  in.class_weights = reinterpret_cast<float*>(&at[6]);
  in.lse_cotangent = reinterpret_cast<float*>(&at[7]);
  in.soft_ids = &at[8];
  in.soft_probabilities = reinterpret_cast<float*>(&at[9]);
  in.vocab_order = &at[10];
  in.seed = ~std::uint64_t{0};
  Inputs got;
  ASSERT_TRUE(to_inputs(&in, got).ok());
  const void* const inputs[] = {got.e,
                                got.c,
                                got.labels,
                                got.cotangent,
                                got.bias,
                                got.token_weights,
                                got.class_weights,
                                got.lse_cotangent,
                                got.soft_ids,
                                got.soft_probabilities,
                                got.vocab_order};
  for (std::size_t i = 0; i < std::size(inputs); ++i) EXPECT_EQ(inputs[i], &at[i]) << i;
  EXPECT_EQ(got.seed, in.seed);
  EXPECT_FALSE(got.denominator);
  in.has_denominator = 1;
  in.denominator = 0;  // legal, and not "none"
  ASSERT_TRUE(to_inputs(&in, got).ok());
  EXPECT_EQ(got.denominator, 0);

  cutloss_outputs out;
  cutloss_outputs_init(&out);
  out.loss = reinterpret_cast<float*>(&at[0]);
  out.nll = reinterpret_cast<float*>(&at[1]);
  out.lse = reinterpret_cast<float*>(&at[2]);
  out.d_e = &at[3];
  out.d_c = &at[4];
  out.valid_count = &at[5];
  out.d_bias = &at[6];
  out.entropy = reinterpret_cast<float*>(&at[7]);
  out.argmax = &at[8];
  out.correct = reinterpret_cast<std::uint8_t*>(&at[9]);
  out.rank = &at[10];
  out.top_k_ids = &at[11];
  out.top_k_logprobs = reinterpret_cast<float*>(&at[12]);
  out.mean_logits = reinterpret_cast<float*>(&at[13]);
  Outputs to;
  cutloss_filter_report* report = nullptr;
  ASSERT_TRUE(to_outputs(&out, to, report).ok());
  const void* const outputs[] = {to.loss,           to.nll,        to.lse,    to.d_e,     to.d_c,  to.valid_count,
                                 to.d_bias,         to.entropy,    to.argmax, to.correct, to.rank, to.top_k_ids,
                                 to.top_k_logprobs, to.mean_logits};
  for (std::size_t i = 0; i < std::size(outputs); ++i) EXPECT_EQ(outputs[i], &at[i]) << i;
  EXPECT_EQ(report, nullptr);
}

TEST(CApiConvert, BadEnumsAreCast) {
  struct Enum {
    const char* name;
    std::int32_t cutloss_problem::*field;
    std::int32_t count;
  };
  for (const Enum& e :
       {Enum{"e_dtype", &cutloss_problem::e_dtype, 5}, Enum{"c_dtype", &cutloss_problem::c_dtype, 5},
        Enum{"label_dtype", &cutloss_problem::label_dtype, 5}, Enum{"head_layout", &cutloss_problem::head_layout, 2},
        Enum{"reduction", &cutloss_problem::reduction, 3}, Enum{"bad_labels", &cutloss_problem::bad_labels, 2},
        Enum{"filter", &cutloss_problem::filter, 4}, Enum{"bias_dtype", &cutloss_problem::bias_dtype, 5},
        Enum{"d_e_dtype", &cutloss_problem::d_e_dtype, 5}, Enum{"d_c_dtype", &cutloss_problem::d_c_dtype, 5}}) {
    for (const std::int32_t value : {-1, e.count, 1 << 30}) {
      cutloss_problem p;
      cutloss_problem_init(&p);
      p.has_bias = p.has_d_e_dtype = p.has_d_c_dtype = 1;
      p.*e.field = value;
      Problem to;
      EXPECT_EQ(to_problem(&p, to).message(), std::string(e.name) + " is " + std::to_string(value) +
                                                  "; it must be in [0, " + std::to_string(e.count) + ")");
    }
  }
}

// ------------------------------------------------------------------------------------------------ other versions

TEST(CApiVersions, AnOldProgramsPaddingIsReadAsAnOption) {
  // What follows the last field of the old struct is padding, which the old program never wrote.
  static_assert(sizeof(v0_1_0::problem) <= offsetof(cutloss_problem, has_bias));
  static_assert(sizeof(v0_1_0::inputs) == offsetof(cutloss_inputs, bias));
  static_assert(sizeof(v0_1_0::outputs) == offsetof(cutloss_outputs, d_bias));
  static_assert(offsetof(v0_1_0::problem, want_d_c) == offsetof(cutloss_problem, want_d_c));
}

TEST(CApiVersions, AnOldProgramGetsOtherResultsOrIsWrittenPastItsStructs) {
  testing::Case test = testing::Case::random(30, 70, 12, 1);
  Dirty<v0_1_0::problem> p;
  cutloss_problem_init_sized(reinterpret_cast<cutloss_problem*>(&p.value), sizeof p.value);
  EXPECT_TRUE(p.guard_intact());
  EXPECT_EQ(p.value.size, sizeof p.value);
  EXPECT_EQ(p.value.ignore_index, -100);
  // The bytes after the last field as an old program may have them.
  std::memset(reinterpret_cast<char*>(&p.value.want_d_c) + 4, 0x5A,
              sizeof p.value - offsetof(v0_1_0::problem, want_d_c) - 4);
  p.value.tokens = 30;
  p.value.vocab = 70;
  p.value.hidden = 12;
  p.value.want_d_e = 1;
  cutloss_plan* plan = nullptr;
  ASSERT_EQ(cutloss_make_plan(reinterpret_cast<cutloss_problem*>(&p.value), nullptr, &plan), CUTLOSS_OK)
      << cutloss_last_error();
  Dirty<v0_1_0::inputs> in;
  cutloss_inputs_init_sized(reinterpret_cast<cutloss_inputs*>(&in.value), sizeof in.value);
  in.value.e = test.e.data();
  in.value.c = test.c.data();
  in.value.labels = test.labels.data();
  Dirty<v0_1_0::outputs> out;
  cutloss_outputs_init_sized(reinterpret_cast<cutloss_outputs*>(&out.value), sizeof out.value);
  float loss = -1;
  std::vector<float> d_e(test.e.size(), NAN);
  out.value.loss = &loss;
  out.value.d_e = d_e.data();
  std::vector<char> workspace(cutloss_plan_workspace_bytes(plan));
  ASSERT_EQ(cutloss_run(plan, reinterpret_cast<cutloss_inputs*>(&in.value),
                        reinterpret_cast<cutloss_outputs*>(&out.value), workspace.data(), workspace.size(), nullptr),
            CUTLOSS_OK)
      << cutloss_last_error();
  cutloss_plan_free(plan);
  EXPECT_TRUE(in.guard_intact());
  EXPECT_TRUE(out.guard_intact());

  test.problem.want_d_e = true;
  const testing::Answer want =
      testing::run_plan(make_plan(test.problem, {}, Machine::detect().value()).value(), test.inputs());
  EXPECT_EQ(loss, want.loss[0]);
  for (std::size_t i = 0; i < d_e.size(); ++i) EXPECT_EQ(d_e[i], want.d_e.get(i));
}

TEST(CApiVersions, ANewerProgramsFieldsAreWritten) {
  struct Newer {
    cutloss_filter_report known;
    double unknown;
  };
  Dirty<Newer> newer;
  cutloss_filter_report_init_sized(&newer.value.known, sizeof newer.value);
  EXPECT_EQ(newer.value.known.size, sizeof(cutloss_filter_report));
  FilterReport from;
  from.rows = 1;
  from.rows_redone = 2;
  from.kept_entries = 3;
  from.epsilon = 4;
  from.dropped_mass_mean = 5;
  from.dropped_mass_max = 6;
  from.error_bound = 7;
  write_report(from, &newer.value.known);
  unsigned char untouched[sizeof(double)];
  std::memset(untouched, 0x5A, sizeof untouched);
  EXPECT_EQ(std::memcmp(&newer.value.unknown, untouched, sizeof untouched), 0);
  const cutloss_filter_report& got = newer.value.known;
  EXPECT_EQ(got.rows, 1);
  EXPECT_EQ(got.rows_redone, 2);
  EXPECT_EQ(got.kept_entries, 3);
  EXPECT_EQ(got.epsilon, 4);
  EXPECT_EQ(got.dropped_mass_mean, 5);
  EXPECT_EQ(got.dropped_mass_max, 6);
  EXPECT_EQ(got.error_bound, 7);

  cutloss_filter_report old;
  std::memset(&old, 0x5A, sizeof old);
  old.size = offsetof(cutloss_filter_report, epsilon);
  const double before = old.epsilon;
  write_report(from, &old);
  EXPECT_EQ(old.kept_entries, 3);
  EXPECT_EQ(std::memcmp(&old.epsilon, &before, sizeof before), 0);
}

TEST(CApiVersions, InitOfNothingCrashes) {
  cutloss_problem_init(nullptr);
  cutloss_limits_init(nullptr);
  cutloss_inputs_init(nullptr);
  cutloss_outputs_init(nullptr);
  cutloss_filter_report_init(nullptr);
  (cutloss_problem_init)(nullptr);
  (cutloss_limits_init)(nullptr);
  (cutloss_inputs_init)(nullptr);
  (cutloss_outputs_init)(nullptr);
  (cutloss_filter_report_init)(nullptr);
  Dirty<cutloss_problem> dirty;
  cutloss_problem_init_sized(&dirty.value, 3);  // has no room for a size
  EXPECT_EQ(dirty.value.tokens, 0x5A5A5A5A5A5A5A5A);
}

TEST(CApiVersions, OtherLanguagesGetAnotherStructThanC) {
  cutloss_problem c, other;
  std::memset(&c, 1, sizeof c);
  std::memset(&other, 2, sizeof other);
  cutloss_problem_init(&c);
  (cutloss_problem_init)(&other);
  EXPECT_EQ(std::memcmp(&c, &other, sizeof c), 0);
}

TEST(CApiVersions, AReportWithoutASizeIsWritten) {
  cutloss_outputs out;
  cutloss_outputs_init(&out);
  cutloss_filter_report report;
  report.size = 0;
  out.filter_report = &report;
  Outputs to;
  cutloss_filter_report* address = nullptr;
  EXPECT_EQ(to_outputs(&out, to, address).message(),
            "filter_report.size is 0; set it (cutloss_filter_report_init does, where there is one)");
}

}  // namespace
}  // namespace cutloss::capi
