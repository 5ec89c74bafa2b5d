// Problems over the whole objective and every layout, out of a seed or out of a fuzzer's bytes, and their check.
#ifndef CUTLOSS_SRC_CPU_OBJECTIVE_DRAW_H_
#define CUTLOSS_SRC_CPU_OBJECTIVE_DRAW_H_

#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "src/cpu/objective_case.h"
#include "src/cpu/test_problem.h"

namespace cutloss::testing {

// Choices come from the bytes while there are any, one or two each, and then, like all bulk data, from a generator
// (splitmix64) that the bytes or the seed start. The distributions are our own: those of the standard library reject
// and may never end on a fuzzer's bytes.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed) {}
  explicit Draw(std::span<const std::uint8_t> bytes) : bytes_(bytes) {
    for (const std::uint8_t byte : bytes) state_ = (state_ ^ byte) * 0x100000001B3u;
  }

  std::uint64_t below(std::uint64_t count) {
    if (bytes_.empty()) return next() % count;
    std::uint64_t value = take();
    if (count > 256) value = value << 8 | take();
    return value % count;
  }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(most - least + 1)));
  }
  bool chance(double share) { return static_cast<double>(below(256)) < share * 256; }
  template <typename T>
  T pick(const std::vector<T>& values) {
    return values[below(values.size())];
  }

  // Bulk data: never from the bytes.
  std::int64_t any_below(std::int64_t count) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(count));
  }
  bool any_chance(double share) { return uniform() < share; }
  float normal() {
    const double radius = std::sqrt(-2 * std::log1p(-uniform()));
    return static_cast<float>(radius * std::cos(2 * std::numbers::pi * uniform()));
  }
  // k / 8 with |k| <= 16: sums of products of such numbers are exact in double, so that weights of both signs cancel to
  // 0 in every order of summation or in none.
  float weight(bool negative) { return static_cast<float>(any_below(17) * (negative && any_chance(0.3) ? -1 : 1)) / 8; }

 private:
  std::uint64_t take() {
    if (bytes_.empty()) return next() & 0xFF;
    const std::uint8_t byte = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return byte;
  }
  std::uint64_t next() {
    std::uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  std::span<const std::uint8_t> bytes_;
  std::uint64_t state_ = 0;
};

// A problem with its buffers, and how it is to be run.
struct DrawnCase {
  Objective objective;
  Machine machine;
  int threads = 1;
  int budget_share = -1;  // of 256, of the bytes that the plan would like; -1: no budget
  std::uint64_t seed = 0;
  std::string text;
};

namespace internal {

// Moves a contiguous [rows][columns] to other strides, the gaps NaN. Returns the element of [0, 0].
inline std::int64_t lay_out(Draw& draw, std::int64_t rows, std::int64_t columns, Buffer& data, DType dtype,
                            std::optional<Strides>& strides) {
  const std::int64_t pad = draw.between(0, 3);
  Strides step{columns, 1};
  switch (draw.below(9)) {
    case 0: step = {columns + pad, 1}; break;                                          // padded rows
    case 1: step = {1, rows + pad}; break;                                             // transposed
    case 2: step = {2 * columns + pad, 2}; break;                                      // every other column
    case 3: step = {-(columns + pad), 1}; break;                                       // rows backwards
    case 4: step = {columns + pad, -1}; break;                                         // columns backwards
    case 5: step = {draw.chance(0.5) ? 0 : columns, draw.chance(0.2) ? 0 : 1}; break;  // one row for all
    default: return 0;
  }
  strides = step;
  std::int64_t first = 0, size = 1;
  for (const auto& [extent, stride] : {std::pair{rows, step.axis0}, std::pair{columns, step.axis1}}) {
    const std::int64_t reach = std::max<std::int64_t>(extent - 1, 0) * std::abs(stride);
    if (stride < 0) first += reach;
    size += reach;
  }
  Buffer moved(dtype, size, std::numeric_limits<float>::quiet_NaN());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      moved.set(first + i * step.axis0 + j * step.axis1, data.get(i * columns + j));
    }
  }
  data = std::move(moved);
  return first;
}

