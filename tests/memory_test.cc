// Where inputs, outputs and workspace lie in memory: at the very end and beginning of what may be touched, in any
// stride, read-only, with NaN in between. A byte read or written outside ends the process with a signal.
#include <cstring>

#include "tests/buffers.h"
#include "tests/fixtures.h"

namespace cutloss {
namespace {

using testing::Against;
using testing::ArrangedMatrix;
using testing::GuardedMemory;
using testing::Objective;
using testing::Results;

// Runs with every buffer between forbidden pages and the inputs read-only. They are laid out as `e` and `c` say.
Results run_guarded(Objective& f, const Plan& plan, ArrangedMatrix& e, ArrangedMatrix& c, Against against) {
  Inputs in = f.inputs();
  std::vector<GuardedMemory> memory;
  for (const testing::Place& at : testing::places_of(f.problem, in)) {
    if (at.get() == nullptr) continue;
    const std::size_t bytes = static_cast<std::size_t>(at.count) * at.item;
    memory.emplace_back(bytes, against);
    const std::size_t before = static_cast<std::size_t>(at.before) * at.item;
    if (bytes > 0) std::memcpy(memory.back().data(), static_cast<const std::byte*>(at.get()) - before, bytes);
    memory.back().freeze();
    at.set(memory.back().data() + before);
  }
  in.e = e.data();
  in.c = c.data();
  Results results(f.problem);
  const Outputs real = results.outputs();
  Outputs out = real;
  std::vector<std::pair<void*, std::size_t>> copies;
  const std::size_t first = memory.size();
  for (const testing::Place& at : testing::places_of(f.problem, out)) {
    if (at.get() == nullptr) continue;
    const std::size_t bytes = static_cast<std::size_t>(at.count) * at.item;
    memory.emplace_back(bytes, against);
    if (bytes > 0) std::memcpy(memory.back().data(), at.get(), bytes);
    copies.emplace_back(const_cast<void*>(at.get()), bytes);
    at.set(memory.back().data());
  }
  GuardedMemory workspace(plan.workspace_bytes, against);
  results.status = run(plan, in, out, {workspace.data(), workspace.size()});
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].second > 0) std::memcpy(copies[i].first, memory[first + i].data(), copies[i].second);
  }
  return results;
}

std::string bits(const Results& r) {
  std::string all;
  for (const testing::Buffer* b : {&r.loss, &r.nll, &r.lse, &r.d_e, &r.d_c, &r.d_bias, &r.entropy, &r.mean_logits}) {
    for (std::int64_t i = 0; i < b->size(); ++i) {
      const float value = b->get(i);
      all.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
  }
  return all;
}

class Memory : public ::testing::TestWithParam<std::string> {
 protected:
  // One problem with e and c lying in memory as given: within the bounds of the oracle, and the very bits of its
  // contiguous copy.
  void check(Objective f, Mode mode, const testing::Arrangement& e_way, const testing::Arrangement& c_way,
             Against against) {
    Problem& p = f.problem;
    const std::int64_t c_rows = p.head_layout == HeadLayout::vd ? p.vocab : p.hidden;
    const std::int64_t c_columns = p.head_layout == HeadLayout::vd ? p.hidden : p.vocab;
    ArrangedMatrix e(f.e.data(), p.tokens, p.hidden, size_of(p.e_dtype), e_way.strides(p.tokens, p.hidden), against);
    ArrangedMatrix c(f.c.data(), c_rows, c_columns, size_of(p.c_dtype), c_way.strides(c_rows, c_columns), against);
    e.copy_to(f.e.data(), p.tokens, p.hidden, size_of(p.e_dtype));
    c.copy_to(f.c.data(), c_rows, c_columns, size_of(p.c_dtype));
    const std::string what = "N=" + std::to_string(p.tokens) + " V=" + std::to_string(p.vocab) +
                             " D=" + std::to_string(p.hidden) + " " + std::string(name(p.e_dtype)) + " " +
                             std::string(name(p.c_dtype)) + " " + std::string(name(p.head_layout)) + ", e " +
                             e_way.name + ", c " + c_way.name + ", mode " + std::string(name(mode));
    const Plan flat = testing::plan_in(p, mode, GetParam()).value();
    const Results want = testing::run_planned(f, flat);
    EXPECT_EQ(testing::off(f, flat, want), "") << what;
    p.e_strides = e.strides();
    p.c_strides = c.strides();
    Plan plan = testing::plan_in(p, mode, GetParam()).value();
    f.problem = plan.problem;  // with sparse's filter
    const Results got = run_guarded(f, plan, e, c, against);
    EXPECT_TRUE(got.status.ok()) << what << ": " << got.status.message();
    EXPECT_TRUE(bits(got) == bits(want)) << what;
  }
};

Objective plain(std::int64_t n, std::int64_t v, std::int64_t d, DType e = DType::f32, DType c = DType::f32) {
  Objective f = testing::fixture(n, v, d, e, c);
  for (std::int64_t i = 1; i < n; i += 5) f.labels[static_cast<std::size_t>(i)] = -100;
  return f;
}

const testing::Arrangement& flat() { return testing::all_arrangements()[0]; }

TEST_P(Memory, StridesAreIgnoredOrReadPastTheEnd) {
  for (const testing::Arrangement& way : testing::all_arrangements()) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const HeadLayout layout : {HeadLayout::vd, HeadLayout::dv}) {
        Objective f = plain(19, 37, 11, dtype, dtype);
        f.problem.head_layout = layout;
        const Against against = layout == HeadLayout::vd ? Against::end : Against::begin;
        check(f, Mode::chunk, way, flat(), against);
        check(f, Mode::recompute, flat(), way, against);
        check(f, Mode::sparse, way, way, against);
        f.problem.want_d_c = false;
        check(f, Mode::stream, way, way, against);
      }
    }
  }
}

