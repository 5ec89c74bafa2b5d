#include "src/cli/check_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "src/cli/cli.h"
#include "src/cli/data.h"

namespace cutloss::cli {
namespace {

// Half of the time next to a power of two or three times one, where vectors, register tiles and blocks end.
std::int64_t draw_extent(Random& random, std::int64_t limit) {
  const std::int64_t edge = (random.chance(0.3) ? 3 : 1) << random.between(0, 9);
  const std::int64_t near = edge + random.between(-1, 1);
  const std::int64_t any = random.between(1, limit);
  return std::clamp<std::int64_t>(random.chance(0.6) ? near : any, 1, limit);
}

// Strides and memory of a matrix; elements are written through at().
struct Matrix {
  std::optional<Strides> strides;  // as given to the problem; none: contiguous
  Strides step;
  std::int64_t first = 0;  // element index of [0, 0]
  std::int64_t size = 0;
  std::int64_t at(std::int64_t i, std::int64_t j) const { return first + i * step.axis0 + j * step.axis1; }
};

Matrix draw_matrix(Random& random, std::int64_t rows, std::int64_t columns) {
  const std::int64_t kind = random.below(9), pad = random.between(0, 3);
  Matrix m;
  switch (kind) {
    case 0: m.step = {columns + pad, 1}; break;                                              // padded rows
    case 1: m.step = {1, rows + pad}; break;                                                 // transposed
    case 2: m.step = {2 * columns + pad, 2}; break;                                          // every other column
    case 3: m.step = {-(columns + pad), 1}; break;                                           // rows backwards
    case 4: m.step = {columns + pad, -1}; break;                                             // columns backwards
    case 5: m.step = {random.chance(0.5) ? 0 : columns, random.chance(0.2) ? 0 : 1}; break;  // one row for all
    default: m.step = {columns, 1}; break;
  }
  if (kind < 6) m.strides = m.step;
  // Starting one element in: aligned for its type and for nothing more.
  m.first = random.below(2);
  for (const auto& [extent, step] : {std::pair{rows, m.step.axis0}, std::pair{columns, m.step.axis1}}) {
    const std::int64_t reach = std::max<std::int64_t>(extent - 1, 0) * std::abs(step);
    if (step < 0) m.first += reach;
    m.size += reach;
  }
  m.size += 3;
  return m;
}

// Sets every byte to 0xFF, which is NaN in every float and -1, no label, in integers.
std::vector<std::byte> poisoned(DType dtype, std::int64_t count) {
  return std::vector<std::byte>(static_cast<std::size_t>(count) * size_of(dtype), std::byte{0xFF});
}

void draw_shape(Random& random, const CheckOptions& options, const std::string& target, Problem& p) {
  p.tokens = draw_extent(random, options.max_n);
  p.vocab = draw_extent(random, options.max_v);
  p.hidden = draw_extent(random, options.max_d);
  if (random.chance(0.02)) p.tokens = 0;
  if (random.chance(0.03)) p.vocab = 1;
  // Now and then at the very end of a tile of the plan.
  const bool at_tile_end = random.chance(0.3);
  const std::int64_t off_n = random.between(-1, 1), off_v = random.between(-1, 1), tiles = random.between(1, 3);
  if (at_tile_end) {
    Machine machine;
    machine.target = target;
    const Result<Plan> plan = make_plan(p, {}, machine);
    if (plan.ok()) {
      p.tokens = std::clamp<std::int64_t>(plan->token_block + off_n, 1, options.max_n);
      p.vocab = std::clamp<std::int64_t>(tiles * plan->vocab_tile + off_v, 1, options.max_v);
    }
  }
  p.tokens = options.n.value_or(p.tokens);
  p.vocab = options.v.value_or(p.vocab);
  p.hidden = options.d.value_or(p.hidden);
  if (options.n || options.v || options.d) return;
  while (p.tokens * p.vocab * p.hidden > options.max_work) {
    std::int64_t& largest = p.tokens >= p.vocab && p.tokens >= p.hidden ? p.tokens
                            : p.vocab >= p.hidden                       ? p.vocab
                                                                        : p.hidden;
    largest = (largest + 1) / 2;
  }
}

void draw_objective(Random& random, const CheckOptions& options, Problem& p) {
  p.e_dtype = draw_dtype(random);
  p.c_dtype = draw_dtype(random);
  if (!options.e_dtype.empty()) p.e_dtype = parse_dtype(options.e_dtype);
  if (!options.c_dtype.empty()) p.c_dtype = parse_dtype(options.c_dtype);
  p.label_dtype = random.chance(0.5) ? DType::i32 : DType::i64;
  p.head_layout = random.chance(0.5) ? HeadLayout::vd : HeadLayout::dv;
  if (!options.head_layout.empty()) p.head_layout = parse_layout(options.head_layout);
  p.reduction = random.pick(std::vector{Reduction::mean, Reduction::mean, Reduction::sum, Reduction::none});
  if (!options.reduction.empty()) p.reduction = parse_reduction(options.reduction);
  p.ignore_index = random.pick(std::vector<std::int64_t>{-100, -100, -1, random.below(p.vocab), p.vocab + 7});
  const float softcap = random.pick(std::vector{0.0f, 0.0f, 30.0f, 2.0f});
  if (options.softcap.value_or(softcap) > 0) p.softcap = options.softcap.value_or(softcap);
  p.want_d_e = random.chance(0.75);
  p.want_d_c = random.chance(0.6);
  if (options.mode == "loss") p.want_d_e = p.want_d_c = false;
  if (options.mode == "stream") p.want_d_e = true, p.want_d_c = false;
  if (options.mode == "chunk" || options.mode == "recompute") p.want_d_c = true;
  if (random.chance(0.1)) p.bad_labels = BadLabels::nan;
  if (random.chance(0.2)) p.d_e_dtype = draw_dtype(random);
  if (random.chance(0.2)) p.d_c_dtype = draw_dtype(random);
  draw_terms(random, p);
  draw_filter(random, options.mode, p);
}

// Any sizes that a tuning file may hold, however unwise. The target is filled in by who runs the case.
std::vector<TunedBlocks> draw_tuning(Random& random, const Problem& p) {
  const auto size = [&] { return std::int64_t{1} << random.between(0, 11) | random.below(64); };
  std::vector<TunedBlocks> entries;
  for (const Mode mode : {Mode::loss, Mode::stream, Mode::chunk, Mode::recompute}) {
    entries.push_back({"", mode, p.hidden, p.c_dtype, p.head_layout, {size(), size(), size(), size(), size()}});
  }
  return entries;
}

}  // namespace

CheckCase make_case(const CheckOptions& options, std::uint64_t seed, const std::string& target) {
  Random random(seed * 0x2545F4914F6CDD1Du + 1);
  CheckCase out;
  Problem& p = out.problem;
  draw_shape(random, options, target, p);
  draw_objective(random, options, p);
  out.machine.l1_bytes = random.pick(std::vector<std::size_t>{16 << 10, 32 << 10, 48 << 10});
  out.machine.l2_bytes = random.pick(std::vector<std::size_t>{32 << 10, 512 << 10, 2 << 20});
  if (random.chance(0.4)) out.budget_share = random.uniform();
  if (random.chance(0.3)) out.machine.tuning = draw_tuning(random, p);

  const bool vd = p.head_layout == HeadLayout::vd;
  const Matrix e = draw_matrix(random, p.tokens, p.hidden);
  const Matrix c = draw_matrix(random, vd ? p.vocab : p.hidden, vd ? p.hidden : p.vocab);
  p.e_strides = e.strides;
  p.c_strides = c.strides;
  out.e_memory = poisoned(p.e_dtype, e.size);
  out.c_memory = poisoned(p.c_dtype, c.size);
  const auto head_at = [&](std::int64_t j, std::int64_t k) { return vd ? c.at(j, k) : c.at(k, j); };

  // Standard deviation of a logit; 300 is past where exp() of it overflows.
  const float spread = random.pick(std::vector{0.1f, 1.0f, 1.0f, 4.0f, 20.0f, 300.0f});
  const bool confident = random.chance(0.2);
  out.values = fmt::format("logits of deviation {:g}{}", spread, confident ? ", some rows sure of their label" : "");
  for (std::int64_t j = 0; j < p.vocab; ++j) {
    for (std::int64_t k = 0; k < p.hidden; ++k) store(p.c_dtype, out.c_memory.data(), head_at(j, k), random.normal());
  }

  out.terms = fill_terms(random, p);
  p.label_stride = random.pick(std::vector<std::int64_t>{1, 1, 2, -1});
  const std::int64_t last = std::max<std::int64_t>(p.tokens - 1, 0) * std::abs(p.label_stride);
  const std::int64_t first_label = p.label_stride < 0 ? last : 0;
  out.label_memory = poisoned(p.label_dtype, last + 1);
  const double ignored_share = random.pick(std::vector{0.0, 0.0, 0.3, 0.9, 1.0});
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    std::int64_t label = random.below(p.vocab);
    if (random.chance(ignored_share)) label = p.ignore_index;
    if (random.chance(0.05) && p.bad_labels == BadLabels::nan) label = p.vocab;
    labels.push_back(label);
    const std::int64_t at = first_label + i * p.label_stride;
    if (p.label_dtype == DType::i32) {
      reinterpret_cast<std::int32_t*>(out.label_memory.data())[at] = static_cast<std::int32_t>(label);
    } else {
      reinterpret_cast<std::int64_t*>(out.label_memory.data())[at] = label;
    }
  }
  const std::vector<bool> unread = unread_rows(p, labels, out.terms);
  const float scale = spread / std::sqrt(static_cast<float>(p.hidden));
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const std::int64_t label = labels[static_cast<std::size_t>(i)];
    const bool sure = confident && random.chance(0.5) && label >= 0 && label < p.vocab;
    for (std::int64_t k = 0; k < p.hidden; ++k) {
      float value = scale * random.normal();
      if (sure) value = 40.0f / static_cast<float>(p.hidden) * load(p.c_dtype, out.c_memory.data(), head_at(label, k));
      store(p.e_dtype, out.e_memory.data(), e.at(i, k), value);
      // Where all rows are one, it must stay finite.
      if (!unread[static_cast<std::size_t>(i)] || e.step.axis0 == 0) continue;
      std::memset(out.e_memory.data() + static_cast<std::size_t>(e.at(i, k)) * size_of(p.e_dtype), 0xFF,
                  size_of(p.e_dtype));
    }
  }
  if (random.chance(0.5)) {
    out.cotangents.resize(p.reduction == Reduction::none ? static_cast<std::size_t>(p.tokens) : 1);
    for (float& value : out.cotangents) value = 2 * random.normal();
  }
  out.inputs = {
      .e = out.e_memory.data() + static_cast<std::size_t>(e.first) * size_of(p.e_dtype),
      .c = out.c_memory.data() + static_cast<std::size_t>(c.first) * size_of(p.c_dtype),
      .labels = out.label_memory.data() + static_cast<std::size_t>(first_label) * size_of(p.label_dtype),
      .cotangent = out.cotangents.empty() ? nullptr : out.cotangents.data(),
  };
  out.terms.put_into(p, out.inputs);
  out.inputs.seed = static_cast<std::uint64_t>(random.below(1000));
  return out;
}

