// cutloss plan: how a problem would be computed, and why not otherwise. Nothing is computed.
#include <fmt/format.h>

#include "src/cli/cli.h"
#include "src/cli/options.h"
#include "src/cli/plan_costs.h"

namespace cutloss::cli {
namespace {

int most_tokens(const ProblemOptions& options, const Machine& machine, bool json) {
  const Result<std::int64_t> tokens = max_tokens(options.problem(), options.limits(), machine);
  if (!tokens.ok()) return report(tokens.status());
  if (json) {
    fmt::print("{{\"max_tokens\": {}}}\n", tokens.value());
  } else {
    print_facts({{"max tokens", fmt::format("{}", tokens.value())}});
  }
  return kOk;
}

int plan(const ProblemOptions& options, bool most, bool json) {
  const Result<Machine> machine = options.machine();
  if (!machine.ok()) return report(machine.status());
  if (most && !options.budget)
    return report_usage("--max-tokens needs --budget: without one any number of tokens fits");
  if (most) return most_tokens(options, machine.value(), json);
  const Result<Plan> plan = make_plan(options.problem(), options.limits(), machine.value());
  if (!plan.ok()) return report(plan.status());
  if (json) {
    fmt::print("{}\n", plan->json());
  } else {
    std::vector<std::pair<std::string, std::string>> facts = plan_facts(plan.value());
    facts.emplace_back("tuning", machine->tuning_note);
    print_facts(facts);
  }
  return kOk;
}

}  // namespace

void add_plan(CLI::App& app, int& code) {
  CLI::App* const command = app.add_subcommand("plan", "Show how a problem would be computed, with the reasons");
  command->footer(
      "Examples:\n"
      "  cutloss plan --n 8192 --v 262144 --d 640 --dtype bf16 --frozen\n"
      "  cutloss plan --n 8192 --v 262144 --d 640 --budget 64MiB --json\n"
      "  cutloss plan --max-tokens --budget 64MiB --v 262144 --d 640 --frozen\n"
      "  cutloss plan --n 8192 --v 256000 --d 2304 --dtype bf16 --costs --machine a100\n"
      "  cutloss plan --n 1024 --v 65536 --d 640 --costs --measure\n"
      "  cutloss plan --infer-kept 46 314 100       how much Cut Cross-Entropy kept, from its published times\n"
      "The budget is for the workspace: memory beyond inputs and gradients. --costs is the planner's own model, see\n"
      "docs/cost-model.md; a described machine is a file of lines such as 'bandwidth = 819e9' (f32_flops, bf16_flops,\n"
      "cache_bytes, and threads for a CPU).");
  static ProblemOptions options;
  static bool most = false;
  static CostOptions costs;
  static bool json = false;
  options.add_shape(*command);
  options.add_objective(*command);
  options.add_terms(*command);
  options.add_filter(*command);
  options.add_limits(*command);
  command->add_flag("--max-tokens", most, "Print how many tokens fit in --budget instead; --n does not matter");
  costs.add(*command);
  command->add_flag("--json", json, "Print JSON");
  command->callback([&code] { code = costs.wanted() ? print_costs(options, costs, json) : plan(options, most, json); });
}

}  // namespace cutloss::cli
