// cutloss info: what this machine has, and which kernels would run on it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "src/cli/cli.h"
#include "src/cli/options.h"

namespace cutloss::cli {
namespace {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int info(bool json) {
  const Result<Machine> detected = Machine::detect();
  if (!detected.ok()) return report(detected.status());
  const Machine& machine = detected.value();
  const std::vector<std::string> targets = available_targets();
  const char* const forced = std::getenv("CUTLOSS_TARGET");
  const std::string why = forced != nullptr && *forced != '\0'
                              ? fmt::format("CUTLOSS_TARGET={} in the environment", forced)
                              : "the best that this build has and this CPU can run";
  if (json) {
    const Json out = {
        {"version", version()},
        {"cpu", cpu_name()},
        {"cpus", std::thread::hardware_concurrency()},
        {"threads", machine.threads},
        {"l1_bytes", machine.l1_bytes},
        {"l2_bytes", machine.l2_bytes},
        {"l3_bytes", machine.l3_bytes},
        {"targets", targets},
        {"target", machine.target},
        {"target_reason", why},
        {"spare_bytes", machine.spare_bytes},
        {"tuning", machine.tuning_note},
    };
    print_json(out);
    return kOk;
  }
  print_facts({
      {"version", std::string(version())},
      {"cpu", cpu_name()},
      {"threads", fmt::format("{} of {} CPUs (affinity and CPU quota respected)", machine.threads,
                              std::thread::hardware_concurrency())},
      {"caches", fmt::format("L1 {}, L2 {} a core; L3 {}", human_bytes(machine.l1_bytes), human_bytes(machine.l2_bytes),
                             human_bytes(machine.l3_bytes))},
      {"targets", fmt::format("{}", fmt::join(targets, ", "))},
      {"would run", fmt::format("{}: {}", machine.target, why)},
      {"tuning", machine.tuning_note},
  });
  return kOk;
}

}  // namespace

void add_info(CLI::App& app, int& code) {
  CLI::App* const command = app.add_subcommand("info", "Show the CPU, the kernels available and which would run");
  static bool json = false;
  command->add_flag("--json", json, "Print JSON");
  command->callback([&code] { code = info(json); });
}

}  // namespace cutloss::cli
