// The policies that need the buffers: labels, presence, overlap.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

// Label or id `at` of an array of label_dtype.
std::int64_t integer_at(const Problem& problem, const void* data, std::int64_t at) {
  if (problem.label_dtype == DType::i64) {
    std::int64_t value;
    std::memcpy(&value, static_cast<const char*>(data) + at * 8, sizeof value);
    return value;
  }
  std::int32_t value;
  std::memcpy(&value, static_cast<const char*>(data) + at * 4, sizeof value);
  return value;
}

bool out_of_range(const Problem& problem, std::int64_t id) { return id < 0 || id >= problem.vocab; }

struct RowTarget {
  std::int64_t label = kBadLabel;
  bool ignored = false;
  bool counts = true;  // something of it reaches the loss
};

RowTarget label_target(const Problem& p, const Inputs& in, std::int64_t row, Status& bad) {
  const std::int64_t label = integer_at(p, in.labels, (row + p.shift) * p.label_stride);
  if (label == p.ignore_index) return {kBadLabel, true, false};
  if (out_of_range(p, label)) {
    if (bad.ok()) bad = bad_id(text("labels[", row + p.shift, "]"), text(label), p.vocab, p.ignore_index);
    return {};
  }
  const bool weightless = p.class_weights && in.class_weights[label] == 0 && p.label_smoothing == 0;
  return {label, false, !weightless || p.z_loss != 0 || p.lse_cotangent};
}

RowTarget soft_row_target(const Problem& p, const Inputs& in, std::int64_t row, Status& bad) {
  RowTarget target{kNoTarget, false, p.z_loss != 0 || p.lse_cotangent};
  double best = 0;
  bool broken = false;
  for (std::int64_t k = 0; k < p.soft_targets; ++k) {
    const std::int64_t at = (row + p.shift) * p.soft_targets + k;
    const std::int64_t id = integer_at(p, in.soft_ids, at);
    if (id == p.ignore_index) continue;
    if (out_of_range(p, id)) {
      if (bad.ok()) {
        bad = bad_id(text("soft_targets ids[", row + p.shift, ", ", k, "]"), text(id), p.vocab, p.ignore_index);
      }
      broken = true;
    }
    const double probability = in.soft_probabilities[at];
    if (probability != 0) target.counts = true;
    if (probability > best || target.label == kNoTarget) {
      best = probability;
      target.label = id;
    }
  }
  return broken ? RowTarget{} : target;
}

// An argument's array: n0 x n1 elements of `item` bytes.
struct Array {
  const char* argument;
  const void* data;
  std::size_t item;
  bool written;
  std::int64_t n0, stride0;
  std::int64_t n1 = 1, stride1 = 0;
};

// The bytes an array touches; strides may be negative.
Range range_of(const Array& a) {
  const char* at = static_cast<const char*>(a.data);
  if (a.data == nullptr || a.n0 == 0 || a.n1 == 0) return {a.argument, at, at, a.written};
  const std::int64_t reach0 = (a.n0 - 1) * a.stride0;
  const std::int64_t reach1 = (a.n1 - 1) * a.stride1;
  const auto size = static_cast<std::int64_t>(a.item);
  return {a.argument, at + (std::min<std::int64_t>(reach0, 0) + std::min<std::int64_t>(reach1, 0)) * size,
          at + (std::max<std::int64_t>(reach0, 0) + std::max<std::int64_t>(reach1, 0) + 1) * size, a.written};
}

Status check_presence(const char* argument, const void* data, bool wanted, const char* reason) {
  if (wanted && data == nullptr) return invalid(argument, " is null, but ", reason);
  if (!wanted && data != nullptr) return invalid(argument, " is given, but the problem does not say so");
  return Status();
}

