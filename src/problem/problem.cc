#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "src/cpu/float_env.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

// 2^46 elements are 256 TiB of f32: every byte count below that fits 64 bits with room for the factors of a workspace.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 46;
// A tile is a fixed number of rows of D: this keeps the workspace of 1024 threads below 2^63 bytes.
constexpr std::int64_t kMaxHidden = std::int64_t{1} << 24;
// Outside, logit / cap falls where f32 has few digits or none for logits of ordinary size.
constexpr float kMinSoftcap = 0x1p-64f;
constexpr float kMaxSoftcap = 0x1p64f;

bool too_many(std::int64_t a, std::int64_t b) { return b != 0 && a > kMaxElements / b; }

constexpr std::int64_t kMaxTopK = 128;

bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }

Status check_stride(const char* argument, std::int64_t stride, std::int64_t extent) {
  if (extent <= 1) return Status();  // never used
  const std::int64_t magnitude = stride == std::numeric_limits<std::int64_t>::min() ? kMaxElements + 1
                                 : stride < 0                                       ? -stride
                                                                                    : stride;
  if (magnitude > kMaxElements || too_many(magnitude, extent)) {
    return invalid(argument, " has stride ", stride, " over ", extent, " entries, which spans more than 2^46 elements");
  }
  return Status();
}

Status check_float(const char* argument, DType dtype) {
  if (is_float(dtype)) return Status();
  return invalid(argument, " is ", name(dtype), "; f32, bf16 and f16 are taken");
}

Status check_shapes(const Problem& p) {
  if (p.tokens < 0) return invalid("tokens (N) is ", p.tokens, "; it must be 0 or more");
  if (p.hidden < 1) return invalid("hidden (D) is ", p.hidden, "; it must be 1 or more");
  if (p.hidden > kMaxHidden) return invalid("hidden (D) is ", p.hidden, "; it must be at most 2^24");
  if (p.vocab < 1) {
    return invalid("vocab (V) is ", p.vocab, "; it must be 1 or more: is the table empty or not yet gathered?");
  }
  if (p.tokens > kMaxElements || too_many(p.tokens, p.hidden)) {
    return invalid("tokens x hidden is ", p.tokens, " x ", p.hidden, ", more than 2^46 elements");
  }
  if (p.vocab > kMaxElements || too_many(p.vocab, p.hidden)) {
    return invalid("vocab x hidden is ", p.vocab, " x ", p.hidden, ", more than 2^46 elements");
  }
  const Strides e = e_strides(p);
  const HeadStrides c = c_strides(p);
  if (Status s = check_stride("e", e.axis0, p.tokens); !s.ok()) return s;
  if (Status s = check_stride("e", e.axis1, p.hidden); !s.ok()) return s;
  if (Status s = check_stride("c", c.v, p.vocab); !s.ok()) return s;
  if (Status s = check_stride("c", c.d, p.hidden); !s.ok()) return s;
  return check_stride("labels", p.label_stride, p.tokens);
}

Status check_dtypes(const Problem& p) {
  if (Status s = check_float("e_dtype", p.e_dtype); !s.ok()) return s;
  if (Status s = check_float("c_dtype", p.c_dtype); !s.ok()) return s;
  if (Status s = check_float("d_e_dtype", d_e_dtype(p)); !s.ok()) return s;
  if (Status s = check_float("d_c_dtype", d_c_dtype(p)); !s.ok()) return s;
  if (p.bias_dtype) {
    if (Status s = check_float("bias_dtype", *p.bias_dtype); !s.ok()) return s;
  }
  if (is_float(p.label_dtype)) return invalid("label_dtype is ", name(p.label_dtype), "; i32 and i64 are taken");
  return Status();
}

Status check_targets(const Problem& p) {
  if (p.sequence < 0) return invalid("sequence is ", p.sequence, "; it must be 0 (all tokens) or more");
  if (p.sequence > 0 && p.tokens % p.sequence != 0) {
    return invalid("sequence is ", p.sequence, ", which does not divide tokens (", p.tokens, ")");
  }
  const std::int64_t length = sequence_or_tokens(p);
  if (p.shift < 0 || p.shift > length) {
    return invalid("shift is ", p.shift, "; it must be in [0, ", length, "], the length of a sequence");
  }
  if (p.soft_targets < 0) return invalid("soft_targets (K) is ", p.soft_targets, "; it must be 0 (labels) or more");
  if (p.soft_targets == 0) return Status();
  if (too_many(std::max<std::int64_t>(p.tokens, 1), p.soft_targets)) {
    return invalid("tokens x soft_targets is ", p.tokens, " x ", p.soft_targets, ", more than 2^46 elements");
  }
  if (p.class_weights) return invalid("class_weights are given beside soft_targets, which have weights of their own");
  if (p.label_smoothing != 0) {
    return invalid("label_smoothing is ", p.label_smoothing, " beside soft_targets; it must be 0 there");
  }
  return Status();
}

