#include "src/cli/check_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "src/cli/data.h"

namespace cutloss::cli {
namespace {

constexpr std::size_t kGuard = 64;
constexpr std::byte kGuardByte{0xA5};
constexpr std::byte kPoison{0xFF};  // NaN in every float

// Memory between guard bytes, NaN until written.
class Guarded {
 public:
  Guarded(std::size_t bytes, std::size_t offset) : offset_(kGuard + offset), bytes_(bytes) {
    memory_.resize(offset_ + bytes + kGuard, kGuardByte);
    std::fill_n(memory_.begin() + static_cast<std::ptrdiff_t>(offset_), bytes, kPoison);
  }
  std::byte* data() { return memory_.data() + offset_; }
  const std::byte* data() const { return memory_.data() + offset_; }
  std::span<std::byte> span() { return {data(), bytes_}; }
  bool intact() const {
    const auto guard = [](std::byte value) { return value == kGuardByte; };
    return std::all_of(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(offset_), guard) &&
           std::all_of(memory_.end() - kGuard, memory_.end(), guard);
  }
  bool same(const Guarded& other) const {
    return bytes_ == other.bytes_ && (bytes_ == 0 || std::memcmp(data(), other.data(), bytes_) == 0);
  }

 private:
  std::size_t offset_, bytes_;
  std::vector<std::byte> memory_;
};

// Runs tasks from the last to the first in the calling thread.
class BackwardsExecutor : public Executor {
 public:
  int concurrency() const override { return 1; }
  void parallel_for(std::int64_t tasks, const Body& body) override {
    for (std::int64_t task = tasks; task-- > 0;) body(task, 0);
  }
};

// Small numbers of either sign, for gradients that are added to.
Guarded addend(DType dtype, std::int64_t count, bool wanted, bool accumulate) {
  Guarded memory(wanted ? static_cast<std::size_t>(count) * size_of(dtype) : 0, 4);
  for (std::int64_t i = 0; wanted && accumulate && i < count; ++i) {
    store(dtype, memory.data(), i, static_cast<float>(i % 7 - 3) / 4);
  }
  return memory;
}

struct Results {
  explicit Results(const Problem& p)
      : n(p.tokens),
        loss(floats(p.reduction == Reduction::none ? n : 1), 4),
        nll(floats(n), 0),
        lse(floats(n), 4),
        entropy(floats(p.metrics.entropy ? n : 0), 0),
        mean_logits(floats(p.metrics.mean_logits ? p.vocab : 0), 4),
        top_k_logprobs(floats(n * p.metrics.top_k), 0),
        argmax(ids(p.metrics.argmax ? n : 0), 8),
        correct(static_cast<std::size_t>(p.metrics.argmax ? n : 0), 1),
        rank(ids(p.metrics.rank ? n : 0), 8),
        top_k_ids(ids(n * p.metrics.top_k), 8),
        d_e(addend(p.d_e_dtype.value_or(p.e_dtype), n * p.hidden, p.want_d_e, p.accumulate_d_e)),
        d_c(addend(p.d_c_dtype.value_or(p.c_dtype), p.vocab * p.hidden, p.want_d_c, p.accumulate_d_c)),
        d_bias(addend(p.bias_dtype.value_or(DType::f32), p.vocab, p.want_d_bias, p.accumulate_d_bias)) {}
  static std::size_t floats(std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(float); }
  static std::size_t ids(std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(std::int64_t); }

  Outputs outputs(const Problem& p) {
    const auto wanted = [](bool want, auto* as, Guarded& memory) {
      return want ? reinterpret_cast<decltype(as)>(memory.data()) : nullptr;
    };
    float* const f = nullptr;
    std::int64_t* const id = nullptr;
    Outputs out;
    out.loss = wanted(true, f, loss);
    out.nll = wanted(true, f, nll);
    out.lse = wanted(true, f, lse);
    out.d_e = p.want_d_e ? d_e.data() : nullptr;
    out.d_c = p.want_d_c ? d_c.data() : nullptr;
    out.d_bias = p.want_d_bias ? d_bias.data() : nullptr;
    out.valid_count = &valid_count;
    out.entropy = wanted(p.metrics.entropy, f, entropy);
    out.mean_logits = wanted(p.metrics.mean_logits, f, mean_logits);
    out.argmax = wanted(p.metrics.argmax, id, argmax);
    out.correct = wanted(p.metrics.argmax, static_cast<std::uint8_t*>(nullptr), correct);
    out.rank = wanted(p.metrics.rank, id, rank);
    out.top_k_ids = wanted(p.metrics.top_k > 0, id, top_k_ids);
    out.top_k_logprobs = wanted(p.metrics.top_k > 0, f, top_k_logprobs);
    out.filter_report = &report;
    return out;
  }

