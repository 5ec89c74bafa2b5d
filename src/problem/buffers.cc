// The policies that need the buffers: labels, presence, overlap.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

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

struct Range {
  const char* argument;
  const char* begin;
  const char* end;
  bool written;
};

// The bytes an array touches; strides may be negative.
Range range_of(const char* argument, const void* data, std::size_t item, bool written, std::int64_t n0,
               std::int64_t stride0, std::int64_t n1, std::int64_t stride1) {
  const char* at = static_cast<const char*>(data);
  if (data == nullptr || n0 == 0 || n1 == 0) return {argument, at, at, written};
  const std::int64_t a = (n0 - 1) * stride0;
  const std::int64_t b = (n1 - 1) * stride1;
  const auto size = static_cast<std::int64_t>(item);
  return {argument, at + (std::min<std::int64_t>(a, 0) + std::min<std::int64_t>(b, 0)) * size,
          at + (std::max<std::int64_t>(a, 0) + std::max<std::int64_t>(b, 0) + 1) * size, written};
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

Status check_overlap(const Problem& p, const Inputs& in, const Outputs& out, std::span<const std::byte> workspace) {
  const Strides e = e_strides(p);
  const HeadStrides c = c_strides(p);
  const std::int64_t per_loss = p.reduction == Reduction::none ? p.tokens : 1;
  const std::int64_t n = p.tokens;
  const std::int64_t v = p.vocab;
  const std::int64_t k = p.soft_targets;
  const std::size_t bias = p.bias_dtype ? size_of(*p.bias_dtype) : 4;
  const Range ranges[] = {
      range_of("e", in.e, size_of(p.e_dtype), false, n, e.axis0, p.hidden, e.axis1),
      range_of("c", in.c, size_of(p.c_dtype), false, v, c.v, p.hidden, c.d),
      range_of("labels", in.labels, size_of(p.label_dtype), false, n, p.label_stride, 1, 0),
      range_of("cotangent", in.cotangent, 4, false, per_loss, 1, 1, 0),
      range_of("bias", in.bias, bias, false, v, 1, 1, 0),
      range_of("token_weights", in.token_weights, 4, false, n, 1, 1, 0),
      range_of("class_weights", in.class_weights, 4, false, v, 1, 1, 0),
      range_of("lse_cotangent", in.lse_cotangent, 4, false, n, 1, 1, 0),
      range_of("soft_ids", in.soft_ids, size_of(p.label_dtype), false, n, k, k, 1),
      range_of("soft_probabilities", in.soft_probabilities, 4, false, n, k, k, 1),
      range_of("vocab_order", in.vocab_order, 8, false, v, 1, 1, 0),
      range_of("loss", out.loss, 4, true, per_loss, 1, 1, 0),
      range_of("nll", out.nll, 4, true, n, 1, 1, 0),
      range_of("lse", out.lse, 4, true, n, 1, 1, 0),
      range_of("d_e", out.d_e, size_of(d_e_dtype(p)), true, n, p.hidden, p.hidden, 1),
      range_of("d_c", out.d_c, size_of(d_c_dtype(p)), true, v, p.hidden, p.hidden, 1),
      range_of("d_bias", out.d_bias, bias, true, v, 1, 1, 0),
      range_of("valid_count", out.valid_count, 8, true, 1, 1, 1, 0),
      range_of("entropy", out.entropy, 4, true, n, 1, 1, 0),
      range_of("argmax", out.argmax, 8, true, n, 1, 1, 0),
      range_of("correct", out.correct, 1, true, n, 1, 1, 0),
      range_of("rank", out.rank, 8, true, n, 1, 1, 0),
      range_of("top_k_ids", out.top_k_ids, 8, true, n, p.metrics.top_k, p.metrics.top_k, 1),
      range_of("top_k_logprobs", out.top_k_logprobs, 4, true, n, p.metrics.top_k, p.metrics.top_k, 1),
      range_of("mean_logits", out.mean_logits, 4, true, v, 1, 1, 0),
      range_of("filter_report", out.filter_report, sizeof(FilterReport), true, 1, 1, 1, 0),
      range_of("workspace", workspace.data(), 1, true, static_cast<std::int64_t>(workspace.size()), 1, 1, 0),
  };
  for (const Range& a : ranges) {
    for (const Range& b : ranges) {
      if (&a < &b && (a.written || b.written) && a.begin < b.end && b.begin < a.end) {
        return invalid(a.argument, " and ", b.argument, " overlap in memory");
      }
    }
  }
  return Status();
}

}  // namespace

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
  if (!(denominator >= 0 && std::isfinite(denominator))) {
    return invalid("denominator is ", denominator, "; it must be finite and 0 or more");
  }
  if (reduction == Reduction::mean) return Status();
  return invalid("denominator is given with reduction \"", name(reduction), "\"; only \"mean\" has one");
}

Status validate_buffers(const Problem& p, const Inputs& in, const Outputs& out, std::span<const std::byte> workspace) {
  if (Status s = check_all_present(p, in, out); !s.ok()) return s;
  return check_overlap(p, in, out, workspace);
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