Status check_all_present(const Problem& p, const Inputs& in, const Outputs& out) {
  const bool some = p.tokens > 0;
  const bool soft = p.soft_targets > 0;
  if (some && in.e == nullptr) return invalid("e is null, but tokens is ", p.tokens);
  if (in.c == nullptr) return invalid("c is null, but vocab is ", p.vocab);
  if (some || in.labels != nullptr) {
    if (Status s = validate_targets(in.labels != nullptr, soft); !s.ok()) return s;
  }
  struct Item {
    const char* argument;
    const void* data;
    bool wanted;
    bool by_token;  // may be null where there are no tokens
  };
  const Metrics& m = p.metrics;
  const Item items[] = {
      {"bias", in.bias, p.bias_dtype.has_value(), false},
      {"token_weights", in.token_weights, p.token_weights, true},
      {"class_weights", in.class_weights, p.class_weights, false},
      {"lse_cotangent", in.lse_cotangent, p.lse_cotangent, true},
      {"soft_ids", in.soft_ids, soft, true},
      {"soft_probabilities", in.soft_probabilities, soft, true},
      {"vocab_order", in.vocab_order, p.vocab_order, false},
      {"d_e", out.d_e, p.want_d_e, true},
      {"d_c", out.d_c, p.want_d_c, false},
      {"d_bias", out.d_bias, p.want_d_bias, false},
      {"entropy", out.entropy, m.entropy, true},
      {"argmax", out.argmax, m.argmax, true},
      {"rank", out.rank, m.rank, true},
      {"top_k_ids", out.top_k_ids, m.top_k > 0, true},
      {"top_k_logprobs", out.top_k_logprobs, m.top_k > 0, true},
      {"mean_logits", out.mean_logits, m.mean_logits, false},
  };
  for (const Item& item : items) {
    if (item.wanted && item.data == nullptr && item.by_token && !some) continue;
    if (Status s = check_presence(item.argument, item.data, item.wanted, "the problem has or wants it"); !s.ok()) {
      return s;
    }
  }
  if (out.correct != nullptr && !m.argmax) return invalid("correct is given, but the problem does not want argmax");
  return in.denominator ? validate_denominator(*in.denominator, p.reduction) : Status();
}

constexpr std::size_t kArrays = 25;

std::array<Array, kArrays> arrays_of(const Problem& p, const Inputs& in, const Outputs& out) {
  const Strides e = e_strides(p);
  const HeadStrides c = c_strides(p);
  const std::int64_t per_loss = p.reduction == Reduction::none ? p.tokens : 1;
  const std::int64_t n = p.tokens;
  const std::int64_t v = p.vocab;
  const std::int64_t k = p.soft_targets;
  const std::size_t bias = p.bias_dtype ? size_of(*p.bias_dtype) : 4;
  return {{
      {"e", in.e, size_of(p.e_dtype), false, n, e.axis0, p.hidden, e.axis1},
      {"c", in.c, size_of(p.c_dtype), false, v, c.v, p.hidden, c.d},
      {"labels", in.labels, size_of(p.label_dtype), false, n, p.label_stride},
      {"cotangent", in.cotangent, 4, false, per_loss, 1},
      {"bias", in.bias, bias, false, v, 1},
      {"token_weights", in.token_weights, 4, false, n, 1},
      {"class_weights", in.class_weights, 4, false, v, 1},
      {"lse_cotangent", in.lse_cotangent, 4, false, n, 1},
      {"soft_ids", in.soft_ids, size_of(p.label_dtype), false, n, k, k, 1},
      {"soft_probabilities", in.soft_probabilities, 4, false, n, k, k, 1},
      {"vocab_order", in.vocab_order, 8, false, v, 1},
      {"loss", out.loss, 4, true, per_loss, 1},
      {"nll", out.nll, 4, true, n, 1},
      {"lse", out.lse, 4, true, n, 1},
      {"d_e", out.d_e, size_of(d_e_dtype(p)), true, n, p.hidden, p.hidden, 1},
      {"d_c", out.d_c, size_of(d_c_dtype(p)), true, v, p.hidden, p.hidden, 1},
      {"d_bias", out.d_bias, bias, true, v, 1},
      {"valid_count", out.valid_count, 8, true, 1, 1},
      {"entropy", out.entropy, 4, true, n, 1},
      {"argmax", out.argmax, 8, true, n, 1},
      {"correct", out.correct, 1, true, n, 1},
      {"rank", out.rank, 8, true, n, 1},
      {"top_k_ids", out.top_k_ids, 8, true, n, p.metrics.top_k, p.metrics.top_k, 1},
      {"top_k_logprobs", out.top_k_logprobs, 4, true, n, p.metrics.top_k, p.metrics.top_k, 1},
      {"mean_logits", out.mean_logits, 4, true, v, 1},
  }};
}

}  // namespace

Status check_overlap(std::span<const Range> ranges) {
  for (const Range& a : ranges) {
    for (const Range& b : ranges) {
      if (&a < &b && (a.written || b.written) && a.begin < b.end && b.begin < a.end) {
        return invalid(a.argument, " and ", b.argument, " overlap in memory");
      }
    }
  }
  return Status();
}