  struct Named {
    const char* name;
    Guarded Results::*memory;
  };
  static std::span<const Named> all() {
    static constexpr Named list[] = {{"loss", &Results::loss},
                                     {"nll", &Results::nll},
                                     {"lse", &Results::lse},
                                     {"entropy", &Results::entropy},
                                     {"mean_logits", &Results::mean_logits},
                                     {"top_k_logprobs", &Results::top_k_logprobs},
                                     {"argmax", &Results::argmax},
                                     {"correct", &Results::correct},
                                     {"rank", &Results::rank},
                                     {"top_k_ids", &Results::top_k_ids},
                                     {"d_e", &Results::d_e},
                                     {"d_c", &Results::d_c},
                                     {"d_bias", &Results::d_bias}};
    return list;
  }
  bool intact() const {
    return std::all_of(all().begin(), all().end(), [&](const Named& one) { return (this->*one.memory).intact(); });
  }
  // The first output that differs in a bit, or null.
  const char* difference(const Results& other) const {
    for (const auto& [what, memory] : all()) {
      if (!(this->*memory).same(other.*memory)) return what;
    }
    return valid_count == other.valid_count ? nullptr : "valid_count";
  }
  std::int64_t id_at(const Guarded& memory, std::int64_t at) const {
    std::int64_t id;
    std::memcpy(&id, memory.data() + at * 8, sizeof id);
    return id;
  }

  std::int64_t n;
  Guarded loss, nll, lse, entropy, mean_logits, top_k_logprobs, argmax, correct, rank, top_k_ids, d_e, d_c, d_bias;
  std::int64_t valid_count = -1;
  FilterReport report;
};

// Compares one output; `columns` turns the index into row and column for the message.
void compare(const char* what, DType dtype, const Guarded& got, const std::vector<double>& want,
             const std::vector<double>& bound, std::int64_t columns, CheckReport& report) {
  double worst = 0;
  std::size_t worst_at = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double value = static_cast<double>(load(dtype, got.data(), static_cast<std::int64_t>(i)));
    if (value == want[i] || (std::isnan(value) && std::isnan(want[i])) || std::isinf(bound[i])) continue;
    const double share = std::abs(value - want[i]) / bound[i];
    if (!(share <= worst)) {
      worst = std::isnan(share) ? INFINITY : share;
      worst_at = i;
    }
  }
  report.worst_share = std::max(report.worst_share, worst);
  if (worst <= 1 || !report.failure.empty()) return;
  const std::int64_t at = static_cast<std::int64_t>(worst_at);
  report.failure = fmt::format("{}[{}]: got {:.9g}, want {:.9g}, bound {:.3g}", what,
                               columns == 0 ? fmt::format("{}", at) : fmt::format("{}, {}", at / columns, at % columns),
                               load(dtype, got.data(), at), want[worst_at], bound[worst_at]);
}

// Ids and counts of one row, which are exact where logits are further apart than their errors.
void compare_order(const Problem& p, const Results& got, const reference::Reference& want, std::int64_t row,
                   CheckReport& report) {
  const auto i = static_cast<std::size_t>(row);
  const auto vocab = static_cast<std::size_t>(p.vocab);
  const auto fail = [&](const char* what, std::int64_t id) {
    if (report.failure.empty()) report.failure = fmt::format("{}[{}]: got {}", what, row, id);
  };
  const double* z = &want.logits[i * vocab];
  const double near = 2 * want.logit_error[i];
  const bool counts = want.counts[i] != 0;
  const bool ordered = counts && !std::isnan(want.lse[i]);
  std::vector<double> sorted(z, z + p.vocab);
  std::sort(sorted.rbegin(), sorted.rend());
  // An id whose logit may be the k-th largest; -1 where there is none.
  const auto is_one = [&](std::int64_t id, std::size_t k) {
    if (!ordered || k >= vocab || sorted[k] == -INFINITY) return id == -1;
    return id >= 0 && id < p.vocab && z[id] >= sorted[k] - near;
  };
  if (p.metrics.argmax) {
    const std::int64_t id = got.id_at(got.argmax, row);
    if (!is_one(id, 0)) fail("argmax", id);
    const bool hit = ordered && id >= 0 && id == want.label[i];
    if (static_cast<bool>(got.correct.data()[row]) != hit) fail("correct", !hit);
  }
  if (p.metrics.rank) {
    const std::int64_t rank = got.id_at(got.rank, row), label = want.label[i];
    std::int64_t least = 0, most = 0;
    for (std::int64_t v = 0; ordered && label >= 0 && v < p.vocab; ++v) {
      least += v != label && z[v] > z[label] + near;
      most += v != label && z[v] > z[label] - near;
    }
    if (!ordered || label < 0 ? rank != -1 : rank < least || rank > most) fail("rank", rank);
  }
  for (std::int64_t k = 0; k < p.metrics.top_k; ++k) {
    const std::int64_t id = got.id_at(got.top_k_ids, row * p.metrics.top_k + k);
    if (!is_one(id, static_cast<std::size_t>(k))) fail("top_k_ids", id);
    if (id < 0 || id >= p.vocab) continue;
    const double wanted = z[id] - want.lse[i];
    const double bound = want.lse_bound[i] + want.logit_error[i] + 0x1p-24 * std::abs(wanted);
    const double logprob = load(DType::f32, got.top_k_logprobs.data(), row * p.metrics.top_k + k);
    if (!(std::abs(logprob - wanted) <= bound)) fail("top_k_logprobs", id);
  }
}

}  // namespace