inline void draw_options(Draw& draw, Problem& p) {
  const auto dtype = [&] { return draw.pick(std::vector{DType::f32, DType::bf16, DType::f16}); };
  p.e_dtype = dtype();
  p.c_dtype = dtype();
  if (draw.chance(0.5)) p.label_dtype = DType::i32;
  if (draw.chance(0.5)) p.head_layout = HeadLayout::dv;
  p.reduction = draw.pick(std::vector{Reduction::mean, Reduction::sum, Reduction::none});
  p.ignore_index = draw.pick(std::vector<std::int64_t>{-100, -1, p.vocab / 2, p.vocab + 7});
  if (draw.chance(0.3)) p.bad_labels = BadLabels::nan;
  if (draw.chance(0.5)) p.bias_dtype = dtype();
  p.logit_scale = draw.pick(std::vector{1.0f, 1.0f, 0.7f, -1.5f, 0.0f});
  if (draw.chance(0.4)) p.softcap = draw.pick(std::vector{3.0f, 30.0f, 0.25f});
  p.token_weights = draw.chance(0.4);
  p.lse_cotangent = draw.chance(0.3);
  if (draw.chance(0.3)) p.z_loss = draw.pick(std::vector{0.01f, -0.01f, 1e-4f});
  if (draw.chance(0.35)) {
    p.soft_targets = draw.between(1, 6);
  } else {
    p.class_weights = draw.chance(0.4);
    if (draw.chance(0.3)) p.label_smoothing = draw.pick(std::vector{0.1f, 1.0f, 0.5f});
  }
  if (draw.chance(0.4)) {
    p.sequence = draw.between(1, 12);
    p.tokens = p.tokens / p.sequence * p.sequence;
  }
  if (draw.chance(0.4)) p.shift = draw.between(0, sequence_or_tokens(p));
  p.vocab_order = draw.chance(0.2);
  p.metrics = {draw.chance(0.4), draw.chance(0.4), draw.chance(0.4), draw.chance(0.4) ? draw.between(1, 128) : 0,
               draw.chance(0.4)};
  p.want_d_e = draw.chance(0.7);
  p.want_d_c = draw.chance(0.6);
  p.want_d_bias = p.bias_dtype && draw.chance(0.6);
  if (draw.chance(0.3)) p.d_e_dtype = dtype();
  if (draw.chance(0.3)) p.d_c_dtype = dtype();
  p.accumulate_d_e = p.want_d_e && draw.chance(0.3);
  p.accumulate_d_c = p.want_d_c && draw.chance(0.3);
  p.accumulate_d_bias = p.want_d_bias && draw.chance(0.3);
  p.compensated = draw.chance(0.3);
  if (!draw.chance(0.3)) return;
  p.filter = draw.pick(std::vector{Filter::certified, Filter::unbiased, Filter::tile});
  const float level = draw.pick(std::vector{1e-2f, 1e-4f, 1e-7f});
  if (p.filter != Filter::tile && p.softcap && p.label_smoothing > 0) p.label_smoothing = 0;
  // Half of them drop nothing that f32 has: the filter's own paths, within the bounds of the exact modes.
  if (draw.chance(0.5)) {
    p.epsilon = 0x1p-126f;
    return;
  }
  (p.filter != Filter::tile && draw.chance(0.5) ? p.tolerance : p.epsilon) = level;
}

// Values of the table and the hidden states: logits of deviation `spread` about `offset`.
inline void draw_values(Draw& draw, float spread, float offset, Objective& o) {
  const Problem& p = o.problem;
  const auto d = static_cast<float>(p.hidden);
  o.e = Buffer(p.e_dtype, p.tokens * p.hidden);
  o.c = Buffer(p.c_dtype, p.vocab * p.hidden);
  // Column 0 makes the offset.
  const bool constant = offset != 0;
  for (std::int64_t i = 0; i < o.e.size(); ++i) o.e.set(i, constant && i % p.hidden == 0 ? 1.0f : draw.normal());
  for (std::int64_t v = 0; v < p.vocab; ++v) {
    for (std::int64_t k = 0; k < p.hidden; ++k) {
      const float value = constant && k == 0 ? offset : spread / std::sqrt(d) * draw.normal();
      o.c.set(p.head_layout == HeadLayout::vd ? v * p.hidden + k : k * p.vocab + v, value);
    }
  }
  if (!p.bias_dtype) return;
  o.bias = Buffer(*p.bias_dtype, p.vocab);
  const double masked = draw.pick(std::vector{0.0, 0.0, 0.2, 1.0});
  for (std::int64_t v = 0; v < p.vocab; ++v) {
    o.bias.set(v, draw.any_chance(masked) ? -std::numeric_limits<float>::infinity() : 2 * draw.normal());
  }
}

