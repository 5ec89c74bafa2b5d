// Random problems over the whole objective, their answers, and the comparison of the two with the oracle.
#ifndef CUTLOSS_SRC_CPU_OBJECTIVE_CASE_H_
#define CUTLOSS_SRC_CPU_OBJECTIVE_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cpu/element.h"
#include "src/problem/resolve.h"
#include "src/reference/reference.h"

namespace cutloss::testing {

// A buffer of any dtype with guard bytes on both sides.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, std::int64_t count, float fill = 0)
      : dtype_(dtype), count_(count), bytes_(static_cast<std::size_t>(count) * size_of(dtype) + 2 * kGuard, kByte) {
    for (std::int64_t i = 0; i < count; ++i) set(i, fill);
  }
  void set(std::int64_t i, float value) {
    if (dtype_ == DType::f16) return put<cpu::F16>(i, value);
    if (dtype_ == DType::bf16) return put<cpu::Bf16>(i, value);
    put<float>(i, value);
  }
  float get(std::int64_t i) const {
    if (dtype_ == DType::f16) return cpu::ToFloat(load<cpu::F16>(i));
    if (dtype_ == DType::bf16) return cpu::ToFloat(load<cpu::Bf16>(i));
    return load<float>(i);
  }
  void* data() { return bytes_.data() + kGuard; }
  const void* data() const { return bytes_.data() + kGuard; }
  const void* at(std::int64_t i) const {
    return bytes_.data() + kGuard + i * static_cast<std::int64_t>(size_of(dtype_));
  }
  void* or_null() { return count_ > 0 ? data() : nullptr; }
  std::int64_t size() const { return count_; }
  bool intact() const {
    for (std::size_t i = 0; i < std::min(kGuard, bytes_.size()); ++i) {
      if (bytes_[i] != kByte || bytes_[bytes_.size() - 1 - i] != kByte) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr char kByte = 0x5A;
  template <typename T>
  void put(std::int64_t i, float value) {
    T x;
    cpu::FromFloat(value, x);
    std::memcpy(bytes_.data() + kGuard + static_cast<std::size_t>(i) * sizeof(T), &x, sizeof x);
  }
  template <typename T>
  T load(std::int64_t i) const {
    T x;
    std::memcpy(&x, bytes_.data() + kGuard + static_cast<std::size_t>(i) * sizeof(T), sizeof x);
    return x;
  }
  DType dtype_ = DType::f32;
  std::int64_t count_ = 0;
  std::vector<char> bytes_ = std::vector<char>(2 * kGuard, kByte);
};

// Inputs of a problem; `fill` draws what the problem's fields ask for, contiguous. *_first: the element of [0, 0].
struct Objective {
  Problem problem;
  Buffer e, c, bias;
  std::int64_t e_first = 0, c_first = 0, label_first = 0;
  std::vector<std::int64_t> labels, soft_ids, order;
  std::vector<std::int32_t> labels32, soft_ids32;
  std::vector<float> cotangent, token_weights, class_weights, lse_cotangent, soft_probabilities;
  std::optional<double> denominator;

  void fill(std::mt19937& random, float spread) {
    const Problem& p = problem;
    std::normal_distribution<float> normal;
    const auto chance = [&](double share) { return std::uniform_real_distribution<>()(random) < share; };
    const auto id = [&] { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(p.vocab)); };
    e = Buffer(p.e_dtype, p.tokens * p.hidden);
    c = Buffer(p.c_dtype, p.vocab * p.hidden);
    for (std::int64_t i = 0; i < e.size(); ++i) e.set(i, normal(random));
    const float scale = spread / std::sqrt(static_cast<float>(p.hidden));
    for (std::int64_t i = 0; i < c.size(); ++i) c.set(i, scale * normal(random));
    if (p.bias_dtype) {
      bias = Buffer(*p.bias_dtype, p.vocab);
      const bool mask = chance(0.4);
      for (std::int64_t v = 0; v < p.vocab; ++v) {
        bias.set(v, mask && chance(0.2) ? -std::numeric_limits<float>::infinity() : 2 * normal(random));
      }
    }
    const auto weights = [&](std::int64_t count, std::vector<float>& to, double zeros) {
      for (std::int64_t i = 0; i < count; ++i) to.push_back(chance(zeros) ? 0.0f : std::abs(normal(random)));
    };
    if (p.token_weights) weights(p.tokens, token_weights, 0.2);
    if (p.class_weights) weights(p.vocab, class_weights, 0.2);
    for (std::int64_t i = 0; i < p.tokens; ++i) {
      labels.push_back(chance(0.2) ? p.ignore_index : id());
      cotangent.push_back(normal(random));
      lse_cotangent.push_back(p.lse_cotangent ? normal(random) : 0);
      for (std::int64_t k = 0; k < p.soft_targets; ++k) {
        soft_ids.push_back(chance(0.2) ? p.ignore_index : id());
        soft_probabilities.push_back(chance(0.1) ? 0.0f
                                                 : std::abs(normal(random)) / static_cast<float>(p.soft_targets));
      }
    }
    for (std::int64_t v = 0; v < p.vocab; ++v) order.push_back(v);
    std::shuffle(order.begin(), order.end(), random);
    labels32.assign(labels.begin(), labels.end());
    soft_ids32.assign(soft_ids.begin(), soft_ids.end());
    if (p.reduction == Reduction::mean && chance(0.3)) denominator = 7.5;
  }

  Inputs inputs() const {
    const Problem& p = problem;
    const bool wide = p.label_dtype == DType::i64;
    const auto labels_at = wide ? static_cast<const void*>(labels.data() + label_first) : labels32.data() + label_first;
    const auto ids_at = wide ? static_cast<const void*>(soft_ids.data()) : soft_ids32.data();
    Inputs in;
    in.e = e.at(e_first);
    in.c = c.at(c_first);
    in.labels = p.soft_targets > 0 ? nullptr : labels_at;
    in.cotangent = cotangent.data();
    in.bias = p.bias_dtype ? bias.data() : nullptr;
    in.token_weights = p.token_weights ? token_weights.data() : nullptr;
    in.class_weights = p.class_weights ? class_weights.data() : nullptr;
    in.lse_cotangent = p.lse_cotangent ? lse_cotangent.data() : nullptr;
    in.soft_ids = p.soft_targets > 0 ? ids_at : nullptr;
    in.soft_probabilities = p.soft_targets > 0 ? soft_probabilities.data() : nullptr;
    in.vocab_order = p.vocab_order ? order.data() : nullptr;
    in.denominator = denominator;
    return in;
  }
};

// Everything a problem can have as output: NaN at first, or known values where the problem accumulates.
struct Results {
  Buffer loss, nll, lse, d_e, d_c, d_bias, entropy, mean_logits, top_logprobs;
  std::vector<std::int64_t> argmax, rank, top_ids;
  std::vector<std::uint8_t> correct;
  std::int64_t valid_count = -7;
  FilterReport report;
  Status status;