Status check_objective(const Problem& p) {
  if (p.softcap && !(*p.softcap >= kMinSoftcap && *p.softcap <= kMaxSoftcap)) {
    return invalid("softcap is ", *p.softcap, "; it must be a number between 2^-64 and 2^64, or absent");
  }
  if (!std::isfinite(p.logit_scale)) return invalid("logit_scale is ", p.logit_scale, "; it must be finite");
  if (!(p.label_smoothing >= 0 && p.label_smoothing <= 1)) {
    return invalid("label_smoothing is ", p.label_smoothing, "; it must be in [0, 1]");
  }
  if (!std::isfinite(p.z_loss)) return invalid("z_loss is ", p.z_loss, "; it must be finite");
  if (p.metrics.top_k < 0 || p.metrics.top_k > kMaxTopK) {
    return invalid("top_k is ", p.metrics.top_k, "; it must be in [0, ", kMaxTopK, "]");
  }
  return Status();
}

Status check_wants(const Problem& p) {
  if (p.want_d_bias && !p.bias_dtype) return invalid("d_bias is wanted, but there is no bias");
  if (p.accumulate_d_e && !p.want_d_e) return invalid("accumulate_d_e is set, but d_e is not wanted");
  if (p.accumulate_d_c && !p.want_d_c) return invalid("accumulate_d_c is set, but d_c is not wanted");
  if (p.accumulate_d_bias && !p.want_d_bias) return invalid("accumulate_d_bias is set, but d_bias is not wanted");
  return Status();
}

Status check_filter(const Problem& p) {
  const auto probability = [](float x) { return x > 0 && x < 1; };
  if (p.epsilon && !probability(*p.epsilon)) {
    return invalid("epsilon is ", *p.epsilon, "; it is a probability and must be in (0, 1)");
  }
  if (p.tolerance && !probability(*p.tolerance)) {
    return invalid("tolerance is ", *p.tolerance, "; it must be in (0, 1)");
  }
  switch (p.filter) {
    case Filter::none:
      if (p.tolerance) return invalid("tolerance is given without a filter; filter may be certified or unbiased");
      if (p.epsilon) return invalid("epsilon is given without a filter; filter may be certified, unbiased or tile");
      return Status();
    case Filter::tile:
      if (p.tolerance)
        return invalid("tolerance is given with filter \"tile\", whose error is not known: give epsilon");
      if (!p.epsilon) return invalid("filter is \"tile\", which needs epsilon (Cut Cross-Entropy uses 2^-12)");
      return Status();
    case Filter::certified:
    case Filter::unbiased:
      if (p.tolerance.has_value() == p.epsilon.has_value()) {
        return invalid("filter is \"", name(p.filter), "\", which needs one of tolerance and epsilon; ",
                       p.epsilon ? "both were" : "neither was", " given");
      }
      if (p.softcap && p.label_smoothing > 0) {
        return invalid("filter is \"", name(p.filter),
                       "\" with softcap and label_smoothing, which together leave nothing negligible: use no filter");
      }
      return Status();
  }
  return invalid("filter is ", static_cast<int>(p.filter), ", which is none of the known ones");
}

}  // namespace

Status validate_threads(std::int64_t threads) {
  if (threads >= 0 && threads <= kMaxThreads) return Status();
  return invalid("threads is ", threads, "; it must be 0 (choose) to ", kMaxThreads);
}

Result<float> float_from(const char* argument, double value) {
  const auto narrow = static_cast<float>(value);
  if ((narrow != 0 || value == 0) && (std::isfinite(narrow) || !std::isfinite(value))) return narrow;
  return invalid(argument, " is ", value, ", beyond float32; it must be 0 or of a size in [2^-149, 2^128)");
}

Strides e_strides(const Problem& problem) { return problem.e_strides.value_or(Strides{problem.hidden, 1}); }

HeadStrides d_c_strides(const Problem& problem) {
  if (problem.head_layout == HeadLayout::vd) return {problem.hidden, 1};
  return {1, problem.vocab};
}

HeadStrides c_strides(const Problem& problem) {
  if (!problem.c_strides) return d_c_strides(problem);
  const Strides& s = *problem.c_strides;
  return problem.head_layout == HeadLayout::vd ? HeadStrides{s.axis0, s.axis1} : HeadStrides{s.axis1, s.axis0};
}

Status validate(const Problem& p) try {
  const cpu::KernelFloatEnv float_env;  // comparing NaN raises a flag
  for (const auto check : {check_shapes, check_dtypes, check_targets, check_objective, check_wants, check_filter}) {
    if (Status s = check(p); !s.ok()) return s;
  }
  return Status();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace cutloss
