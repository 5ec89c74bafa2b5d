// Indices beyond 2^31: logits that would be 2^32 in number, and a table of more than 2^31 elements.
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>

#include "tests/fixtures.h"

namespace cutloss {
namespace {

using testing::Objective;

constexpr double u = 0x1p-24;

// Hidden states and table entries of D = 1 out of a few values each, so that float64 needs 16 rows in place of 2^14.
struct FewValues {
  static constexpr std::int64_t kTokens = 1 << 14, kVocab = 1 << 18, kStates = 16, kEntries = 64;
  static float state(std::int64_t i) { return static_cast<float>(i % kStates - 7) / 4; }
  static float entry(std::int64_t v) { return static_cast<float>(v * 29 % kEntries - 31) / 16; }

  FewValues() : f(testing::fixture(kTokens, kVocab, 1)) {
    for (std::int64_t i = 0; i < kTokens; ++i) f.e.set(i, state(i));
    for (std::int64_t v = 0; v < kVocab; ++v) f.c.set(v, entry(v));
    for (std::int64_t i = 0; i < kStates; ++i) {
      double sum = 0, weighted = 0;
      for (std::int64_t v = 0; v < kEntries; ++v) {
        const double weight = std::exp(static_cast<double>(state(i)) * entry(v));
        sum += weight;
        weighted += weight * entry(v);
      }
      lse[i] = std::log(sum * (kVocab / kEntries));
      mean_entry[i] = weighted / sum;
    }
  }

  Objective f;
  double lse[kStates], mean_entry[kStates];
};

// Tolerances as in reference.cc: logits up to 4 of one product, errors of p relative, then the additions of a sum.
void check(const FewValues& few, const Plan& plan, const testing::Results& got) {
  const Problem& p = plan.problem;
  const double additions = testing::additions_of(plan);
  const double relative = std::expm1(2 * 3 * u * 4 + (additions + 128) * u);
  const double n = static_cast<double>(p.tokens);
  double loss = 0;
  std::map<std::int64_t, double> labels;  // how often, by id: sum of e_i
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const auto k = static_cast<std::size_t>(i % FewValues::kStates);
    const std::int64_t y = few.f.labels[static_cast<std::size_t>(i)];
    const double nll = few.lse[k] - static_cast<double>(FewValues::state(i)) * FewValues::entry(y);
    loss += nll / n;
    labels[y] += FewValues::state(i);
    ASSERT_NEAR(got.nll.get(i), nll, relative + u * nll) << name(plan.mode) << " row " << i;
    if (!p.want_d_e) continue;
    const double d_e = (few.mean_entry[k] - FewValues::entry(y)) / n;
    ASSERT_NEAR(got.d_e.get(i), d_e, 2 * 4 / n * (relative + (additions + 8) * u)) << name(plan.mode) << " row " << i;
  }
  EXPECT_NEAR(got.loss.get(0), loss, relative + 2 * u * loss) << name(plan.mode);
  for (std::int64_t v = 0; p.want_d_c && v < p.vocab; ++v) {
    double all = 0, magnitude = 0;
    for (std::int64_t i = 0; i < FewValues::kStates; ++i) {
      const double state = FewValues::state(i);
      const double part = state * std::exp(state * FewValues::entry(v) - few.lse[i]) / FewValues::kStates;
      all += part;
      magnitude += std::abs(part);
    }
    const auto found = labels.find(v);
    const double label = found == labels.end() ? 0 : found->second / n;
    magnitude += std::abs(label) + (found == labels.end() ? 0 : 2 / n);
    ASSERT_NEAR(got.d_c.get(v), all - label, magnitude * (relative + (additions + 8) * u))
        << name(plan.mode) << " id " << v;
  }
}

TEST(Large, LongFourBillionLogitsOverflowAnIndex) {
  FewValues few;
  const std::string target = available_targets()[0];
  for (const Mode mode : {Mode::chunk, Mode::recompute, Mode::stream}) {
    few.f.problem.want_d_c = mode != Mode::stream;
    const Plan plan = testing::plan_in(few.f.problem, mode, target).value();
    const testing::Results got = testing::run_planned(few.f, plan);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    check(few, plan, got);
  }
}

// Bytes that can be had without swapping; 0 if the system does not say.
double available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    double kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return 0;
}

using Zeros = std::unique_ptr<void, decltype(&std::free)>;
Zeros zeros(std::int64_t elements) { return {std::calloc(static_cast<std::size_t>(elements), 2), &std::free}; }