  explicit Results(const Problem& p) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const Metrics& m = p.metrics;
    const auto rows = static_cast<std::size_t>(p.tokens);
    loss = Buffer(DType::f32, p.reduction == Reduction::none ? p.tokens : 1, nan);
    nll = Buffer(DType::f32, p.tokens, nan);
    lse = Buffer(DType::f32, p.tokens, nan);
    if (p.want_d_e) d_e = Buffer(d_e_dtype(p), p.tokens * p.hidden, p.accumulate_d_e ? 1.25f : nan);
    if (p.want_d_c) d_c = Buffer(d_c_dtype(p), p.vocab * p.hidden, p.accumulate_d_c ? -0.75f : nan);
    if (p.want_d_bias) d_bias = Buffer(*p.bias_dtype, p.vocab, p.accumulate_d_bias ? 0.5f : nan);
    if (m.entropy) entropy = Buffer(DType::f32, p.tokens, nan);
    if (m.mean_logits) mean_logits = Buffer(DType::f32, p.vocab, nan);
    if (m.top_k > 0) top_logprobs = Buffer(DType::f32, p.tokens * m.top_k, nan);
    argmax.assign(m.argmax ? rows : 0, -9);
    correct.assign(m.argmax ? rows : 0, 9);
    rank.assign(m.rank ? rows : 0, -9);
    top_ids.assign(m.top_k > 0 ? rows * static_cast<std::size_t>(m.top_k) : 0, -9);
  }

  Outputs outputs() {
    const auto floats = [](Buffer& b) { return static_cast<float*>(b.or_null()); };
    Outputs out;
    out.loss = floats(loss);
    out.nll = floats(nll);
    out.lse = floats(lse);
    out.d_e = d_e.or_null();
    out.d_c = d_c.or_null();
    out.d_bias = d_bias.or_null();
    out.valid_count = &valid_count;
    out.entropy = floats(entropy);
    out.mean_logits = floats(mean_logits);
    out.top_k_logprobs = floats(top_logprobs);
    out.argmax = argmax.empty() ? nullptr : argmax.data();
    out.correct = correct.empty() ? nullptr : correct.data();
    out.rank = rank.empty() ? nullptr : rank.data();
    out.top_k_ids = top_ids.empty() ? nullptr : top_ids.data();
    out.filter_report = &report;
    return out;
  }

  bool intact() const {
    for (const Buffer* b : {&loss, &nll, &lse, &d_e, &d_c, &d_bias, &entropy, &mean_logits, &top_logprobs}) {
      if (!b->intact()) return false;
    }
    return true;
  }
};

// The first output that is off, or "".
class Difference {
 public:
  Difference(const Problem& p, const Results& got, const reference::Reference& want) : p_(p), got_(got), want_(want) {}

