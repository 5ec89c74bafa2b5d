// Random problems with their buffers, for tests: inputs behind guard elements, outputs and workspace full of NaN.
#ifndef CUTLOSS_SRC_CPU_TEST_PROBLEM_H_
#define CUTLOSS_SRC_CPU_TEST_PROBLEM_H_

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cpu/element.h"
#include "src/reference/reference.h"

namespace cutloss::testing {

// Floats stored as f32 or bf16.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::size_t count, float fill) : dtype_(dtype), bytes_(count * size_of(dtype)) {
    for (std::size_t i = 0; i < count; ++i) set(i, fill);
  }
  void set(std::size_t i, float value) {
    if (dtype_ == DType::bf16) {
      cpu::Bf16 x;
      cpu::FromFloat(value, x);
      std::memcpy(&bytes_[i * 2], &x, 2);
    } else {
      std::memcpy(&bytes_[i * 4], &value, 4);
    }
  }
  float get(std::size_t i) const {
    if (dtype_ == DType::bf16) return cpu::ToFloat(reinterpret_cast<const cpu::Bf16*>(bytes_.data())[i]);
    return reinterpret_cast<const float*>(bytes_.data())[i];
  }
  void* data() { return bytes_.data(); }
  const std::vector<char>& bytes() const { return bytes_; }
  std::size_t size() const { return bytes_.size() / size_of(dtype_); }

 private:
  DType dtype_ = DType::f32;
  std::vector<char> bytes_;
};

struct Case {
  Problem problem;
  Array e, c;
  std::vector<std::int64_t> labels;
  std::vector<float> cotangent;
  std::vector<std::int64_t> order;  // vocab_order, if the problem has one

  // Standard normal hidden states, table scaled so that logits have standard deviation `spread`; every fifth label
  // is ignore_index if `ignored`.
  static Case random(std::int64_t n, std::int64_t v, std::int64_t d, unsigned seed, float spread = 2.0f,
                     DType dtype = DType::f32, bool ignored = true) {
    Case test;
    test.problem.tokens = n;
    test.problem.vocab = v;
    test.problem.hidden = d;
    test.problem.e_dtype = test.problem.c_dtype = dtype;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    test.e = Array(dtype, static_cast<std::size_t>(n * d), 0);
    test.c = Array(dtype, static_cast<std::size_t>(v * d), 0);
    for (std::size_t i = 0; i < test.e.size(); ++i) test.e.set(i, normal(random));
    const float scale = spread / std::sqrt(static_cast<float>(d));
    for (std::size_t i = 0; i < test.c.size(); ++i) test.c.set(i, scale * normal(random));
    for (std::int64_t i = 0; i < n; ++i) {
      const bool skip = ignored && i % 5 == 3;
      test.labels.push_back(skip ? test.problem.ignore_index
                                 : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(v)));
      test.cotangent.push_back(normal(random));
    }
    return test;
  }

  Inputs inputs() {
    Inputs in{e.data(), c.data(), labels.data(), problem.reduction == Reduction::none ? cotangent.data() : nullptr};
    if (problem.vocab_order) in.vocab_order = order.data();
    return in;
  }
};

struct Answer {
  std::vector<float> loss, nll, lse;
  Array d_e, d_c;
  std::int64_t valid_count = -1;
  Status status;

  // Everything that must be the same bits from run to run.
  std::string bits() const {
    std::string all;
    for (const auto* values : {&loss, &nll, &lse}) {
      all.append(reinterpret_cast<const char*>(values->data()), values->size() * sizeof(float));
    }
    all.append(d_e.bytes().begin(), d_e.bytes().end());
    all.append(d_c.bytes().begin(), d_c.bytes().end());
    return all;
  }
};

inline Answer run_plan(const Plan& plan, const Inputs& inputs, Executor* executor = nullptr) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Problem& p = plan.problem;
  const auto tokens = static_cast<std::size_t>(p.tokens);
  Answer a;
  a.loss.assign(p.reduction == Reduction::none ? tokens : 1, nan);
  a.nll.assign(tokens, nan);
  a.lse.assign(tokens, nan);
  Outputs out{a.loss.data(), a.nll.data(), a.lse.data(), nullptr, nullptr, &a.valid_count};
  if (p.want_d_e) {
    a.d_e = Array(p.d_e_dtype.value_or(p.e_dtype), static_cast<std::size_t>(p.tokens * p.hidden), nan);
    out.d_e = a.d_e.data();
  }
  if (p.want_d_c) {
    a.d_c = Array(p.d_c_dtype.value_or(p.c_dtype), static_cast<std::size_t>(p.vocab * p.hidden), nan);
    out.d_c = a.d_c.data();
  }
  // 0xFF is NaN in every float; a guard beyond the end shows writes past what the plan asked for.
  std::vector<std::byte> workspace(plan.workspace_bytes + 64, std::byte{0xFF});
  a.status = run(plan, inputs, out, {workspace.data(), plan.workspace_bytes}, executor);
  for (std::size_t i = plan.workspace_bytes; i < workspace.size(); ++i) {
    if (workspace[i] != std::byte{0xFF}) a.status = Status(StatusCode::out_of_memory, "wrote past the workspace");
  }
  return a;
}

// The worst |got - want| / bound over an output, and where.
struct Worst {
  double ratio = 0;
  std::string where = "nowhere";
  void add(const char* output, std::size_t at, double got, double want, double bound) {
    const bool same = got == want || (std::isnan(got) && std::isnan(want));
    double r = same ? 0 : std::abs(got - want) / bound;
    if (std::isnan(r)) r = std::numeric_limits<double>::infinity();
    if (r > ratio) {
      ratio = r;
      where = std::string(output) + "[" + std::to_string(at) + "] is " + std::to_string(got) + ", not " +
              std::to_string(want) + " +- " + std::to_string(bound);
    }
  }
};

inline Worst compare(const Plan& plan, const Answer& a, const reference::Reference& r) {
  const Problem& p = plan.problem;
  Worst worst;
  for (std::size_t i = 0; i < a.nll.size(); ++i) {
    worst.add("nll", i, a.nll[i], r.nll[i], r.nll_bound[i]);
    worst.add("lse", i, a.lse[i], r.lse[i], r.lse_bound[i]);
    if (p.reduction == Reduction::none) worst.add("loss", i, a.loss[i], r.row_loss[i], r.row_loss_bound[i]);
  }
  if (p.reduction != Reduction::none) worst.add("loss", 0, a.loss[0], r.loss, r.loss_bound);
  for (std::size_t i = 0; i < a.d_e.size(); ++i) worst.add("d_e", i, a.d_e.get(i), r.d_e[i], r.d_e_bound[i]);
  for (std::size_t i = 0; i < a.d_c.size(); ++i) worst.add("d_c", i, a.d_c.get(i), r.d_c[i], r.d_c_bound[i]);
  worst.add("valid_count", 0, static_cast<double>(a.valid_count), static_cast<double>(r.valid_count), 0.5);
  return worst;
}

// For reference::Options: every sum of a plan beyond the dot products, at its longest.
inline double additions_of(const Plan& plan) {
  const Problem& p = plan.problem;
  return static_cast<double>(plan.vocab_tile + p.vocab / plan.vocab_tile + 512 + p.tokens / 16 + 8);
}

inline Machine machine_for(const std::string& target, int threads = 2) {
  Machine machine;
  machine.target = target;
  machine.threads = threads;
  return machine;
}

}  // namespace cutloss::testing

#endif  // CUTLOSS_SRC_CPU_TEST_PROBLEM_H_