// A table of V x D = 2^31 + some elements that are 0 but for a few rows, on both sides of element 2^31 and at the end.
// A row that is read or written 2^31 or 2^32 elements off changes the loss, its own gradient or both.
void check_table(HeadLayout layout, Mode mode) {
  const std::int64_t d = 1024, v = (std::int64_t{1} << 31) / d + 5, n = 3;
  const std::int64_t rows[] = {0, 3, (std::int64_t{1} << 31) / d - 1, (std::int64_t{1} << 31) / d, v - 1};
  Objective small = testing::fixture(n, 5, d, DType::bf16, DType::bf16);
  small.problem.head_layout = HeadLayout::vd;
  for (std::int64_t i = 0; i < n * d; ++i) small.e.set(i, small.e.get(i) / 16);
  // The other V - 5 ids have a logit of 0: all together a sixth id, of a bias of log(V - 5) and a row of zeros.
  Objective want = testing::fixture(n, 6, d, DType::bf16, DType::bf16);
  want.e = small.e;
  want.c = testing::Buffer(DType::bf16, 6 * d);
  want.problem.bias_dtype = DType::f32;
  want.bias = testing::Buffer(DType::f32, 6);
  want.bias.set(5, static_cast<float>(std::log(static_cast<double>(v - 5))));
  want.labels = {4, 2, 3};
  const Zeros table = zeros(v * d), gradient = zeros(mode == Mode::stream ? 1 : v * d);
  ASSERT_TRUE(table && gradient) << "no memory";
  const auto at = [&](std::int64_t id, std::int64_t k) { return layout == HeadLayout::vd ? id * d + k : k * v + id; };
  for (std::int64_t row = 0; row < 5; ++row) {
    for (std::int64_t k = 0; k < d; ++k) {
      want.c.set(row * d + k, small.c.get(row * d + k));
      cpu::FromFloat(small.c.get(row * d + k), static_cast<cpu::Bf16*>(table.get())[at(rows[row], k)]);
    }
  }
  Problem p = small.problem;
  p.vocab = v;
  p.head_layout = layout;
  p.want_d_c = mode != Mode::stream;
  const std::vector<std::int64_t> labels = {rows[4], rows[2], rows[3]};
  const Plan plan = testing::plan_in(p, mode, available_targets()[0]).value();
  p = plan.problem;
  testing::Buffer loss(DType::f32, 1), nll(DType::f32, n), d_e(DType::bf16, n * d);
  std::int64_t argmax[n];
  Inputs in;
  in.e = small.e.data(), in.c = table.get(), in.labels = labels.data();
  Outputs out;
  out.loss = static_cast<float*>(loss.data()), out.nll = static_cast<float*>(nll.data()), out.d_e = d_e.data();
  out.argmax = p.metrics.argmax ? argmax : nullptr;
  if (p.want_d_c) out.d_c = gradient.get();
  const Status status = run(plan, in, out);
  ASSERT_TRUE(status.ok()) << status.message();

  const auto r = reference::linear_cross_entropy(want.problem, want.inputs(), {testing::additions_of(plan)});
  const std::string where = std::string(name(mode)) + " " + std::string(name(layout));
  EXPECT_NEAR(loss.get(0), r.loss, r.loss_bound) << where;
  for (std::int64_t i = 0; i < n; ++i) {
    EXPECT_NEAR(nll.get(i), r.nll[static_cast<std::size_t>(i)], r.nll_bound[static_cast<std::size_t>(i)]) << where;
  }
  for (std::int64_t i = 0; i < n * d; ++i) {
    const auto k = static_cast<std::size_t>(i);
    ASSERT_NEAR(d_e.get(i), r.d_e[k], r.d_e_bound[k]) << where << " d_e[" << i << "]";
  }
  if (!p.want_d_c) return;
  const auto* d_c = static_cast<const cpu::Bf16*>(gradient.get());
  for (std::int64_t row = 0; row < 5; ++row) {
    for (std::int64_t k = 0; k < d; ++k) {
      const auto same = static_cast<std::size_t>(row * d + k);
      ASSERT_NEAR(cpu::ToFloat(d_c[at(rows[row], k)]), r.d_c[same], r.d_c_bound[same]) << where << " id " << rows[row];
    }
  }
  // All other rows are one: of a logit of 0.
  for (const std::int64_t id : {std::int64_t{1}, v / 2, (std::int64_t{1} << 31) / d - 2, v - 2}) {
    for (std::int64_t k = 0; k < d; ++k) {
      const auto sixth = static_cast<std::size_t>(5 * d + k);
      const double share = 1 / static_cast<double>(v - 5);
      ASSERT_NEAR(cpu::ToFloat(d_c[at(id, k)]), r.d_c[sixth] * share, r.d_c_bound[sixth] * share)
          << where << " id " << id;
    }
  }
}

TEST(Large, LongATableOfMoreThanTwoBillionElementsOverflowsAnIndex) {
  const double wanted = 12.0 * (1 << 30);
  if (available_bytes() < wanted) {
    GTEST_SKIP() << "needs 12 GiB of free memory for a table of 4 GiB and its gradient; there are "
                 << available_bytes() / (1 << 30) << " GiB";
  }
  check_table(HeadLayout::vd, Mode::recompute);
  check_table(HeadLayout::dv, Mode::recompute);
}

}  // namespace
}  // namespace cutloss
