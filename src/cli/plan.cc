// cutloss plan: how a problem would be computed, and why not otherwise. Nothing is computed.
#include <fmt/format.h>

#include "src/cli/cli.h"
#include "src/cli/options.h"

namespace cutloss::cli {
namespace {

int plan(const ProblemOptions& options, bool json) {
  const Result<Machine> machine = options.machine();
  if (!machine.ok()) return report(machine.status());
  const Result<Plan> plan = make_plan(options.problem(), options.limits(), machine.value());
  if (!plan.ok()) return report(plan.status());
  if (json) {
    fmt::print("{}\n", plan->json());
  } else {
    print_facts(plan_facts(plan.value()));
  }
  return kOk;
}

}  // namespace

void add_plan(CLI::App& app, int& code) {
  CLI::App* const command = app.add_subcommand("plan", "Show how a problem would be computed, with the reasons");
  command->footer(
      "Examples:\n"
      "  cutloss plan --n 8192 --v 262144 --d 640 --dtype bf16 --frozen\n"
      "  cutloss plan --n 8192 --v 262144 --d 640 --budget 64MiB --json");
  static ProblemOptions options;
  static bool json = false;
  options.add_shape(*command);
  options.add_objective(*command);
  options.add_limits(*command);
  command->add_flag("--json", json, "Print JSON");
  command->callback([&code] { code = plan(options, json); });
}

}  // namespace cutloss::cli