  std::string find() {
    const bool none = p_.reduction == Reduction::none;
    floats("loss", got_.loss, none ? want_.row_loss : std::vector{want_.loss},
           none ? want_.row_loss_bound : std::vector{want_.loss_bound});
    floats("nll", got_.nll, want_.nll, want_.nll_bound);
    floats("lse", got_.lse, want_.lse, want_.lse_bound);
    floats("d_e", got_.d_e, want_.d_e, want_.d_e_bound);
    floats("d_c", got_.d_c, want_.d_c, want_.d_c_bound);
    floats("d_bias", got_.d_bias, want_.d_bias, want_.d_bias_bound);
    floats("entropy", got_.entropy, want_.entropy, want_.entropy_bound);
    floats("mean_logits", got_.mean_logits, want_.mean_logits, want_.mean_logits_bound);
    if (got_.valid_count != want_.valid_count)
      say("valid_count", 0, double(got_.valid_count), double(want_.valid_count), 0);
    for (std::size_t i = 0; i < want_.counts.size(); ++i) orders(i);
    return first_;
  }

 private:
  void say(const char* what, std::size_t at, double got, double want, double bound) {
    if (!first_.empty()) return;
    std::ostringstream out;
    out.precision(9);
    out << what << "[" << at << "] is " << got << ", not " << want << " +- " << bound;
    first_ = out.str();
  }

  void floats(const char* what, const Buffer& got, const std::vector<double>& want, const std::vector<double>& bound) {
    for (std::int64_t i = 0; i < got.size(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double value = got.get(i);
      if (value == want[at] || (std::isnan(value) && std::isnan(want[at])) || std::isinf(bound[at])) continue;
      if (!(std::abs(value - want[at]) <= bound[at])) say(what, at, value, want[at], bound[at]);
    }
  }

  // Ids and counts, exact where the logits are further apart than their errors.
  void orders(std::size_t i) {
    const auto V = static_cast<std::size_t>(p_.vocab), K = static_cast<std::size_t>(p_.metrics.top_k);
    const double* z = &want_.logits[i * V];
    const double near = 2 * want_.logit_error[i];
    if (want_.counts[i] == 0 || std::isnan(want_.lse[i])) {
      if (!got_.argmax.empty() && (got_.argmax[i] != -1 || got_.correct[i] != 0))
        say("argmax", i, double(got_.argmax[i]), -1, 0);
      if (!got_.rank.empty() && got_.rank[i] != -1) say("rank", i, double(got_.rank[i]), -1, 0);
      for (std::size_t k = 0; k < K; ++k) {
        if (got_.top_ids[i * K + k] != -1) say("top_k_ids", i * K + k, double(got_.top_ids[i * K + k]), -1, 0);
      }
      return;
    }
    std::vector<double> sorted(z, z + V);
    std::sort(sorted.rbegin(), sorted.rend());
    const std::int64_t label = want_.label[i];
    if (!got_.argmax.empty() && sorted[0] > -INFINITY) {
      const std::int64_t id = got_.argmax[i];
      if (id < 0 || id >= p_.vocab || z[id] < sorted[0] - near) say("argmax", i, double(id), sorted[0], near);
      if (got_.correct[i] != (id == label)) say("correct", i, got_.correct[i], id == label, 0);
    }
    if (!got_.rank.empty() && label >= 0) {
      std::int64_t least = 0, most = 0;
      for (std::size_t v = 0; v < V; ++v) {
        if (v == static_cast<std::size_t>(label)) continue;
        least += z[v] > z[label] + near;
        most += z[v] > z[label] - near;
      }
      if (got_.rank[i] < least || got_.rank[i] > most)
        say("rank", i, double(got_.rank[i]), double(least), double(most - least));
    }
    if (!got_.rank.empty() && label < 0 && got_.rank[i] != -1) say("rank", i, double(got_.rank[i]), -1, 0);
    for (std::size_t k = 0; k < K; ++k) {
      const std::int64_t id = got_.top_ids[i * K + k];
      const bool there = k < V && sorted[k] > -INFINITY;
      if (!there) {
        if (id != -1) say("top_k_ids", i * K + k, double(id), -1, 0);
        continue;
      }
      if (id < 0 || id >= p_.vocab || z[id] < sorted[k] - near ||
          std::count(&got_.top_ids[i * K], &got_.top_ids[i * K] + k, id) > 0) {
        say("top_k_ids", i * K + k, double(id), sorted[k], near);
        continue;
      }
      const double want = z[id] - want_.lse[i], got = got_.top_logprobs.get(static_cast<std::int64_t>(i * K + k));
      const double bound = want_.lse_bound[i] + want_.logit_error[i] + 0x1p-24 * std::abs(want);
      if (!(std::abs(got - want) <= bound)) say("top_k_logprobs", i * K + k, got, want, bound);
    }
  }

  const Problem& p_;
  const Results& got_;
  const reference::Reference& want_;
  std::string first_;
};

}  // namespace cutloss::testing

#endif  // CUTLOSS_SRC_CPU_OBJECTIVE_CASE_H_
