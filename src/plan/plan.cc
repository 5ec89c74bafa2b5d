// The planner: from a problem, limits and a machine to a mode, tile sizes and a workspace. A pure function.
//
// It lists the candidates of every legal mode (threads x block sizes), asks map_workspace() what each needs, drops what
// is over budget, and takes the one with the lowest time by the model in cost.h. A
// larger budget only adds candidates, so it never makes the predicted time worse.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "src/cpu/float_env.h"
#include "src/cpu/kernels.h"
#include "src/plan/arith.h"
#include "src/plan/cost.h"
#include "src/plan/tuning.h"
#include "src/plan/workspace.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

// Without a budget, mode chunk may take Machine::spare_bytes, at most 512 MiB: chunks of 512 and more tokens were
// within 4 % of the fastest. No tuning table makes a workspace larger than this by itself.
constexpr std::uint64_t kMaxTunedBytes = std::uint64_t{512} << 20;
constexpr std::int64_t kMaxChunkTokens = 2048;                  // more only costs memory, whatever the budget
constexpr std::int64_t kMaxChunkBytes = std::int64_t{1} << 30;  // of logits, likewise
constexpr std::int64_t kSlicedTokens = 1024;                    // fewer tokens than this are also divided by vocabulary
constexpr std::int64_t kMaxSlices = 16;
// Mode sparse: kept entries of the rows at hand, or the logits of the exact chunk behind it. A filter that keeps little
// asks for less, but chunks of 48 tokens in place of 96 add to dC of a flat softmax twice as often: +15 % at V =
// 262144.
constexpr std::uint64_t kMaxEntryBytes = std::uint64_t{108} << 20;
constexpr std::uint64_t kMinEntryBytes = std::uint64_t{16} << 10;
constexpr std::int64_t kSparseTokenBlock = 512;  // entries add to accumulator rows: 1.3 MB of them at D = 640
constexpr std::int64_t kMaxTokenBlock = 1024;    // E panels and accumulators of a block stay in L3
constexpr std::int64_t kMinTileGroups = 8;       // below, loading and storing accumulators shows
constexpr std::int64_t kHeadTokens = 512;        // gradient tiles of one step stay in L2
constexpr std::int64_t kHeadRows = 768;          // vocabulary rows over which packing the tokens again is spread
constexpr Blocks kDefaultBlocks = {kMaxTokenBlock, 0 /* by the caches */, kMaxChunkTokens, kHeadTokens, kHeadRows};
constexpr double kFlopsPerThread = 8e6;  // a thread takes 20 us to start, about 2 MFLOP of work

std::int64_t vocab_tile(const Problem& p, const cpu::Kernels& kernels, const Machine& machine,
                        const Blocks& most = kDefaultBlocks) {
  const std::int64_t most_rows = kMaxTileRows / kernels.rows * kernels.rows;
  if (most.vocab_tile > 0) return std::min(round_up(std::min(most.vocab_tile, p.vocab), kernels.rows), most_rows);
  const std::int64_t row_bytes = round_up(p.hidden + (p.bias_dtype ? 1 : 0), kernels.rows) * 4;
  std::int64_t rows = static_cast<std::int64_t>(machine.l2_bytes / 2) / row_bytes / kernels.rows * kernels.rows;
  rows = std::clamp(rows, kMinTileGroups * kernels.rows, most_rows);
  return std::min(rows, round_up(p.vocab, kernels.rows));
}

std::vector<std::int64_t> halvings(std::int64_t from, std::int64_t step) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = round_up(from, step);; size = round_up(size / 2, step)) {
    sizes.push_back(size);
    if (size == step) return sizes;
  }
}

// One mode with its block sizes still open.
struct Shape {
  std::int64_t token_block;
  std::int64_t chunk_tokens;
  int threads;
};

// Whether dC is summed apart from the outputs: several parts of the rows add to it, and the outputs are not f32 or
// rounding errors are kept.
bool needs_head_sum(const Problem& p, bool in_parts) {
  if (!in_parts) return false;
  const bool rounds = (p.want_d_c && d_c_dtype(p) != DType::f32) || (p.want_d_bias && *p.bias_dtype != DType::f32);
  return rounds || p.compensated;
}

