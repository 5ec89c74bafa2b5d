#include "src/plan/cost.h"

#include <algorithm>
#include <cmath>

#include "src/plan/arith.h"
#include "src/plan/workspace.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

// What our kernels take beside multiply-adds at the peak, in FLOP at that peak. Fitted to whole runs in f32 on two
// cores of a Zen 3 (AVX2): docs/cost-model.md has the runs, and how far the model is from each.
constexpr double kLoopShare = 0.71;  // of the peak that the products of the loss pass reach ...
constexpr double kHeadShare = 0.68;  // ... the product for dC ...
constexpr double kAgainShare =
    0.45;                            // ... and the logits formed again beside it: their tokens come from the last cache
constexpr double kLogitWork = 100;   // a logit: maximum, exp and sum, or dz; as much again (an estimate) for a softcap
constexpr double kSelectWork = 150;  // a logit under a filter: chosen or not, mass below epsilon
constexpr double kHiddenEntry = 25;  // an element of a kept row that is added to dE ...
constexpr double kHeadEntry = 12;    // ... or to dC
constexpr double kScatterWork = 250;  // an element of dC in mode sparse, once a group
constexpr double kCycleWork = 2;      // times W, a cycle: an element that is packed, or of dC that is added to
constexpr double kStepWork = 8;       // an element of dC, once a step of head_tokens
constexpr double kFlatShare = 0.03;   // of the loss pass that a flat row has seen when it is left to the exact mode

constexpr double kF32 = 4;
constexpr double kInPlace = 2;  // read and written back

double number(std::int64_t value) { return static_cast<double>(value); }
double size(DType dtype) { return static_cast<double>(size_of(dtype)); }

bool drops_entries(const Problem& p) { return p.filter == Filter::certified || p.filter == Filter::unbiased; }
// The loss pass itself finishes flat rows of a frozen head. With a tolerance most that are redone are those over it.
bool finishes_flat_rows(const Problem& p) { return drops_entries(p) && !wants_head(p) && !p.tolerance; }

// The second accumulator that smoothing needs under a softcap is one more product over the vocabulary.
double hidden_products(const Problem& p) {
  if (!p.want_d_e) return 0;
  return p.softcap && p.label_smoothing > 0 ? 2 : 1;
}

double mean_products(const Problem& p) { return p.metrics.mean_logits && p.softcap ? 1 : 0; }

class Model {
 public:
  Model(const Problem& p, const Schedule& schedule, const Speeds& speeds, const Kept& kept)
      : p_(p), s_(schedule), speeds_(speeds), kept_(kept) {
    const bool half = size_of(p.e_dtype) == 2 && size_of(p.c_dtype) == 2;
    if (speeds.kernels) writes_ = 2;
    peak_ = half ? speeds.bf16_flops : speeds.f32_flops;
  }

  Cost cost() {
    if (s_.mode == Mode::sparse) summary();
    loss_pass();
    if (s_.mode == Mode::sparse) {
      entries();
    } else if (p_.filter == Filter::tile && p_.want_d_e) {
      tile_filter();
    }
    if (wants_head(p_) && s_.mode != Mode::sparse) head_pass();
    return cost_;
  }

  Cost dense() {
    products("logits", 1, writes_ * logits_bytes() + table_bytes() + hidden_bytes(), 0);
    stage("softmax", 0, logit_work(), (1 + writes_) * logits_bytes());
    if (!wants_gradient(p_)) return cost_;
    stage("dz", 0, logit_work(), (1 + writes_) * logits_bytes());
    if (p_.want_d_e) products("dE", 1, logits_bytes() + table_bytes() + d_e_bytes(), 0);
    if (p_.want_d_c) products("dC", 1, logits_bytes() + hidden_bytes() + d_c_bytes(), 0, 0, kHeadShare);
    return cost_;
  }

 private:
  double unit() const { return 2 * number(p_.tokens) * number(p_.vocab) * number(p_.hidden); }
  double logits() const { return number(p_.tokens) * number(p_.vocab); }
  double table() const { return number(p_.vocab) * number(p_.hidden); }
  double hidden() const { return number(p_.tokens) * number(p_.hidden); }
  double logits_bytes() const { return kF32 * logits(); }
  double table_bytes() const { return size(p_.c_dtype) * table(); }
  double hidden_bytes() const { return size(p_.e_dtype) * hidden(); }
  double d_e_bytes() const { return writes_ * size(d_e_dtype(p_)) * hidden(); }
  double d_c_bytes() const { return writes_ * size(d_c_dtype(p_)) * table(); }
  // How often the table is gone through. Not rounded up: the last block is made even with the others.
  double blocks() const {
    const double block = std::min(number(s_.token_block), std::max(number(s_.at_once), 1.0));
    return number(p_.tokens) / block;
  }
  double chunks() const { return std::max(1.0, number(p_.tokens) / std::max(number(s_.at_once), 1.0)); }
  double logit_work() const { return logits() * kLogitWork * (p_.softcap ? 2 : 1); }
  // What something read `times` times brings out of memory.
  double read(double bytes, double times) const { return bytes > speeds_.cache_bytes ? bytes * times : bytes; }