reference::Reference reference_of(const CheckCase& test, double epsilon, bool rounds_twice) {
  const Results before(test.problem);
  reference::Options options;
  // No plan adds up more in a row than all of a vocabulary or all tokens.
  options.additions = static_cast<double>(test.problem.vocab + test.problem.tokens + 4);
  options.d_e_before = before.d_e.data(), options.d_c_before = before.d_c.data();
  options.d_bias_before = before.d_bias.data();
  options.epsilon = epsilon, options.rounds_twice = rounds_twice;
  return reference::linear_cross_entropy(test.problem, test.inputs, options);
}

CheckReport run_check(const CheckCase& test, const reference::Reference& exact, Mode mode, const std::string& target,
                      int threads) {
  CheckReport report;
  const Problem& p = test.problem;
  Machine machine = test.machine;
  machine.target = target;
  machine.threads = threads;
  for (TunedBlocks& entry : machine.tuning) entry.target = target;
  Limits limits{.mode = mode, .budget_bytes = {}, .threads = threads};
  Result<Plan> plan = make_plan(p, limits, machine);
  if (plan.ok() && test.budget_share) {
    limits.budget_bytes = static_cast<std::uint64_t>(*test.budget_share * static_cast<double>(plan->workspace_bytes));
    Result<Plan> smaller = make_plan(p, limits, machine);
    if (smaller.ok()) {
      if (smaller->workspace_bytes > *limits.budget_bytes) {
        report.failure =
            fmt::format("plan takes {} bytes with a budget of {}", smaller->workspace_bytes, *limits.budget_bytes);
        return report;
      }
      plan = std::move(smaller);
    } else if (smaller.status().code() != StatusCode::budget_too_small) {
      plan = std::move(smaller);
    }
  }
  if (!plan.ok()) {
    report.failure = "no plan: " + plan.status().message();
    return report;
  }
  if (plan->mode != mode || plan->target != target) {
    report.failure =
        fmt::format("asked for mode {} on {}, planned {} on {}", name(mode), target, name(plan->mode), plan->target);
    return report;
  }

  // The workspace at an odd address, since any alignment is allowed.
  const auto run_with = [&](Executor* executor, Results& results) {
    Guarded workspace(plan->workspace_bytes, 1);
    const Status status = run(plan.value(), test.inputs, results.outputs(p), workspace.span(), executor);
    if (!status.ok()) report.failure = "run failed: " + status.message();
    if (!workspace.intact()) report.failure = "wrote outside the workspace";
    if (!results.intact()) report.failure = "wrote outside an output";
    return report.failure.empty();
  };
  Results first(p);
  const auto one = make_thread_executor(1);
  if (!run_with(one.get(), first)) return report;

  const bool filtered = p.filter != Filter::none;
  const reference::Reference want = filtered ? reference_of(test, plan->epsilon, first.report.rows_redone > 0) : exact;
  if (p.reduction == Reduction::none) {
    compare("loss", DType::f32, first.loss, want.row_loss, want.row_loss_bound, 0, report);
  } else {
    compare("loss", DType::f32, first.loss, {want.loss}, {want.loss_bound}, 0, report);
  }
  compare("nll", DType::f32, first.nll, want.nll, want.nll_bound, 0, report);
  compare("lse", DType::f32, first.lse, want.lse, want.lse_bound, 0, report);
  if (p.want_d_e) {
    compare("d_e", p.d_e_dtype.value_or(p.e_dtype), first.d_e, want.d_e, want.d_e_bound, p.hidden, report);
  }
  if (p.want_d_c) {
    compare("d_c", p.d_c_dtype.value_or(p.c_dtype), first.d_c, want.d_c, want.d_c_bound,
            p.head_layout == HeadLayout::vd ? p.hidden : p.vocab, report);
  }
  if (p.want_d_bias) compare("d_bias", *p.bias_dtype, first.d_bias, want.d_bias, want.d_bias_bound, 0, report);
  if (p.metrics.entropy) compare("entropy", DType::f32, first.entropy, want.entropy, want.entropy_bound, 0, report);
  if (p.metrics.mean_logits) {
    compare("mean_logits", DType::f32, first.mean_logits, want.mean_logits, want.mean_logits_bound, 0, report);
  }
  for (std::int64_t row = 0; row < p.tokens; ++row) compare_order(p, first, want, row, report);
  if (report.failure.empty() && first.valid_count != want.valid_count) {
    report.failure = fmt::format("valid_count: got {}, want {}", first.valid_count, want.valid_count);
  }
  if (!report.failure.empty()) return report;

  BackwardsExecutor backwards;
  const auto several = make_thread_executor(threads);
  for (Executor* const executor : {static_cast<Executor*>(several.get()), static_cast<Executor*>(&backwards)}) {
    Results again(p);
    if (!run_with(executor, again)) return report;
    if (const char* const what = first.difference(again)) {
      report.failure = fmt::format("{}: other bits with {} than with one thread", what,
                                   executor == &backwards ? "tasks run backwards" : fmt::format("{} threads", threads));
      return report;
    }
  }
  return report;
}

}  // namespace cutloss::cli