Plan fill(const Problem& p, Mode mode, const cpu::Kernels& kernels, std::int64_t tile, const Shape& shape,
          bool smallest, const Blocks& most = kDefaultBlocks) {
  Plan plan;
  plan.problem = p;
  plan.mode = mode;
  plan.target = kernels.name;
  plan.threads = shape.threads;
  plan.token_block = shape.token_block;
  plan.vocab_tile = tile;
  plan.chunk_tokens = shape.chunk_tokens;
  const std::int64_t tiles = ceil_div(p.vocab, tile);
  const std::int64_t at_once = mode == Mode::chunk ? shape.chunk_tokens : p.tokens;
  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(at_once, shape.token_block));
  // Few tokens do not make a block for every thread: tasks are then parts of the vocabulary too. How many follows from
  // the problem and not from the threads, so that the bits of the result do not either.
  if (!smallest && p.filter != Filter::tile) {
    plan.vocab_slices = std::clamp<std::int64_t>(kSlicedTokens / std::max<std::int64_t>(1, std::min(at_once, p.tokens)),
                                                 1, std::min(kMaxSlices, std::max<std::int64_t>(1, tiles / 8)));
  }
  if (wants_head(p)) {
    const std::int64_t tokens = round_up(std::max<std::int64_t>(at_once, 1), kernels.panel);
    plan.head_tokens = smallest ? kernels.panel : std::min(round_up(most.head_tokens, kernels.panel), tokens);
    plan.head_tiles = 1;
    if (mode == Mode::recompute && !smallest) {
      plan.head_tiles = std::clamp<std::int64_t>(tiles / (std::int64_t{4} * shape.threads), 1,
                                                 std::max<std::int64_t>(1, most.head_rows / tile));
    }
  }
  if (p.filter == Filter::tile && mode == Mode::recompute) plan.epsilon = *p.epsilon;
  plan.head_sum = needs_head_sum(p, mode == Mode::chunk && shape.chunk_tokens < p.tokens);
  const std::int64_t loss_tasks = blocks * plan.vocab_slices;
  const std::int64_t head_tasks = wants_head(p) ? ceil_div(tiles, plan.head_tiles) : 0;
  plan.threads = static_cast<int>(std::min<std::int64_t>(plan.threads, std::max(loss_tasks, head_tasks)));
  plan.units = units_of(p, mode);
  plan.flops =
      plan.units * 2 * static_cast<double>(p.tokens) * static_cast<double>(p.vocab) * static_cast<double>(p.hidden);
  plan.workspace_bytes = map_workspace(plan, nullptr).bytes;
  return plan;
}

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

struct Choice {
  std::optional<Plan> best;
  double best_time = std::numeric_limits<double>::infinity();
  std::uint64_t smallest = std::numeric_limits<std::uint64_t>::max();  // bytes of the mode's smallest plan
};

