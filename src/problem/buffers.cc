// The policies that need the buffers: labels, presence, overlap.
#include <algorithm>
#include <cstring>
#include <vector>

#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

template <typename Label>
LabelScan scan(const Problem& problem, const void* labels, std::span<std::int64_t> rows,
               std::span<std::int64_t> row_labels) {
  const char* at = static_cast<const char*>(labels);
  const std::int64_t step = problem.label_stride * static_cast<std::int64_t>(sizeof(Label));
  LabelScan result;
  for (std::int64_t row = 0; row < problem.tokens; ++row, at += step) {
    Label label;
    std::memcpy(&label, at, sizeof label);
    if (label == problem.ignore_index) continue;
    const bool bad = label < 0 || label >= problem.vocab;
    if (bad && result.first_bad_row < 0) {
      result.first_bad_row = row;
      result.first_bad_label = label;
    }
    rows[static_cast<std::size_t>(result.valid)] = row;
    row_labels[static_cast<std::size_t>(result.valid)] = bad ? kBadLabel : static_cast<std::int64_t>(label);
    ++result.valid;
  }
  return result;
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

}  // namespace

LabelScan scan_labels(const Problem& problem, const void* labels, std::span<std::int64_t> rows,
                      std::span<std::int64_t> row_labels) {
  return problem.label_dtype == DType::i32 ? scan<std::int32_t>(problem, labels, rows, row_labels)
                                           : scan<std::int64_t>(problem, labels, rows, row_labels);
}

Status validate_buffers(const Problem& p, const Inputs& in, const Outputs& out, std::span<const std::byte> workspace) {
  if (p.tokens > 0 && in.e == nullptr) return invalid("e is null, but tokens is ", p.tokens);
  if (p.tokens > 0 && in.labels == nullptr) return invalid("labels is null, but tokens is ", p.tokens);
  if (in.c == nullptr) return invalid("c is null, but vocab is ", p.vocab);
  if (p.want_d_e && out.d_e == nullptr && p.tokens > 0) return invalid("d_e is null, but the problem wants it");
  if (p.want_d_c && out.d_c == nullptr) return invalid("d_c is null, but the problem wants it");
  if (!p.want_d_e && out.d_e != nullptr) return invalid("d_e is given, but the problem does not want it");
  if (!p.want_d_c && out.d_c != nullptr) return invalid("d_c is given, but the problem does not want it");

  const Strides e = e_strides(p);
  const HeadStrides c = c_strides(p);
  const std::int64_t per_loss = p.reduction == Reduction::none ? p.tokens : 1;
  const Range ranges[] = {
      range_of("e", in.e, size_of(p.e_dtype), false, p.tokens, e.axis0, p.hidden, e.axis1),
      range_of("c", in.c, size_of(p.c_dtype), false, p.vocab, c.v, p.hidden, c.d),
      range_of("labels", in.labels, size_of(p.label_dtype), false, p.tokens, p.label_stride, 1, 0),
      range_of("cotangent", in.cotangent, sizeof(float), false, per_loss, 1, 1, 0),
      range_of("loss", out.loss, sizeof(float), true, per_loss, 1, 1, 0),
      range_of("nll", out.nll, sizeof(float), true, p.tokens, 1, 1, 0),
      range_of("lse", out.lse, sizeof(float), true, p.tokens, 1, 1, 0),
      range_of("d_e", out.d_e, size_of(d_e_dtype(p)), true, p.tokens, p.hidden, p.hidden, 1),
      range_of("d_c", out.d_c, size_of(d_c_dtype(p)), true, p.vocab, p.hidden, p.hidden, 1),
      range_of("valid_count", out.valid_count, sizeof(std::int64_t), true, 1, 1, 1, 0),
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

}  // namespace cutloss
