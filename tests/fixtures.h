// Problems given by formulas in integers, the same in any language, and running one of them.
#ifndef CUTLOSS_TESTS_FIXTURES_H_
#define CUTLOSS_TESTS_FIXTURES_H_

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "src/cpu/objective_case.h"
#include "src/cpu/test_problem.h"

namespace cutloss::testing {

// In [-1, 1]: row i, column j of table `seed`.
inline double lattice(std::int64_t i, std::int64_t j, std::int64_t seed) {
  return static_cast<double>(((i + 1) * (j + 3) * 7919 + i * 104729 + j * 1299709 + seed * 15485863) % 2003) / 1001 - 1;
}

// N x columns values factor * lattice(., ., seed), rounded once from float64.
inline Buffer lattice_table(DType dtype, std::int64_t rows, std::int64_t columns, double factor, std::int64_t seed) {
  Buffer table(dtype, rows * columns);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    table.set(i, static_cast<float>(factor * lattice(i / columns, i % columns, seed)));
  }
  return table;
}

// E = 3 * table 1, C = table 2, labels (7919 i + 5) mod V, both gradients wanted, mean.
inline Objective fixture(std::int64_t n, std::int64_t v, std::int64_t d, DType e_dtype = DType::f32,
                         DType c_dtype = DType::f32) {
  Objective f;
  f.problem.tokens = n;
  f.problem.vocab = v;
  f.problem.hidden = d;
  f.problem.e_dtype = e_dtype;
  f.problem.c_dtype = c_dtype;
  f.problem.want_d_e = f.problem.want_d_c = true;
  f.e = lattice_table(e_dtype, n, d, 3, 1);
  f.c = lattice_table(c_dtype, v, d, 1, 2);
  for (std::int64_t i = 0; i < n; ++i) f.labels.push_back((i * 7919 + 5) % v);
  f.cotangent.assign(static_cast<std::size_t>(std::max<std::int64_t>(n, 1)), 1.0f);
  return f;
}

// D = 1, table [0, 1], label 0: the loss of x is softplus(x), its gradient sigmoid(x).
inline Objective softplus_fixture(const std::vector<float>& x, DType dtype = DType::f32) {
  Objective f = fixture(static_cast<std::int64_t>(x.size()), 2, 1, dtype, dtype);
  for (std::size_t i = 0; i < x.size(); ++i) f.e.set(static_cast<std::int64_t>(i), x[i]);
  f.c.set(0, 0);
  f.c.set(1, 1);
  f.labels.assign(x.size(), 0);
  return f;
}

inline void add_bias(Objective& f, DType dtype = DType::f32) {
  f.problem.bias_dtype = dtype;
  f.problem.want_d_bias = true;
  f.bias = lattice_table(dtype, f.problem.vocab, 1, 1, 3);
}

// Every way the wanted gradients allow. Sparse keeps all that is a normal number in f32.
inline std::vector<Mode> modes_of(const Problem& p) {
  const bool filterable = !(p.softcap && p.label_smoothing > 0);
  std::vector<Mode> modes = {Mode::loss};
  if (p.want_d_e) modes = {Mode::stream};
  if (p.want_d_c || p.want_d_bias) modes = {Mode::chunk, Mode::recompute};
  if (filterable && (p.want_d_e || p.want_d_c || p.want_d_bias)) modes.push_back(Mode::sparse);
  return modes;
}

inline Result<Plan> plan_in(Problem p, Mode mode, const std::string& target, std::optional<std::uint64_t> budget = {},
                            int threads = 2) {
  if (mode == Mode::sparse) {
    p.filter = Filter::certified;
    p.epsilon = 0x1p-126f;
  }
  Limits limits;
  limits.mode = mode;
  limits.budget_bytes = budget;
  limits.threads = threads;
  return make_plan(p, limits, machine_for(target, threads));
}

// Results start as NaN, and so does the workspace.
inline Results run_planned(const Objective& f, const Plan& plan, Executor* executor = nullptr) {
  Results results(plan.problem);
  std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xFF});
  results.status = run(plan, f.inputs(), results.outputs(), workspace, executor);
  EXPECT_TRUE(results.intact()) << "wrote outside an output";
  return results;
}

inline Results run_in(const Objective& f, Mode mode, const std::string& target,
                      std::optional<std::uint64_t> budget = {}, int threads = 2) {
  const Result<Plan> plan = plan_in(f.problem, mode, target, budget, threads);
  if (!plan.ok()) {
    Results none(f.problem);
    none.status = plan.status();
    return none;
  }
  return run_planned(f, plan.value());
}

// "" if all is within the oracle's bounds.
inline std::string off(const Objective& f, const Plan& plan, const Results& got) {
  if (!got.status.ok()) return got.status.message();
  return Difference(plan.problem, got, reference::linear_cross_entropy(plan.problem, f.inputs(), {additions_of(plan)}))
      .find();
}

// The sum of the absolute values.
inline double total(const Buffer& values) {
  double sum = 0;
  for (std::int64_t i = 0; i < values.size(); ++i) sum += std::abs(static_cast<double>(values.get(i)));
  return sum;
}

inline bool all_zero(const Buffer& values) {
  for (std::int64_t i = 0; i < values.size(); ++i) {
    if (values.get(i) != 0) return false;
  }
  return true;
}

inline bool all_finite(const Buffer& values) {
  for (std::int64_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values.get(i))) return false;
  }
  return true;
}

// Plans of one mode from the smallest budget up, each with another chunk, block or tile than the one before.
inline std::vector<Plan> plans_by_budget(const Problem& p, Mode mode, const std::string& target) {
  std::uint64_t too_small = 0, smallest = std::uint64_t{1} << 40;
  while (smallest - too_small > 1) {
    const std::uint64_t middle = too_small + (smallest - too_small) / 2;
    (plan_in(p, mode, target, middle).ok() ? smallest : too_small) = middle;
  }
  std::vector<Plan> plans;
  for (std::uint64_t more = 0; more < std::uint64_t{1} << 32; more += more / 2 + 64) {
    const Plan plan = plan_in(p, mode, target, smallest + more).value();
    const auto shape = [](const Plan& of) { return std::tuple(of.chunk_tokens, of.token_block, of.vocab_tile); };
    if (plans.empty() || shape(plans.back()) != shape(plan)) plans.push_back(plan);
  }
  return plans;
}

inline std::string target_name(const ::testing::TestParamInfo<std::string>& info) { return info.param; }

}  // namespace cutloss::testing

#endif  // CUTLOSS_TESTS_FIXTURES_H_