// given: the budget is one, and not the default limit, under which plans of any number of threads have the same chunks.
Choice choose(const Problem& p, Mode mode, const cpu::Kernels& kernels, const Machine& machine, int threads,
              std::uint64_t budget, bool given) {
  Choice choice;
  const TunedBlocks* const tuned = find_tuned(machine.tuning, p, mode, kernels.name);
  const Speeds core = nominal_core(kernels.panel, static_cast<double>(machine.l3_bytes));
  // False if the plan is over `limit`.
  const auto consider = [&](std::int64_t tile, const Shape& shape, bool smallest, std::uint64_t limit,
                            const Blocks& most) {
    Plan plan = fill(p, mode, kernels, tile, shape, smallest, most);
    plan.tuned = tuned != nullptr && &most == &tuned->blocks;
    choice.smallest = std::min(choice.smallest, plan.workspace_bytes);
    if (plan.workspace_bytes > limit) return false;
    const double time = predict(plan, core).seconds();
    if (time < choice.best_time) {
      choice.best_time = time;
      choice.best = std::move(plan);
    }
    return true;
  };

  const std::int64_t w = kernels.panel;
  const Blocks& most = tuned != nullptr ? tuned->blocks : kDefaultBlocks;
  const std::int64_t tile = vocab_tile(p, kernels, machine);
  const std::int64_t tuned_tile = vocab_tile(p, kernels, machine, most);
  const std::uint64_t tuned_limit = budget == kUnlimited ? kMaxTunedBytes : budget;
  const std::int64_t tokens = std::max<std::int64_t>(p.tokens, 1);
  const auto try_chunk = [&](std::int64_t chunk) {
    if (chunk > w && chunk * p.vocab * 4 > kMaxChunkBytes) return;
    const std::int64_t at_once = mode == Mode::chunk ? std::min(chunk, tokens) : tokens;
    for (int t = threads; t >= 1; t = t > 8 ? t / 2 : t - 1) {
      // The largest block that gives every thread the same number of blocks.
      const std::int64_t even = ceil_div(at_once, round_up(ceil_div(at_once, most.token_block), t));
      for (const std::int64_t block : halvings(std::max(even, std::min(at_once, 8 * w)), w)) {
        const Shape shape{block, chunk, t};
        if (tuned != nullptr && consider(tuned_tile, shape, false, tuned_limit, most)) continue;
        consider(tile, shape, false, budget, kDefaultBlocks);
      }
    }
    consider(kernels.rows, {w, chunk, 1}, true, budget, kDefaultBlocks);
  };
  if (mode != Mode::chunk) {
    try_chunk(0);
    return choice;
  }
  for (const std::int64_t chunk : halvings(std::min(tokens, most.chunk_tokens), w)) {
    // Three quarters of the larger one, which may not have fitted: up to 4 % of the time.
    const std::int64_t between = round_up(chunk / 2 * 3, w);
    if (given && chunk >= 2 * w && between < std::min(tokens, most.chunk_tokens)) try_chunk(between);
    try_chunk(chunk);
  }
  return choice;
}

// Sound is any epsilon: the certificate decides, and rows over the tolerance are redone. On a Gemma 3 270M head with
// English text the worst of 1024 rows dropped 1.3e-2 of its mass at 2^-20 and 1.6e-3 at 2^-24: a power of 4/3 between
// them. tolerance / V can drop no more than the tolerance.
float epsilon_of(const Problem& p) {
  if (p.epsilon) return *p.epsilon;
  const double t = *p.tolerance;
  if (p.filter == Filter::unbiased) return static_cast<float>(t * t);  // sqrt(epsilon delta) <= tolerance as delta <= 1
  const double typical = 0x1p-20 * std::pow(t / 1.3e-2, 4.0 / 3.0);
  return static_cast<float>(std::clamp(typical, t / static_cast<double>(p.vocab), 0x1p-8));
}

// Mode sparse with room for `region` bytes of entries, and the exact plan behind it; none if that fits no budget.
std::optional<Plan> fill_sparse(const Problem& p, const cpu::Kernels& kernels, const Machine& machine,
                                const Shape& shape, std::uint64_t region, std::uint64_t budget, bool smallest);

Choice choose_sparse(const Problem& p, const cpu::Kernels& kernels, const Machine& machine, int threads,
                     std::uint64_t budget) {
  Choice choice;
  const std::int64_t w = kernels.panel;
  const std::int64_t tokens = std::max<std::int64_t>(p.tokens, 1);
  const auto consider = [&](const Shape& shape, std::uint64_t region, bool smallest) {
    std::optional<Plan> plan = fill_sparse(p, kernels, machine, shape, region, budget, smallest);
    if (!plan) return false;
    choice.smallest = std::min(choice.smallest, plan->workspace_bytes);
    if (plan->workspace_bytes > budget) return false;
    choice.best_time = 1;
    choice.best = std::move(plan);
    return true;
  };
  for (std::uint64_t region = kMaxEntryBytes; region >= kMinEntryBytes; region /= 2) {
    for (int t = threads; t >= 1; t = t > 8 ? t / 2 : t - 1) {
      const std::int64_t even = ceil_div(tokens, round_up(ceil_div(tokens, kSparseTokenBlock), t));
      for (const std::int64_t block : halvings(even, w)) {
        if (consider({block, 0, t}, region, false)) return choice;
      }
    }
    if (consider({w, 0, 1}, region, true)) return choice;
    if (!wants_head(p)) break;
  }
  return choice;
}