  // `work`: arithmetic beside the products, in FLOP at the peak.
  void stage(std::string_view name, double flops, double work, double bytes, double speed = 0,
             double reached = kLoopShare) {
    const double share = speed > 0 && speeds_.kernels ? speed / speeds_.threads : 1;
    const double effort = speeds_.kernels ? flops / reached + work : flops;
    cost_.list[cost_.size++] = {name, flops, bytes, effort / (peak_ * share), bytes / (speeds_.bandwidth * share)};
  }
  void products(std::string_view name, double units, double bytes, double work, double speed = 0,
                double reached = kLoopShare) {
    stage(name, units * unit(), work, bytes, speed, reached);
  }
  // Rows into the kernels' layout. Elsewhere tiles are read as they lie, while products run: the caller has the bytes.
  void pack(double elements, double bytes, double speed) {
    stage("packing", 0, elements * kCycleWork * number(s_.panel), bytes, speed);
  }

  void loss_pass() {
    const double readings = read(table_bytes(), blocks());
    const double kept_logits = s_.mode == Mode::chunk ? writes_ * held_bytes() : 0;
    const double hidden_products = streams_d_e(p_) && s_.mode != Mode::sparse ? cutloss::hidden_products(p_) : 0;
    // Where an epsilon alone was given only flat rows are redone, and that shows early.
    const double flat = s_.mode == Mode::sparse && !p_.tolerance ? kept_.redone * (1 - kFlatShare) : 0;
    const double left = finishes_flat_rows(p_) ? 0 : flat;
    const double select = s_.mode == Mode::sparse ? (1 - flat) * logits() * kSelectWork : 0;
    const double rest = hidden_bytes() + (p_.want_d_e ? d_e_bytes() : 0);
    if (speeds_.kernels) pack(blocks() * table(), readings, s_.loss_speed);
    const double tiles = speeds_.kernels ? 0 : readings;
    products("logits", 1 - left + mean_products(p_), tiles + kept_logits + rest, (1 - left) * logit_work() + select,
             s_.loss_speed);
    if (finishes_flat_rows(p_) && flat > 0) products("dE", flat, 0, 0, s_.loss_speed);
    if (hidden_products > 0) products("dE", hidden_products, 0, 0, s_.loss_speed);
  }

  // Mode chunk: the size of all logits, unless a chunk's stay in the cache.
  double held_bytes() const {
    const double held = kF32 * number(s_.at_once) * number(p_.vocab);
    return held > speeds_.cache_bytes ? logits_bytes() : 0;
  }

  // Filter "tile": the logits once more, since it needs the lse, and the product of the tiles that it keeps.
  void tile_filter() {
    if (speeds_.kernels) pack(blocks() * table(), read(table_bytes(), blocks()), s_.loss_speed);
    products("logits again", 1, speeds_.kernels ? 0 : read(table_bytes(), blocks()), logit_work(), s_.loss_speed);
    products("dE", kept_.share * cutloss::hidden_products(p_), 0, 0, s_.loss_speed);
  }

  void head_pass() {
    const double speed = s_.head_speed;
    const double again = read(hidden_bytes(), number(p_.vocab) / std::max(number(s_.head_rows), 1.0));
    double logits_bytes = 0;
    if (s_.mode == Mode::recompute) {
      const double tasks = number(p_.vocab) / std::max(number(s_.head_rows), 1.0);
      if (speeds_.kernels) pack(table() + 2 * hidden() * tasks, table_bytes() + again, speed);
      products("logits again", 1, speeds_.kernels ? 0 : table_bytes() + again, 0, speed, kAgainShare);
    } else {
      // Read, turned into dz in place, and written back.
      logits_bytes = kInPlace * held_bytes();
    }
    const double units = p_.want_d_c ? (p_.filter == Filter::tile ? kept_.share : 1) : 0;
    products("dC", units, logits_bytes, logit_work(), speed, kHeadShare);
    sums(chunks(), kStepWork * number(p_.tokens) / std::max(number(s_.head_tokens), 1.0), speed);
  }

