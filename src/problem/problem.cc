#include <cmath>
#include <limits>

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

bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }

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
  return invalid(argument, " is ", name(dtype), "; f32 and bf16 are taken");
}

}  // namespace

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

Status validate(const Problem& p) {
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
  if (Status s = check_float("e_dtype", p.e_dtype); !s.ok()) return s;
  if (Status s = check_float("c_dtype", p.c_dtype); !s.ok()) return s;
  if (Status s = check_float("d_e_dtype", d_e_dtype(p)); !s.ok()) return s;
  if (Status s = check_float("d_c_dtype", d_c_dtype(p)); !s.ok()) return s;
  if (is_float(p.label_dtype)) return invalid("label_dtype is ", name(p.label_dtype), "; i32 and i64 are taken");

  const Strides e = e_strides(p);
  const HeadStrides c = c_strides(p);
  if (Status s = check_stride("e", e.axis0, p.tokens); !s.ok()) return s;
  if (Status s = check_stride("e", e.axis1, p.hidden); !s.ok()) return s;
  if (Status s = check_stride("c", c.v, p.vocab); !s.ok()) return s;
  if (Status s = check_stride("c", c.d, p.hidden); !s.ok()) return s;
  if (Status s = check_stride("labels", p.label_stride, p.tokens); !s.ok()) return s;

  if (p.softcap) {
    const float cap = *p.softcap;
    if (!(cap >= kMinSoftcap && cap <= kMaxSoftcap)) {
      return invalid("softcap is ", cap, "; it must be a number between 2^-64 and 2^64, or absent");
    }
  }
  return Status();
}

std::string_view version() { return CUTLOSS_VERSION; }

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
  }
  return "unknown dtype";
}

std::string_view name(HeadLayout layout) { return layout == HeadLayout::vd ? "vd" : "dv"; }

std::string_view name(Reduction reduction) {
  switch (reduction) {
    case Reduction::mean: return "mean";
    case Reduction::sum: return "sum";
    case Reduction::none: return "none";
  }
  return "unknown reduction";
}

std::string_view name(Mode mode) {
  switch (mode) {
    case Mode::automatic: return "auto";
    case Mode::loss: return "loss";
    case Mode::stream: return "stream";
    case Mode::chunk: return "chunk";
    case Mode::recompute: return "recompute";
  }
  return "unknown mode";
}

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::bf16: return 2;
    case DType::i32: return 4;
    case DType::i64: return 8;
  }
  return 0;
}

}  // namespace cutloss