std::vector<Mode> CheckCase::modes() const {
  const bool filtered = problem.filter != Filter::none && (problem.want_d_e || problem.want_d_c);
  if (filtered) return {problem.filter == Filter::tile ? Mode::recompute : Mode::sparse};
  if (problem.want_d_c) return {Mode::chunk, Mode::recompute};
  if (problem.want_d_e) return {Mode::stream};
  return {Mode::loss};
}

std::string CheckCase::text() const {
  const Problem& p = problem;
  const auto strides = [](const std::optional<Strides>& s) {
    return s ? fmt::format("({}, {})", s->axis0, s->axis1) : std::string("contiguous");
  };
  std::string out = fmt::format(
      "N={} V={} D={} e={} {} c={} {} {} labels={} stride {} reduction={} ignore_index={} softcap={} dE={} dC={}, {}",
      p.tokens, p.vocab, p.hidden, name(p.e_dtype), strides(p.e_strides), name(p.c_dtype), strides(p.c_strides),
      name(p.head_layout), name(p.label_dtype), p.label_stride, name(p.reduction), p.ignore_index,
      p.softcap ? fmt::format("{:g}", *p.softcap) : "none", p.want_d_e ? name(p.d_e_dtype.value_or(p.e_dtype)) : "no",
      p.want_d_c ? name(p.d_c_dtype.value_or(p.c_dtype)) : "no", values);
  if (p.bad_labels == BadLabels::nan) out += ", labels outside the vocabulary";
  if (const std::string more = terms_text(p); !more.empty()) out += "," + more;
  if (!cotangents.empty()) out += ", upstream gradient";
  if (budget_share) out += fmt::format(", budget {:.0f} % of the workspace it would like", 100 * *budget_share);
  return out;
}

}  // namespace cutloss::cli