std::optional<Plan> fill_sparse(const Problem& p, const cpu::Kernels& kernels, const Machine& machine,
                                const Shape& shape, std::uint64_t region, std::uint64_t budget, bool smallest) {
  const std::int64_t w = kernels.panel;
  Plan plan =
      fill(p, Mode::sparse, kernels, smallest ? kernels.rows : vocab_tile(p, kernels, machine), shape, smallest);
  plan.epsilon = epsilon_of(p);
  const std::int64_t tokens = round_up(std::max<std::int64_t>(p.tokens, 1), w);
  // Each slice has its share of the room. Small ones may keep all: there is not much to save. With a frozen head
  // entries need no room, but more than a twelfth costs as much as the product over all of them.
  const std::int64_t slice = ceil_div(p.vocab, plan.vocab_slices);
  std::int64_t row_entries = std::max(slice / (wants_head(p) ? 15 : 12), std::min<std::int64_t>(slice, 1024));
  // Unbiased keeps at most 1 / epsilon entries of a row on average, and a tenth of that of a real head's.
  if (p.filter == Filter::unbiased && wants_head(p)) {
    row_entries = std::min(row_entries, std::max<std::int64_t>(1024, std::llround(0.5 / plan.epsilon)));
  }
  plan.panel_entries = w * row_entries;
  plan.group_tokens = tokens;
  if (wants_head(p)) {
    const auto entries = static_cast<std::int64_t>(region / kEntryBytes) / plan.vocab_slices;
    plan.panel_entries = std::min(plan.panel_entries, std::max(entries, w));
    const std::int64_t most = std::max(entries / plan.panel_entries * w, w);
    plan.group_tokens =
        round_up(ceil_div(tokens, ceil_div(tokens, most)), w);  // even: a short last group idles threads
  }
  plan.head_sum = needs_head_sum(p, plan.group_tokens < p.tokens);
  plan.workspace_bytes = map_workspace(plan, nullptr).bytes;

  const auto take = [&](Mode mode, std::uint64_t bytes) {
    std::optional<Plan> exact = choose(p, mode, kernels, machine, shape.threads, bytes, true).best;
    if (exact && exact->head_sum != plan.head_sum) {
      exact->head_sum = plan.head_sum;
      exact->workspace_bytes = map_workspace(*exact, nullptr).bytes;
      if (exact->workspace_bytes > bytes) exact.reset();
    }
    return exact;
  };
  std::optional<Plan> exact;
  if (!wants_head(p)) {
    exact = take(Mode::stream, std::max(plan.workspace_bytes, budget));
  } else {
    // Chunks would round dC once each if they were not summed in f32.
    const bool f32 = !needs_head_sum(p, true) || plan.head_sum;
    if (f32) exact = take(Mode::chunk, std::max(plan.workspace_bytes, std::min(budget, kMaxEntryBytes)));
    if (!exact) exact = take(Mode::recompute, std::max(plan.workspace_bytes, budget));
  }
  if (!exact) return std::nullopt;
  plan.threads = std::max(plan.threads, exact->threads);
  exact->threads = plan.threads;
  exact->workspace_bytes = map_workspace(*exact, nullptr).bytes;
  plan.exact = std::make_shared<const Plan>(std::move(*exact));
  plan.workspace_bytes = map_workspace(plan, nullptr).bytes;
  return plan;
}

Status over_budget(std::uint64_t budget, std::uint64_t smallest, const std::vector<Rejection>& rejected) {
  std::string reasons;
  for (const Rejection& r : rejected) reasons += text("; ", name(r.mode), ": ", r.reason);
  return Status(StatusCode::budget_too_small,
                text("budget is ", budget, " bytes; the smallest that works here is ", smallest, " bytes", reasons));
}

// "e", "e and c", "e, c and bias", ...
std::string wanted_names(const Problem& p) {
  std::vector<std::string> names;
  if (p.want_d_e) names.emplace_back("e");
  if (p.want_d_c) names.emplace_back("c");
  if (p.want_d_bias) names.emplace_back("bias");
  std::string all = names.empty() ? "nothing" : names[0];
  for (std::size_t i = 1; i < names.size(); ++i) all += (i + 1 < names.size() ? ", " : " and ") + names[i];
  return all;
}

}  // namespace

const Blocks& default_blocks() { return kDefaultBlocks; }