// Vectors of up to 16, groups of up to 14, tiles of rows that hold at most 224.
TEST_P(Memory, TailsAreReadOrWrittenPastTheEnd) {
  const std::int64_t edges[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 27, 28, 29, 31, 32, 33};
  int turn = 0;
  for (const std::int64_t edge : edges) {
    for (const auto& [n, v, d] :
         {std::tuple{edge, std::int64_t{21}, std::int64_t{6}}, std::tuple{std::int64_t{9}, edge, std::int64_t{5}},
          std::tuple{std::int64_t{10}, std::int64_t{15}, edge}}) {
      const DType dtype = std::vector{DType::f32, DType::bf16, DType::f16}[static_cast<std::size_t>(turn % 3)];
      Objective f = plain(n, v, d, dtype, dtype);
      f.problem.head_layout = turn % 2 == 0 ? HeadLayout::vd : HeadLayout::dv;
      const Against against = turn % 5 < 3 ? Against::end : Against::begin;
      for (const Mode mode : testing::modes_of(f.problem)) check(f, mode, flat(), flat(), against);
      f.problem.want_d_c = false;
      check(f, Mode::stream, flat(), flat(), against);
      f.problem.want_d_e = false;
      check(f, Mode::loss, flat(), flat(), against);
      ++turn;
    }
  }
}

// The labels again, in the problem's stride; what lies between is none.
void spread_labels(Objective& f) {
  const std::vector<std::int64_t> labels = f.labels;
  const std::int64_t stride = f.problem.label_stride, n = f.problem.tokens;
  f.label_first = stride < 0 ? (n - 1) * -stride : 0;
  f.labels.assign(static_cast<std::size_t>((n - 1) * std::abs(stride)) + 1, -7);
  for (std::int64_t i = 0; i < n; ++i) {
    f.labels[static_cast<std::size_t>(f.label_first + i * stride)] = labels[static_cast<std::size_t>(i)];
  }
  f.labels32.assign(f.labels.begin(), f.labels.end());
}

// What the objective adds: bias, weights, soft targets, orders, metrics, accumulation, strides of labels, dtypes.
Objective everything(unsigned seed, std::int64_t n, std::int64_t v, std::int64_t d) {
  std::mt19937 random(seed);
  Objective f;
  Problem& p = f.problem;
  p.tokens = n, p.vocab = v, p.hidden = d;
  const DType all[] = {DType::f32, DType::bf16, DType::f16};
  p.e_dtype = all[seed % 3];
  p.c_dtype = all[seed / 3 % 3];
  p.bias_dtype = all[seed / 9 % 3];
  p.label_dtype = seed % 2 == 0 ? DType::i64 : DType::i32;
  p.head_layout = seed % 4 < 2 ? HeadLayout::vd : HeadLayout::dv;
  p.reduction = seed % 3 == 0 ? Reduction::none : Reduction::mean;
  p.token_weights = p.lse_cotangent = p.vocab_order = true;
  if (seed % 2 == 0) {
    p.soft_targets = 1 + seed % 4;
  } else {
    p.class_weights = true;
    p.label_smoothing = 0.1f;
  }
  if (seed % 5 == 0) p.softcap = 3.0f;
  p.shift = seed % 3;
  p.shift = std::min(p.shift, n);
  p.metrics = {true, true, true, 1 + seed % 6, true};
  p.want_d_e = p.want_d_c = p.want_d_bias = true;
  p.accumulate_d_e = p.accumulate_d_c = p.accumulate_d_bias = seed % 2 == 1;
  if (seed % 4 > 1) p.d_e_dtype = all[seed / 2 % 3];
  if (seed % 6 > 2) p.d_c_dtype = all[seed / 5 % 3];
  p.label_stride = std::vector<std::int64_t>{1, 2, -1, -3, 0}[seed / 2 % 5];
  f.fill(random, 3.0f);
  spread_labels(f);
  return f;
}