inline std::int64_t draw_id(Draw& draw, const Problem& p, double ignored, double bad) {
  if (draw.any_chance(ignored)) return p.ignore_index;
  if (p.bad_labels == BadLabels::nan && draw.any_chance(bad)) return draw.any_chance(0.5) ? p.vocab : -7;
  return draw.any_below(p.vocab);
}

inline void draw_targets(Draw& draw, Objective& o) {
  Problem& p = o.problem;
  const bool negative = draw.chance(0.4);
  const double ignored = draw.pick(std::vector{0.2, 0.0, 0.9, 1.0});
  const double bad = draw.chance(0.5) ? 0.1 : 0.0;
  for (std::int64_t i = 0; p.token_weights && i < p.tokens; ++i) {
    o.token_weights.push_back(draw.any_chance(0.2) ? 0.0f : draw.weight(negative));
  }
  for (std::int64_t v = 0; p.class_weights && v < p.vocab; ++v) {
    o.class_weights.push_back(draw.any_chance(0.2) ? 0.0f : draw.weight(negative));
  }
  p.label_stride = draw.pick(std::vector<std::int64_t>{1, 1, 2, -1, -3, 0});
  const std::int64_t reach = std::max<std::int64_t>(p.tokens - 1, 0) * std::abs(p.label_stride);
  if (p.label_stride < 0) o.label_first = reach;
  o.labels.assign(static_cast<std::size_t>(reach) + 1, p.vocab + 1);  // the gaps are no labels
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    o.labels[static_cast<std::size_t>(o.label_first + i * p.label_stride)] = draw_id(draw, p, ignored, bad);
    o.cotangent.push_back(draw.normal());
    o.lse_cotangent.push_back(p.lse_cotangent ? draw.normal() : 0);
    for (std::int64_t k = 0; k < p.soft_targets; ++k) {
      o.soft_ids.push_back(draw_id(draw, p, 0.2, bad / 4));
      o.soft_probabilities.push_back(draw.any_chance(0.1) ? 0.0f : draw.weight(false) / 4);
    }
  }
  if (o.cotangent.empty()) o.cotangent.push_back(1.0f);
  for (std::int64_t v = 0; v < p.vocab; ++v) o.order.push_back(v);
  for (std::int64_t v = p.vocab; v > 1; --v) {
    std::swap(o.order[static_cast<std::size_t>(v - 1)], o.order[static_cast<std::size_t>(draw.any_below(v))]);
  }
  o.labels32.assign(o.labels.begin(), o.labels.end());
  o.soft_ids32.assign(o.soft_ids.begin(), o.soft_ids.end());
  if (p.reduction == Reduction::mean && draw.chance(0.3)) o.denominator = draw.pick(std::vector{7.5, 0.0, 1e-3});
}