Status check_alignment(const char* argument, const void* data, std::size_t item) {
  if (reinterpret_cast<std::uintptr_t>(data) % item == 0) return Status();
  return invalid(argument, " is at an address that is no multiple of ", item,
                 ", the size of its elements; copy it to one that is");
}

RowScan scan_rows(const Problem& p, const Inputs& in, std::span<std::int64_t> rows,
                  std::span<std::int64_t> row_labels) {
  RowScan scan;
  const std::int64_t length = sequence_or_tokens(p);
  for (std::int64_t row = 0; row < p.tokens; ++row) {
    if (row % length + p.shift >= length) continue;
    const RowTarget target =
        p.soft_targets > 0 ? soft_row_target(p, in, row, scan.bad) : label_target(p, in, row, scan.bad);
    if (target.ignored) continue;
    ++scan.valid;
    if (!target.counts || (p.token_weights && in.token_weights[row] == 0)) continue;
    rows[static_cast<std::size_t>(scan.computed)] = row;
    row_labels[static_cast<std::size_t>(scan.computed)] = target.label;
    ++scan.computed;
  }
  return scan;
}

SoftTarget soft_target(const Problem& p, const Inputs& in, std::int64_t row, std::int64_t k) {
  const std::int64_t at = (row + p.shift) * p.soft_targets + k;
  const std::int64_t id = integer_at(p, in.soft_ids, at);
  if (id == p.ignore_index) return {0, 0};
  return {out_of_range(p, id) ? kBadLabel : id, in.soft_probabilities[at]};
}

Status bad_id(const std::string& what, const std::string& id, std::int64_t vocab, std::int64_t ignore_index) {
  return invalid(what, " is ", id, ", outside [0, vocab) = [0, ", vocab, ") and not ignore_index (", ignore_index, ")");
}

Status validate_targets(bool labels, bool soft_targets) {
  if (labels && soft_targets) return invalid("labels are given beside soft_targets; it must be one of the two");
  if (labels || soft_targets) return Status();
  return invalid("labels are not given, and neither are soft_targets; it must be one of the two");
}

Status validate_denominator(double denominator, Reduction reduction) {
  // XLA has it in f32, where one below would be 0, the denominator of a loss of 0.
  constexpr double kLeast = std::numeric_limits<float>::min(), kMost = std::numeric_limits<float>::max();
  if (!(denominator >= 0 && std::isfinite(denominator))) {
    return invalid("denominator is ", denominator, "; it must be finite and 0 or more");
  }
  if (denominator != 0 && !(denominator >= kLeast && denominator <= kMost)) {
    return invalid("denominator is ", denominator, "; it must be 0 or in [2^-126, 2^128), the range of float32");
  }
  if (reduction == Reduction::mean) return Status();
  return invalid("denominator is given with reduction \"", name(reduction), "\"; only \"mean\" has one");
}

Status validate_buffers(const Problem& p, const Inputs& in, const Outputs& out, std::initializer_list<Range> also) {
  if (Status s = check_all_present(p, in, out); !s.ok()) return s;
  std::array<Range, kArrays + 8> ranges{};  // no vector: run() must need no memory of its own
  std::size_t count = 0;
  for (const Array& array : arrays_of(p, in, out)) {
    if (Status s = check_alignment(array.argument, array.data, array.item); !s.ok()) return s;
    ranges[count++] = range_of(array);
  }
  if (Status s = check_alignment("filter_report", out.filter_report, alignof(FilterReport)); !s.ok()) return s;
  if (out.filter_report != nullptr) {
    ranges[count++] = written_range("filter_report", out.filter_report, sizeof(FilterReport));
  }
  for (const Range& range : also) ranges[count++] = range;  // one or two
  return check_overlap({ranges.data(), count});
}

Status invert_order(const char* what, std::span<const std::int64_t> order, std::span<std::int64_t> position) {
  std::fill(position.begin(), position.end(), -1);
  const auto vocab = static_cast<std::int64_t>(order.size());
  for (std::int64_t i = 0; i < vocab; ++i) {
    const std::int64_t id = order[static_cast<std::size_t>(i)];
    if (id < 0 || id >= vocab) return invalid(what, "[", i, "] is ", id, ", outside [0, vocab) = [0, ", vocab, ")");
    std::int64_t& at = position[static_cast<std::size_t>(id)];
    if (at >= 0) return invalid(what, "[", i, "] is ", id, ", as [", at, "] is: it must be a permutation");
    at = i;
  }
  return Status();
}

}  // namespace cutloss
