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
constexpr std::byte kPoison{0xFF};  // NaN in f32 and bf16

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

struct Results {
  explicit Results(const Problem& p)
      : count(static_cast<std::size_t>(p.tokens)),
        loss((p.reduction == Reduction::none ? count : 1) * sizeof(float), 4),
        nll(count * sizeof(float), 0),
        lse(count * sizeof(float), 4),
        d_e(p.want_d_e ? bytes(p.d_e_dtype.value_or(p.e_dtype), p.tokens * p.hidden) : 0, 4),
        d_c(p.want_d_c ? bytes(p.d_c_dtype.value_or(p.c_dtype), p.vocab * p.hidden) : 0, 4) {}
  static std::size_t bytes(DType dtype, std::int64_t n) { return static_cast<std::size_t>(n) * size_of(dtype); }

  Outputs outputs(const Problem& p) {
    return {.loss = reinterpret_cast<float*>(loss.data()),
            .nll = reinterpret_cast<float*>(nll.data()),
            .lse = reinterpret_cast<float*>(lse.data()),
            .d_e = p.want_d_e ? d_e.data() : nullptr,
            .d_c = p.want_d_c ? d_c.data() : nullptr,
            .valid_count = &valid_count};
  }
  bool intact() const { return loss.intact() && nll.intact() && lse.intact() && d_e.intact() && d_c.intact(); }
  // The first output that differs in a bit, or null.
  const char* difference(const Results& other) const {
    if (!loss.same(other.loss)) return "loss";
    if (!nll.same(other.nll)) return "nll";
    if (!lse.same(other.lse)) return "lse";
    if (!d_e.same(other.d_e)) return "d_e";
    if (!d_c.same(other.d_c)) return "d_c";
    return valid_count == other.valid_count ? nullptr : "valid_count";
  }

  std::size_t count;
  Guarded loss, nll, lse, d_e, d_c;
  std::int64_t valid_count = -1;
};

// Compares one output; `columns` turns the index into row and column for the message.
void compare(const char* what, DType dtype, const Guarded& got, const std::vector<double>& want,
             const std::vector<double>& bound, std::int64_t columns, CheckReport& report) {
  double worst = 0;
  std::size_t worst_at = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double value = static_cast<double>(load(dtype, got.data(), static_cast<std::int64_t>(i)));
    if (value == want[i] || (std::isnan(value) && std::isnan(want[i]))) continue;
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

}  // namespace

CheckReport run_check(const CheckCase& test, const reference::Reference& want, Mode mode, const std::string& target,
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