// Rows that must not be read hold NaN, unless all rows are one.
inline void poison_uncounted(Objective& o) {
  const Strides step = e_strides(o.problem);
  if (step.axis0 == 0) return;
  const auto counts = reference::linear_cross_entropy(o.problem, o.inputs()).counts;
  for (std::int64_t i = 0; i < o.problem.tokens; ++i) {
    for (std::int64_t k = 0; counts[static_cast<std::size_t>(i)] == 0 && k < o.problem.hidden; ++k) {
      o.e.set(o.e_first + i * step.axis0 + k * step.axis1, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

}  // namespace internal

inline DrawnCase draw_case(Draw& draw, const std::string& target, std::int64_t most_vocab = 500) {
  DrawnCase out;
  Objective& o = out.objective;
  Problem& p = o.problem;
  p.tokens = draw.between(0, 70);
  p.vocab = draw.chance(0.3) ? draw.between(1, most_vocab) : draw.between(1, 60);
  p.hidden = draw.between(1, 40);
  internal::draw_options(draw, p);
  const float spread = draw.pick(std::vector{3.0f, 0.1f, 1.0f, 20.0f, 300.0f});
  const float offset = draw.chance(0.2) ? draw.pick(std::vector{1000.0f, -1000.0f, 20000.0f}) : 0.0f;
  internal::draw_targets(draw, o);
  internal::draw_values(draw, spread, offset, o);
  const bool vd = p.head_layout == HeadLayout::vd;
  o.e_first = internal::lay_out(draw, p.tokens, p.hidden, o.e, p.e_dtype, p.e_strides);
  o.c_first = internal::lay_out(draw, vd ? p.vocab : p.hidden, vd ? p.hidden : p.vocab, o.c, p.c_dtype, p.c_strides);
  if (draw.chance(0.5)) internal::poison_uncounted(o);
  out.machine = machine_for(target);
  out.machine.l2_bytes = draw.pick(std::vector<std::size_t>{512 << 10, 32 << 10, 2 << 20});
  out.threads = static_cast<int>(draw.between(1, 3));
  if (draw.chance(0.5)) out.budget_share = static_cast<int>(draw.below(256));
  out.seed = draw.below(1000);

  std::ostringstream text;
  text << "N=" << p.tokens << " V=" << p.vocab << " D=" << p.hidden << " e " << name(p.e_dtype) << " c "
       << name(p.c_dtype) << " " << name(p.head_layout) << " " << name(p.reduction) << " softcap " << softcap_or_zero(p)
       << " scale " << p.logit_scale << " smoothing " << p.label_smoothing << " z_loss " << p.z_loss << " soft "
       << p.soft_targets << " weights " << p.token_weights << p.class_weights << " bias " << p.bias_dtype.has_value()
       << " shift " << p.shift << "/" << p.sequence << " filter " << name(p.filter) << " spread " << spread
       << " offset " << offset << " denominator " << o.denominator.value_or(-1) << " ignore " << p.ignore_index
       << " budget " << out.budget_share;
  out.text = text.str();
  return out;
}

namespace internal {

// The report's bound covers every row of dE, beside rounding. Rows that hold NaN have no error.
inline std::string check_rows(const Problem& p, const Results& got, const reference::Reference& want) {
  for (std::int64_t i = 0; p.want_d_e && i < p.tokens; ++i) {
    double error = 0, rounding = 0;
    for (std::int64_t k = i * p.hidden; k < (i + 1) * p.hidden; ++k) {
      const auto at = static_cast<std::size_t>(k);
      const double gap = got.d_e.get(k) - want.d_e[at];
      error += gap * gap;
      rounding += want.d_e_bound[at] * want.d_e_bound[at];
    }
    // The certificate is of f32; the kept part is rounded to the output's dtype like any gradient, of which the bound
    // on the exact value is a measure: 2^-8 of what was dropped comes on top.
    const double most = got.report.error_bound * (1 + 0x1p-8) + std::sqrt(rounding);
    if (std::sqrt(error) > most) {
      std::ostringstream out;
      out << "row " << i << " of d_e is off by " << std::sqrt(error) << ", more than its certificate " << most;
      return out.str();
    }
  }
  return "";
}

// The entries of row i are off by 2 |A_i| delta_i in all: a column of dC, or dbias, by the sum of that over the rows,
// times their |e|. `filtered` has that sum, times epsilon, in the bound of each entry.
inline std::string check_column(const char* what, const Buffer& got, const std::vector<double>& value,
                                const std::vector<double>& exact, const std::vector<double>& filtered,
                                std::int64_t first, std::int64_t step, std::int64_t vocab, double mass_over_epsilon) {
  double error = 0, rounding = 0, most = 0;
  for (std::int64_t v = 0; v < vocab; ++v) {
    const std::int64_t at = first + v * step;
    const auto k = static_cast<std::size_t>(at);
    error += std::abs(got.get(at) - value[k]);
    rounding += exact[k];
    most = std::max(most, filtered[k] - exact[k]);
  }
  most = most * 2 * mass_over_epsilon + rounding;
  if (!(error > most)) return "";  // nor NaN
  std::ostringstream out;
  out << what << " from " << first << " is off by " << error << " in all, more than the mass dropped explains, "
      << most;
  return out.str();
}

// Beyond each entry's bound: what the certificate says of whole rows of dE, and of what is dropped in all.
inline std::string check_certificate(const Problem& p, const Results& got, const reference::Reference& exact,
                                     const reference::Reference& filtered) {
  std::string failure = check_rows(p, got, exact);
  const double mass = got.report.dropped_mass_max / got.report.epsilon;
  const HeadStrides step = d_c_strides(p);
  for (std::int64_t d = 0; failure.empty() && p.want_d_c && d < p.hidden; ++d) {
    failure = check_column("a column of d_c", got.d_c, exact.d_c, exact.d_c_bound, filtered.d_c_bound, d * step.d,
                           step.v, p.vocab, mass);
  }
  if (!failure.empty() || !p.want_d_bias) return failure;
  return check_column("d_bias", got.d_bias, exact.d_bias, exact.d_bias_bound, filtered.d_bias_bound, 0, 1, p.vocab,
                      mass);
}

}  // namespace internal

// Plans, runs and compares with the oracle in one mode; "" if all is well.
inline std::string check_mode(DrawnCase& test, Mode mode) {
  const Problem& p = test.objective.problem;
  Limits limits{.mode = mode, .budget_bytes = {}, .threads = test.threads};
  Result<Plan> plan = make_plan(p, limits, test.machine);
  if (plan.ok() && test.budget_share >= 0) {
    limits.budget_bytes = plan->workspace_bytes / 256 * static_cast<std::uint64_t>(test.budget_share);
    Result<Plan> smaller = make_plan(p, limits, test.machine);
    if (smaller.ok() && smaller->workspace_bytes > *limits.budget_bytes) return "the plan is over its budget";
    if (smaller.ok() || smaller.status().code() != StatusCode::budget_too_small) plan = std::move(smaller);
  }
  if (!plan.ok()) return "no plan: " + plan.status().message();
  Results before(p), got(p);
  Inputs in = test.objective.inputs();
  in.seed = test.seed;
  const Outputs out = got.outputs();
  // At an odd address, full of NaN, with a guard behind.
  std::vector<std::byte> workspace(plan->workspace_bytes + 65, std::byte{0xFF});
  const Status status = run(plan.value(), in, out, std::span(workspace).subspan(1, plan->workspace_bytes));
  if (!status.ok()) return "run failed: " + status.message();
  if (!got.intact()) return "wrote outside an output";
  for (std::size_t i = plan->workspace_bytes + 1; i < workspace.size(); ++i) {
    if (workspace[i] != std::byte{0xFF}) return "wrote outside the workspace";
  }
  // No plan adds up more in a row than all of a vocabulary or all tokens.
  const double additions = static_cast<double>(p.vocab + p.tokens + 512);
  reference::Options options{additions, before.d_e.or_null(), before.d_c.or_null(), before.d_bias.or_null()};
  options.rounds_twice = got.report.rows_redone > 0;
  options.epsilon = plan->epsilon;
  const auto want = reference::linear_cross_entropy(p, in, options);
  const std::string failure = Difference(p, got, want).find();
  if (!failure.empty() || p.filter != Filter::certified) return failure;
  options.epsilon = 0;
  return internal::check_certificate(p, got, reference::linear_cross_entropy(p, in, options), want);
}

// In every mode that the problem may ask for.
inline std::string check_modes(DrawnCase& test) {
  const Problem& p = test.objective.problem;
  std::vector<Mode> modes = {Mode::automatic};
  if (wants_head(p) && p.filter == Filter::none) modes = {Mode::chunk, Mode::recompute};
  for (const Mode mode : modes) {
    const std::string failure = check_mode(test, mode);
    if (!failure.empty()) return failure + " (mode " + std::string(name(mode)) + ", " + test.text + ")";
  }
  return "";
}

}  // namespace cutloss::testing

#endif  // CUTLOSS_SRC_CPU_OBJECTIVE_DRAW_H_
