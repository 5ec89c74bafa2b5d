// cutloss bench: time of the whole loss on random data, as a share of what this machine can do. A wrong result is not
// timed: 16 rows of everything are compared with float64 first.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "src/cli/bench_data.h"
#include "src/cli/cli.h"
#include "src/cli/options.h"
#include "src/cpu/peak.h"

namespace cutloss::cli {
namespace {

int bench(const ProblemOptions& options, std::int64_t reps, std::uint64_t seed, bool json) {
  const Result<Machine> machine = options.machine();
  if (!machine.ok()) return report(machine.status());
  const Result<Plan> made = make_plan(options.problem(), options.limits(), machine.value());
  if (!made.ok()) return report(made.status());
  const Plan& plan = made.value();
  const Problem& p = plan.problem;
  if (p.tokens < 1) return report_usage(fmt::format("--n {}: nothing to time, give at least 1", p.tokens));

  BenchArrays a = make_bench_arrays(p, seed, machine->threads);
  a.workspace.resize(plan.workspace_bytes);

  const Status warm = run_once(plan, a);
  if (!warm.ok()) return report(warm);
  const SampledErrors errors = sampled_errors(p, a, machine->threads);
  const std::string error_text = fmt::format("nll {:.2g} absolute, dE {:.2g}, dC {:.2g} relative to a row's norm",
                                             errors.nll, errors.d_e, errors.d_c);
  if (!acceptable(errors, p)) {
    fmt::print(stderr, "cutloss: error: wrong result, not timed; errors of {} rows against float64: {}\n", kSampledRows,
               error_text);
    return kCheckFailed;
  }

  std::vector<double> seconds;
  for (std::int64_t rep = 0; rep < reps; ++rep) {
    const auto start = std::chrono::steady_clock::now();
    const Status status = run_once(plan, a);
    if (!status.ok()) return report(status);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2], least = seconds.front(), most = seconds.back();
  const double gflops = plan.flops / median / 1e9;
  const double peak = cpu::measure_peak_gflops(plan.target, plan.threads);

  if (json) {
    Json out = {{"version", version()},
                {"n", p.tokens},
                {"v", p.vocab},
                {"d", p.hidden},
                {"e_dtype", name(p.e_dtype)},
                {"c_dtype", name(p.c_dtype)},
                {"head_layout", name(p.head_layout)},
                {"frozen", !p.want_d_c},
                {"reps", reps},
                {"seconds_median", median},
                {"seconds_min", least},
                {"seconds_max", most},
                {"gflops", gflops},
                {"peak_gflops", peak},
                {"peak_share", gflops / peak},
                {"errors", {{"nll", errors.nll}, {"d_e", errors.d_e}, {"d_c", errors.d_c}}},
                {"plan", parse_json(plan.json())}};
    print_json(out);
    return kOk;
  }
  std::vector<std::pair<std::string, std::string>> facts = plan_facts(plan);
  facts.insert(
      facts.end(),
      {{"errors", error_text},
       {"time", fmt::format("median {} of {}, best {}, worst {} (+{:.0f} % on the best)", human_seconds(median), reps,
                            human_seconds(least), human_seconds(most), 100 * (most / least - 1))},
       {"speed", fmt::format("{:.1f} GFLOP/s, {:.0f} % of the {:.1f} that {} thread{} reach here "
                             "with multiply-adds alone",
                             gflops, 100 * gflops / peak, peak, plan.threads, plan.threads == 1 ? "" : "s")}});
  print_facts(facts);
  return kOk;
}

}  // namespace

void add_bench(CLI::App& app, int& code) {
  CLI::App* const command = app.add_subcommand("bench", "Time the loss and its gradients on random data");
  command->footer(
      "Examples:\n"
      "  cutloss bench --n 1024 --v 262144 --d 640 --dtype bf16 --frozen\n"
      "  cutloss bench --n 512 --v 32768 --d 640 --mode recompute --threads 1 --reps 11 --json");
  static ProblemOptions options;
  static std::int64_t reps = 5;
  static std::uint64_t seed = 1;
  static bool json = false;
  options.add_shape(*command);
  options.add_objective(*command);
  options.add_limits(*command);
  command->add_option("--reps", reps, "Timed runs, after one to warm up")->check(at_least(1))->capture_default_str();
  command->add_option("--seed", seed, "Of the data")->capture_default_str();
  command->add_flag("--json", json, "Print JSON");
  command->callback([&code] { code = bench(options, reps, seed, json); });
}

}  // namespace cutloss::cli