Result<Plan> make_plan(const Problem& problem, const Limits& limits, const Machine& machine) try {
  const cpu::KernelFloatEnv float_env;
  if (Status s = validate(problem); !s.ok()) return s;
  const cpu::Kernels* kernels = cpu::find_kernels(machine.target);
  if (kernels == nullptr) {
    std::string names;
    for (const std::string& name : available_targets()) names += (names.empty() ? "" : ", ") + name;
    return Status(StatusCode::unavailable,
                  text("kernel target \"", machine.target, "\" is not in this build or CPU; there are: ", names));
  }
  if (Status s = validate_threads(limits.threads); !s.ok()) return s;

  const std::vector<Mode> legal = legal_modes(problem);
  if (limits.mode != Mode::automatic && std::find(legal.begin(), legal.end(), limits.mode) == legal.end()) {
    std::string names;
    for (const Mode mode : legal) names += text(names.empty() ? "" : " or ", "\"", name(mode), "\"");
    return invalid("mode is \"", name(limits.mode), "\"; with gradients wanted of ", wanted_names(problem),
                   " it must be \"auto\" or ", names);
  }

  const double flops = 2.0 * static_cast<double>(problem.tokens) * static_cast<double>(problem.vocab) *
                       static_cast<double>(problem.hidden) * units_of(problem, legal.front());
  const int worth = static_cast<int>(std::clamp(flops / kFlopsPerThread, 1.0, 65536.0));
  const int threads =
      limits.threads > 0 ? limits.threads : std::clamp(machine.threads, 1, std::min(worth, kMaxThreads));

  Choice best;
  std::uint64_t smallest = kUnlimited;
  std::vector<Rejection> rejected;
  for (const Mode mode : legal) {
    if (limits.mode != Mode::automatic && limits.mode != mode) {
      rejected.push_back({mode, "another mode was asked for"});
      continue;
    }
    std::uint64_t budget = limits.budget_bytes.value_or(kUnlimited);
    if (mode == Mode::chunk && !limits.budget_bytes) budget = machine.spare_bytes;
    Choice choice = mode == Mode::sparse
                        ? choose_sparse(problem, *kernels, machine, threads, budget)
                        : choose(problem, mode, *kernels, machine, threads, budget, limits.budget_bytes.has_value());
    // Asked for by name and without a budget, chunk takes what it needs at least, such as the f32 sum of a bf16 dC (640
    // MiB of Gemma 3 270M's), and room for chunks beside it: with the smallest chunks it takes 4 times as long.
    if (!choice.best && mode == limits.mode && !limits.budget_bytes) {
      choice = choose(problem, mode, *kernels, machine, threads, choice.smallest + machine.spare_bytes / 2, false);
    }
    smallest = std::min(smallest, choice.smallest);
    if (!choice.best) {
      rejected.push_back({mode, text("needs ", choice.smallest, " bytes, over the ",
                                     limits.budget_bytes ? "budget of " : "default limit of ", budget)});
    } else if (choice.best_time < best.best_time) {
      if (best.best) rejected.push_back({best.best->mode, "predicted slower"});
      best = std::move(choice);
    } else {
      rejected.push_back({mode, text("predicted slower (", units_of(problem, mode), "u, ",
                                     std::round(100 * choice.best_time / best.best_time) / 100, " x the time)")});
    }
  }
  if (!best.best) return over_budget(limits.budget_bytes.value_or(kUnlimited), smallest, rejected);
  best.best->rejected = std::move(rejected);
  return std::move(*best.best);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<std::int64_t> max_tokens(const Problem& problem, const Limits& limits, const Machine& machine) try {
  Problem p = problem;
  p.sequence = 0;  // need not divide the number looked for
  p.shift = 0;
  Status last;
  const auto fits = [&](std::int64_t tokens) {
    p.tokens = tokens;
    Result<Plan> plan = make_plan(p, limits, machine);
    if (plan.status().code() == StatusCode::out_of_memory) throw std::bad_alloc();  // says nothing of the tokens
    if (!plan.ok()) last = plan.status();
    return plan.ok();
  };
  std::int64_t low = 0;
  if (!fits(low)) return last;
  // What a plan needs at least grows with the tokens: double, then halve the gap.
  std::int64_t high = 1;
  while (fits(high)) {
    low = high;
    high *= 2;
  }
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace cutloss
