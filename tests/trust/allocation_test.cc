// Every allocation of every entry point fails once: the call says "out of memory", has written nothing and leaks
// nothing, and the next call works. Nor does an analysis hold what grows with tokens x vocabulary. A program of its own,
// since it replaces operator new.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "cutloss/cutloss.h"
#include "cutloss/cutloss.hpp"
#include "src/analysis/analysis.h"

namespace {

std::atomic<bool> armed{false};
std::atomic<std::int64_t> count{0};         // allocations since arm()
std::atomic<std::int64_t> fails_from{-1};   // the first of them that fails; -1: none
std::atomic<std::int64_t> fails_until{-1};  // and the one behind the last
std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> live_bytes{0}, most_bytes{0};  // most_bytes: since it was set

void* allocate(std::size_t size, std::size_t alignment) {
  if (armed) {
    const std::int64_t at = count++;
    if (at >= fails_from && at < fails_until) return nullptr;
  }
  void* const memory = alignment <= alignof(std::max_align_t)
                           ? std::malloc(size == 0 ? 1 : size)
                           : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) return nullptr;
  ++live;
  const std::int64_t bytes = live_bytes += static_cast<std::int64_t>(malloc_usable_size(memory));
  for (std::int64_t most = most_bytes; bytes > most && !most_bytes.compare_exchange_weak(most, bytes);) continue;
  return memory;
}

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  if (void* const memory = allocate(size, alignment)) return memory;
  throw std::bad_alloc();
}

void release(void* memory) {
  if (memory == nullptr) return;
  --live;
  live_bytes -= static_cast<std::int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

constexpr std::size_t kPlain = alignof(std::max_align_t);

}  // namespace

void* operator new(std::size_t size) { return allocate_or_throw(size, kPlain); }
void* operator new[](std::size_t size) { return allocate_or_throw(size, kPlain); }
void* operator new(std::size_t size, std::align_val_t a) { return allocate_or_throw(size, std::size_t(a)); }
void* operator new[](std::size_t size, std::align_val_t a) { return allocate_or_throw(size, std::size_t(a)); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, kPlain); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, kPlain); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }

namespace cutloss {
namespace {

enum class Outcome { ok, expected_error, out_of_memory, wrong };

Outcome outcome_of(const Status& status, StatusCode expected = StatusCode::ok) {
  if (status.code() == expected) return expected == StatusCode::ok ? Outcome::ok : Outcome::expected_error;
  return status.code() == StatusCode::out_of_memory ? Outcome::out_of_memory : Outcome::wrong;
}

Outcome outcome_of(cutloss_status status, cutloss_status expected = CUTLOSS_OK) {
  if (status != CUTLOSS_OK && *cutloss_last_error() == 0) return Outcome::wrong;
  if (status == expected) return expected == CUTLOSS_OK ? Outcome::ok : Outcome::expected_error;
  return status == CUTLOSS_OUT_OF_MEMORY ? Outcome::out_of_memory : Outcome::wrong;
}

Outcome with_failures(std::int64_t from, std::int64_t until, const std::function<Outcome()>& call) {
  count = 0;
  fails_from = from;
  fails_until = until;
  armed = true;
  const Outcome outcome = call();
  armed = false;
  return outcome;
}

// Fails allocation k alone, and k with all that follow, for every k. call() makes one call of the library; check(ok)
// looks at what it left, ok: whether it did its work. Returns the number of allocations.
std::int64_t fail_each(
    const std::function<Outcome()>& call, const std::function<void(bool)>& check = [](bool) {}) {
  EXPECT_NE(with_failures(-1, -1, call), Outcome::wrong);
  const std::int64_t allocations = count;
  check(true);
  std::int64_t refused = 0;
  for (std::int64_t k = 0; k < allocations; ++k) {
    for (const std::int64_t until : {k + 1, std::int64_t{1} << 60}) {
      const std::int64_t before = live;
      const Outcome outcome = with_failures(k, until, call);
      EXPECT_EQ(live, before) << "leaked; allocation " << k << " of " << allocations;
      EXPECT_NE(outcome, Outcome::wrong) << "allocation " << k << " of " << allocations;
      refused += outcome == Outcome::out_of_memory;
      check(outcome != Outcome::out_of_memory);
    }
  }
  const Outcome again = with_failures(-1, -1, call);
  EXPECT_TRUE(again == Outcome::ok || again == Outcome::expected_error);
  check(true);
  if (allocations > 0) {
    EXPECT_GT(refused, 0);
  }
  return allocations;
}

Machine machine() {
  Machine m;
  m.target = available_targets().front();
  m.threads = 3;
  return m;
}

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

// Every number of a report that comes of another pass.
std::vector<double> numbers_of(const analysis::Report& r) {
  std::vector<double> all = {r.nll, r.ranks.back().cumulative, static_cast<double>(r.maps[0].log2[0])};
  for (const auto& below : r.below) all.push_back(below.mass_mean);
  for (const auto& order : r.orders) all.insert(all.end(), order.tiles.begin(), order.tiles.end());
  for (const auto& errors : r.errors) {
    for (const auto& e : errors.d_e) all.push_back(e.relative);
    for (const auto& e : errors.d_c) all.push_back(e.relative);
  }
  for (const auto& v : r.variants) all.insert(all.end(), {v.d_e.relative, v.d_c.relative});
  for (const auto& t : r.tolerances) all.insert(all.end(), {t.kept, t.d_e.relative, t.d_c.relative});
  return all;
}

TEST(Allocation, AnalyzeEndsTheProcessOrReportsHalfOfWhatItFound) {
  const Small small;
  const Machine m = machine();
  Problem p;
  p.tokens = 7, p.vocab = 30, p.hidden = 5;
  Inputs in = small.inputs();
  std::vector<std::int64_t> labels = {3, 9, 29, 0, 1, 17, 8};
  in.labels = labels.data();
  analysis::Options o;
  o.tile_tokens = 4, o.tile_vocab = 16;
  o.exponents = {3, 6};
  o.temperatures = {0.5};
  o.tolerances = {0.05f};
  for (const int threads : {1, 2}) {
    o.threads = threads;
    const std::vector<double> want = numbers_of(analysis::analyze(p, in, m, o).value());
    EXPECT_GT(fail_each([&] {
                const Result<analysis::Report> got = analysis::analyze(p, in, m, o);
                armed = false;
                return got.ok() && numbers_of(got.value()) != want ? Outcome::wrong : outcome_of(got.status());
              }),
              100);
  }
  labels[2] = 30;
  const std::string refusal = analysis::analyze(p, in, m, o).status().message();
  EXPECT_GT(fail_each([&] {
              const Result<analysis::Report> got = analysis::analyze(p, in, m, o);
              armed = false;
              const bool half = got.status().code() == StatusCode::invalid_argument && got.status().message() != refusal;
              return half ? Outcome::wrong : outcome_of(got.status(), StatusCode::invalid_argument);
            }),
            0);
}

// The most that an analysis holds at a time, of a problem of this size and with these sections.
std::int64_t held_bytes(std::int64_t tokens, std::int64_t vocab, const analysis::Sections& sections) {
  Problem p;
  p.tokens = tokens, p.vocab = vocab, p.hidden = 3;
  std::vector<float> e(static_cast<std::size_t>(tokens * 3), 0.5f), c(static_cast<std::size_t>(vocab * 3), -0.25f);
  const std::vector<std::int64_t> labels(static_cast<std::size_t>(tokens), 7);
  analysis::Options o;
  o.tile_tokens = 16, o.tile_vocab = 32;
  o.exponents = {4, 8};
  o.temperatures = {1, 0.5};
  o.threads = 1;
  o.sections = sections;
  const std::int64_t before = live_bytes;
  most_bytes = before;
  const Result<analysis::Report> got = analysis::analyze(p, {e.data(), c.data(), labels.data()}, machine(), o);
  EXPECT_TRUE(got.ok()) << got.status().message();
  return most_bytes - before;
}

// What is held is a + b N + c V in each pass: of twice the tokens and ids no more than twice as much. Sections apart, so
// that no pass hides behind a larger one. What the library's own filters take (tolerance) is the plan's to say.
TEST(Allocation, AnalysisHoldsWhatGrowsWithTokensTimesVocabulary) {
  constexpr std::int64_t kTokens = 256, kVocab = 4096;
  using analysis::Sections;
  for (bool Sections::*const section : {&Sections::mass, &Sections::shares, &Sections::map, &Sections::d_e, &Sections::d_c}) {
    Sections sections{false, false, false, false, false, false, false, false};
    sections.*section = true;
    sections.temperature = sections.shares;
    sections.variants = sections.d_e || sections.d_c;
    const std::int64_t once = held_bytes(kTokens, kVocab, sections);
    const std::int64_t twice = held_bytes(2 * kTokens, 2 * kVocab, sections);
    EXPECT_LE(twice, 2 * once);
    // The test would see one byte for each of 4 entries: 4 x that against 2 x that and the constant part.
    EXPECT_LT(once, kTokens * kVocab / 2) << "too large a constant to see anything";
  }
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