  // dC in memory, once for every chunk or group; `each`: what else an element of it takes.
  void sums(double times, double each, double speed) {
    if (!p_.want_d_c) return;
    const double exchanged = times > 1 ? kInPlace * kF32 * table() * (p_.compensated ? 2 : 1) : d_c_bytes();
    const double work = table() * (times * kCycleWork * number(s_.panel) + each);
    stage("dC sums", 0, work, read(exchanged, times), speed);
  }

  // Centers and radii of the table's blocks.
  void summary() { stage("summary", 0, 0, table_bytes(), s_.loss_speed); }

  void entries() {
    const double kept = kept_.share * (1 - kept_.redone) * logits();
    const double elements = kept * number(p_.hidden);
    // A CPU has the rows of the table at hand as their tile passes by; the hidden states of all tokens may be too many.
    const double gathered = speeds_.kernels ? 0 : elements * size(p_.c_dtype);
    if (p_.want_d_e) gather("dE entries", elements, kHiddenEntry, gathered, s_.loss_speed);
    if (!wants_head(p_)) return;
    const double rows = kF32 * hidden();
    const double fetched = rows > speeds_.cache_bytes ? kF32 * elements : rows;
    if (p_.want_d_c) gather("dC entries", elements, kHeadEntry, fetched, s_.head_speed);
    sums(number(s_.groups), number(s_.groups) * kScatterWork, s_.head_speed);
  }

  // `work` for each element of a row that is kept, products included.
  void gather(std::string_view name, double elements, double work, double bytes, double speed) {
    stage(name, 2 * elements, (work - 2 / kLoopShare) * elements, bytes, speed);
  }

  const Problem& p_;
  const Schedule& s_;
  const Speeds& speeds_;
  const Kept& kept_;
  double peak_;
  double writes_ = 1;  // a CPU reads a line before it is written
  Cost cost_;
};

void append(const Cost& more, Cost& cost) {
  Stage all{"rows redone"};
  for (const Stage& stage : more.stages()) {
    all.flops += stage.flops;
    all.bytes += stage.bytes;
    (stage.memory_seconds > stage.compute_seconds ? all.memory_seconds : all.compute_seconds) += stage.seconds();
  }
  // Its stages do not overlap: what each of them waits for decides which sum the whole goes to.
  const double seconds = all.memory_seconds + all.compute_seconds;
  (all.memory_seconds > all.compute_seconds ? all.memory_seconds : all.compute_seconds) = seconds;
  cost.list[cost.size++] = all;
}

bool leaves_rows(const Problem& p, const Kept& kept) { return kept.redone > 0 && !finishes_flat_rows(p); }

// The rows that mode sparse leaves, as a problem of their own.
Problem redone_rows(const Problem& p, const Kept& kept) {
  Problem rest = p;
  rest.filter = Filter::none;
  rest.tokens = std::llround(kept.redone * number(p.tokens));
  return rest;
}

template <typename Value>
double sum_of(const Cost& cost, const Value& value) {
  double sum = 0;
  for (const Stage& stage : cost.stages()) sum += value(stage);
  return sum;
}

}  // namespace

double Cost::flops() const {
  return sum_of(*this, [](const Stage& s) { return s.flops; });
}
double Cost::bytes() const {
  return sum_of(*this, [](const Stage& s) { return s.bytes; });
}
double Cost::seconds() const {
  return sum_of(*this, [](const Stage& s) { return s.seconds(); });
}
bool Cost::memory_bound() const {
  return 2 * sum_of(*this, [](const Stage& s) { return s.memory_seconds > s.compute_seconds ? s.seconds() : 0; }) >
         seconds();
}

std::vector<Mode> legal_modes(const Problem& p) {
  if (wants_gradient(p) && drops_entries(p)) return {Mode::sparse};
  if (wants_gradient(p) && p.filter == Filter::tile) return {Mode::recompute};
  if (wants_head(p)) return {Mode::chunk, Mode::recompute};
  return {p.want_d_e ? Mode::stream : Mode::loss};
}

double units_of(const Problem& p, Mode mode) {
  const double head = p.want_d_c ? 1 : 0;  // dbias alone is a matrix-vector product
  // Filter "tile" forms the logits once more for dE; what it will drop is not known.
  const double hidden = p.want_d_e && p.filter == Filter::tile ? 1 + hidden_products(p) : hidden_products(p);
  switch (mode) {
    case Mode::loss:
    case Mode::stream: return 1 + hidden + mean_products(p);
    case Mode::chunk: return 1 + hidden + head + mean_products(p);
    case Mode::recompute: return (wants_head(p) ? 2 : 1) + hidden + head + mean_products(p);
    case Mode::sparse: return 1 + mean_products(p);  // and what is kept
    case Mode::automatic: break;
  }
  return 0;
}

