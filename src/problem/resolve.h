// A validated Problem with its defaults filled in: what the layers below read instead of repeating the rules.
#ifndef CUTLOSS_SRC_PROBLEM_RESOLVE_H_
#define CUTLOSS_SRC_PROBLEM_RESOLVE_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "cutloss/cutloss.hpp"

namespace cutloss {

// Element strides by meaning rather than by axis: the [D, V] layout is [V, D] with the two exchanged.
struct HeadStrides {
  std::int64_t v;
  std::int64_t d;
};

Strides e_strides(const Problem& problem);
HeadStrides c_strides(const Problem& problem);
HeadStrides d_c_strides(const Problem& problem);  // of the contiguous output
inline DType d_e_dtype(const Problem& problem) { return problem.d_e_dtype.value_or(problem.e_dtype); }
inline DType d_c_dtype(const Problem& problem) { return problem.d_c_dtype.value_or(problem.c_dtype); }
inline std::int64_t sequence_or_tokens(const Problem& p) { return p.sequence > 0 ? p.sequence : p.tokens; }
// dC or dbias: what tasks that own vocabulary compute.
inline bool wants_head(const Problem& p) { return p.want_d_c || p.want_d_bias; }
// Whether the loss pass forms dE on its way. Filter "tile" needs the lse first.
inline bool streams_d_e(const Problem& p) { return p.want_d_e && p.filter != Filter::tile; }
inline bool wants_gradient(const Problem& p) { return p.want_d_e || wants_head(p); }
// Whether a row of the table can be read in place as f32.
inline bool rows_are_floats(const Problem& p) { return p.c_dtype == DType::f32 && c_strides(p).d == 1; }
inline float softcap_or_zero(const Problem& problem) { return problem.softcap.value_or(0.0f); }

// Sorts the rows by what becomes of them.
struct RowScan {
  std::int64_t valid = 0;     // rows with a label (soft target) that is not ignore_index
  std::int64_t computed = 0;  // of these the ones that count: no weight makes them vanish
  Status bad;                 // names the first label or id outside [0, V) that is not ignore_index
};
// What `row_labels` below holds where there is no label; they match no vocabulary entry.
constexpr std::int64_t kBadLabel = -1;  // outside [0, V) and not ignore_index
constexpr std::int64_t kNoTarget = -2;  // soft targets that are all padding, of a row that counts for its lse

// Writes the rows to compute and their labels, in order; both spans hold at least problem.tokens values. With soft
// targets a row's label is its likeliest id (the first of equals).
RowScan scan_rows(const Problem& problem, const Inputs& inputs, std::span<std::int64_t> rows,
                  std::span<std::int64_t> row_labels);

// Soft target k of row i, which the shift has already been applied to; id kBadLabel if it is out of range.
struct SoftTarget {
  std::int64_t id;
  double probability;  // 0 where the id is ignore_index
};
SoftTarget soft_target(const Problem& problem, const Inputs& inputs, std::int64_t row, std::int64_t k);

// Memory that an argument takes, from its lowest address on.
struct Range {
  const char* argument;
  const char* begin;
  const char* end;
  bool written;
};
inline Range written_range(const char* argument, const void* data, std::size_t bytes) {
  return {argument, static_cast<const char*>(data), static_cast<const char*>(data) + bytes, true};
}
// Of two that share memory one is written.
Status check_overlap(std::span<const Range> ranges);
Status check_alignment(const char* argument, const void* data, std::size_t item);

// The checks that need the buffers themselves: presence, alignment, overlap. also: memory beside inputs and outputs.
Status validate_buffers(const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        std::initializer_list<Range> also);

// Single rules, for front ends whose values no call of run() sees in time (JAX, while it traces).
Status validate_targets(bool labels, bool soft_targets);
Status validate_denominator(double denominator, Reduction reduction);
// Of Limits; 64 bits, so that a front end need not cut what it was given to an int before.
constexpr int kMaxThreads = 1024;
Status validate_threads(std::int64_t threads);
// An option of Problem that a front end has in double precision; an error if f32 would make it 0 or infinite.
Result<float> float_from(const char* argument, double value);
// What to say of an id that is out of range; text, since a uint64 fits no int64.
Status bad_id(const std::string& what, const std::string& id, std::int64_t vocab, std::int64_t ignore_index);

// position[order[i]] = i; an error that calls it `what` if order is no permutation. Both are of the same length.
Status invert_order(const char* what, std::span<const std::int64_t> order, std::span<std::int64_t> position);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PROBLEM_RESOLVE_H_