// The modes, each with the gradients that it is for, and the filters; a filter drops what a real one would in every
// other case, else nothing that f32 has.
std::vector<Problem> ways_of(const Problem& all, unsigned seed) {
  Problem frozen = all;
  frozen.want_d_c = frozen.want_d_bias = frozen.accumulate_d_c = frozen.accumulate_d_bias = false;
  Problem loss = frozen;
  loss.want_d_e = loss.accumulate_d_e = false;
  std::vector<Problem> ways = {all, frozen, loss};
  for (const Filter filter : {Filter::certified, Filter::unbiased, Filter::tile}) {
    Problem p = seed % 3 == 0 ? frozen : all;
    p.filter = filter;
    p.epsilon = seed % 2 == 0 ? 1e-2f : 0x1p-126f;
    if (filter != Filter::tile && p.softcap) p.label_smoothing = 0;
    ways.push_back(p);
  }
  return ways;
}

TEST_P(Memory, OptionalInputsAndMetricsAreReadOrWrittenPastTheEnd) {
  unsigned seed = 0;
  for (const std::int64_t n : {1, 7, 16, 33}) {
    for (const std::int64_t v : {1, 6, 14, 15, 43, 225}) {
      ++seed;
      Objective f = everything(seed, n, v, 1 + seed % 18);
      const Against against = seed % 2 == 0 ? Against::end : Against::begin;
      for (const Problem& way : ways_of(f.problem, seed)) {
        f.problem = way;
        const bool head = wants_head(way) && way.filter == Filter::none;
        for (const Mode mode : head ? std::vector{Mode::chunk, Mode::recompute} : std::vector{Mode::automatic}) {
          Plan plan = testing::plan_in(f.problem, mode, GetParam()).value();
          ArrangedMatrix e(f.e.data(), n, f.problem.hidden, size_of(f.problem.e_dtype), {f.problem.hidden, 1}, against);
          ArrangedMatrix c(f.c.data(), 1, v * f.problem.hidden, size_of(f.problem.c_dtype), {0, 1}, against);
          const Results got = run_guarded(f, plan, e, c, against);
          ASSERT_TRUE(got.status.ok()) << "seed " << seed << ": " << got.status.message();
          Results before(f.problem);
          reference::Options options{testing::additions_of(plan), before.d_e.or_null(), before.d_c.or_null(),
                                     before.d_bias.or_null()};
          options.epsilon = plan.epsilon;
          options.rounds_twice = got.report.rows_redone > 0;
          const auto want = reference::linear_cross_entropy(f.problem, f.inputs(), options);
          EXPECT_EQ(testing::Difference(f.problem, got, want).find(), "")
              << "seed " << seed << ", " << name(plan.mode) << ", filter " << name(way.filter);
        }
      }
    }
  }
}

TEST_P(Memory, LongEveryEdgeStrideAndDtype) {
  const std::int64_t w = 32;
  for (const DType e : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType c : {DType::f32, DType::bf16, DType::f16}) {
      for (const Against against : {Against::end, Against::begin}) {
        std::size_t turn = 0;
        for (std::int64_t n = 1; n <= 2 * w + 1; n += n < 5 || n % 8 > 6 || n % 8 < 2 ? 1 : 3) {
          for (const std::int64_t v : {1, 2, 5, 6, 7, 13, 14, 15, 28, 223, 224, 225, 449}) {
            for (const std::int64_t d : {1, 2, 3, 5, 7, 8, 15, 16, 17, 33}) {
              Objective f = plain(n, v, d, e, c);
              f.problem.head_layout = ++turn % 2 == 0 ? HeadLayout::vd : HeadLayout::dv;
              const std::vector<Mode> modes = testing::modes_of(f.problem);
              const auto& ways = testing::all_arrangements();
              check(f, modes[turn % modes.size()], ways[turn % ways.size()], ways[turn / 3 % ways.size()], against);
            }
          }
        }
      }
    }
  }
}