Schedule schedule_of(const Plan& plan) {
  const Problem& p = plan.problem;
  const Geometry g = geometry_of(plan);
  Schedule s;
  s.mode = plan.mode;
  s.at_once = plan.mode == Mode::chunk ? std::min(plan.chunk_tokens, p.tokens) : p.tokens;
  s.token_block = plan.token_block;
  s.panel = g.panel;
  s.head_rows = plan.head_tiles * g.tile_rows;
  s.head_tokens = plan.head_tokens;
  if (plan.group_tokens > 0) s.groups = std::max<std::int64_t>(1, ceil_div(p.tokens, plan.group_tokens));
  // Tasks of one size: the last round may leave threads idle.
  const std::int64_t tasks = std::max<std::int64_t>(1, ceil_div(s.at_once, plan.token_block) * plan.vocab_slices);
  s.loss_speed = number(tasks) / number(ceil_div(tasks, plan.threads));
  if (wants_head(p)) s.head_speed = number(std::min<std::int64_t>(ceil_div(g.tiles, plan.head_tiles), plan.threads));
  return s;
}

// A block's hidden states and f32 accumulators take half of the memory on the chip; tiles of the table need the rest. A
// chunk's logits are 1 GiB at most, as on a CPU.
Schedule schedule_on(const Problem& p, Mode mode, const Speeds& speeds) {
  Schedule s;
  s.mode = mode;
  const double row = number(p.hidden) * (size(p.e_dtype) + kF32);
  const std::int64_t tokens = std::max<std::int64_t>(p.tokens, 1);
  s.token_block = std::clamp<std::int64_t>(std::llround(speeds.cache_bytes / 2 / row), 1, tokens);
  s.at_once = mode == Mode::chunk ? std::clamp<std::int64_t>((std::int64_t{1} << 28) / p.vocab, 1, tokens) : tokens;
  s.head_rows = s.token_block;
  s.head_tokens = tokens;
  return s;
}

Cost predict(const Problem& problem, const Schedule& schedule, const Speeds& speeds, const Kept& kept) {
  return Model(problem, schedule, speeds, kept).cost();
}

Cost predict(const Plan& plan, const Speeds& speeds, const Kept& kept) {
  Cost cost = predict(plan.problem, schedule_of(plan), speeds, kept);
  if (plan.exact && leaves_rows(plan.problem, kept)) {
    const Problem rest = redone_rows(plan.problem, kept);
    Schedule schedule = schedule_of(*plan.exact);
    schedule.at_once = std::min(schedule.at_once, rest.tokens);
    append(predict(rest, schedule, speeds), cost);
  }
  return cost;
}

Cost predict_on(const Problem& problem, Mode mode, const Speeds& speeds, const Kept& kept) {
  Cost cost = predict(problem, schedule_on(problem, mode, speeds), speeds, kept);
  if (mode == Mode::sparse && leaves_rows(problem, kept)) {
    const Problem rest = redone_rows(problem, kept);
    append(predict_on(rest, legal_modes(rest).front(), speeds), cost);
  }
  return cost;
}

Cost predict_dense(const Problem& problem, const Speeds& speeds) {
  const Schedule schedule = schedule_on(problem, Mode::automatic, speeds);
  return Model(problem, schedule, speeds, Kept{}).dense();
}

// 3 GHz with two multiply-adds a cycle, and 16 GB/s: between what a core of a full server and a desktop's gets.
Speeds nominal_core(std::int64_t panel, double cache_bytes) {
  const double flops = 3e9 * kCycleWork * number(panel);
  return {"", "", true, 1, flops, flops, 16e9, cache_bytes};
}

double filtered_time(double again, double unfiltered, double share) { return again + share * (unfiltered - again); }

Result<double> inferred_share(double again, double unfiltered, double filtered) {
  if (!(again > 0) || !(unfiltered > again) || !std::isfinite(unfiltered)) {
    return invalid("the unfiltered time is ", unfiltered, " and forming the logits takes ", again,
                   "; they must be positive, and the first the larger");
  }
  if (!(filtered >= again && filtered <= unfiltered)) {
    return invalid("the filtered time is ", filtered, "; it must lie between forming the logits again (", again,
                   ") and the unfiltered time (", unfiltered, ")");
  }
  return (filtered - again) / (unfiltered - again);
}

}  // namespace cutloss