// A label outside the vocabulary must not become an address, in no row, type or stride.
TEST_P(Memory, ABadLabelIsUsedAsAnAddress) {
  for (const DType label_dtype : {DType::i32, DType::i64}) {
    for (const std::int64_t bad : {std::int64_t{11}, std::int64_t{12}, std::int64_t{15}, std::int64_t{63},
                                   std::int64_t{1000000}, std::int64_t{-1}, std::int64_t{-99}, std::int64_t{1} << 31,
                                   (std::int64_t{1} << 32) + 5, INT64_MIN, INT64_MAX}) {
      if (label_dtype == DType::i32 && bad != static_cast<std::int32_t>(bad)) continue;
      for (const std::int64_t row : {0, 3, 6}) {
        Objective f = testing::fixture(7, 11, 5);
        f.problem.label_dtype = label_dtype;
        f.labels[static_cast<std::size_t>(row)] = bad;
        f.labels32.assign(f.labels.begin(), f.labels.end());
        for (const Mode mode : testing::modes_of(f.problem)) {
          for (const BadLabels policy : {BadLabels::error, BadLabels::nan}) {
            f.problem.bad_labels = policy;
            Objective g = f;
            const Plan plan = testing::plan_in(g.problem, mode, GetParam()).value();
            g.problem = plan.problem;
            ArrangedMatrix e(g.e.data(), 7, 5, 4, {5, 1}, Against::end);
            ArrangedMatrix c(g.c.data(), 11, 5, 4, {5, 1}, Against::end);
            const Results got = run_guarded(g, plan, e, c, Against::end);
            if (policy == BadLabels::error) {
              EXPECT_EQ(got.status.message(), "labels[" + std::to_string(row) + "] is " + std::to_string(bad) +
                                                  ", outside [0, vocab) = [0, 11) and not ignore_index (-100)");
              EXPECT_TRUE(std::isnan(got.loss.get(0))) << "written before the check";
              continue;
            }
            ASSERT_TRUE(got.status.ok()) << got.status.message();
            EXPECT_TRUE(std::isnan(got.loss.get(0))) << bad << " gives a loss";
            for (std::int64_t i = 0; i < 7; ++i) {
              EXPECT_EQ(std::isnan(got.nll.get(i)), i == row);
              EXPECT_EQ(std::isnan(got.d_e.get(i * 5)), i == row) << name(mode);
            }
            EXPECT_TRUE(std::isnan(got.d_c.get(0))) << name(mode);
          }
        }
      }
    }
  }
}

// Rows that do not count: each alone on a page, which is then taken away.
TEST_P(Memory, RowsThatDoNotCountAreRead) {
  const auto page = static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
  const std::int64_t n = 40, d = 9;
  Objective f = testing::fixture(n, 31, d);
  Problem& p = f.problem;
  p.token_weights = true;
  p.shift = 2;
  f.token_weights.assign(static_cast<std::size_t>(n), 1.0f);
  std::vector<bool> counts(static_cast<std::size_t>(n), true);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (i % 5 == 1) f.token_weights[at] = 0;
    if (i % 7 == 3) f.labels[at] = -100;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (f.token_weights[at] == 0 || i + 2 >= n || f.labels[at + 2] == -100) counts[at] = false;
  }
  for (const Mode mode : testing::modes_of(p)) {
    const Results want = testing::run_in(f, mode, GetParam());
    ASSERT_TRUE(want.status.ok());
    GuardedMemory e(static_cast<std::size_t>(n * page), Against::end);
    for (std::int64_t i = 0; i < n; ++i) {
      std::memcpy(e.data() + i * page, static_cast<const float*>(f.e.data()) + i * d, static_cast<std::size_t>(d) * 4);
      if (!counts[static_cast<std::size_t>(i)]) {
        ASSERT_EQ(mprotect(e.data() + i * page, static_cast<std::size_t>(page), PROT_NONE), 0);
      }
    }
    Problem strided = p;
    strided.e_strides = Strides{page / 4, 1};
    const Plan plan = testing::plan_in(strided, mode, GetParam()).value();
    Results got(plan.problem);
    Inputs in = f.inputs();
    in.e = e.data();
    ASSERT_TRUE(run(plan, in, got.outputs()).ok());
    EXPECT_TRUE(bits(got) == bits(want)) << name(mode);
    ASSERT_EQ(mprotect(e.data(), e.size(), PROT_READ | PROT_WRITE), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Memory, ::testing::ValuesIn(available_targets()), testing::target_name);

}  // namespace
}  // namespace cutloss
