// What the planner may know of this machine: kernel target, caches, and how many threads are really ours.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

#include "cutloss/cutloss.hpp"
#include "src/cpu/float_env.h"
#include "src/cpu/kernels.h"
#include "src/plan/memory.h"
#include "src/plan/quota.h"
#include "src/plan/text_file.h"
#include "src/plan/tuning.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

std::size_t cache_bytes(int level, std::size_t fallback) {
  for (int index = 0; index < 8; ++index) {
    const std::string base = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    if (std::atoi(read_text_file(base + "level").c_str()) != level) continue;
    const std::string size = read_text_file(base + "size");  // "512K"
    char* unit = nullptr;
    const auto value = static_cast<std::size_t>(std::strtoull(size.c_str(), &unit, 10));
    if (value == 0 || read_text_file(base + "type").starts_with("Instruction")) continue;
    return value << (*unit == 'K' ? 10 : *unit == 'M' ? 20 : 0);
  }
  return fallback;
}

int affinity_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// A positive integer in the environment, or 0.
int env_threads(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr) return 0;
  char* end = nullptr;
  const long threads = std::strtol(value, &end, 10);
  return end != value && *end == 0 && threads > 0 ? static_cast<int>(std::min(threads, 4096L)) : 0;
}

std::string join(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

}  // namespace

std::vector<std::string> available_targets() {
  std::vector<std::string> names;
  for (const cpu::Kernels* kernels : cpu::supported_kernels()) names.emplace_back(kernels->name);
  return names;
}

Result<Machine> Machine::detect() try {
  const cpu::KernelFloatEnv float_env;
  Machine machine;
  const std::vector<std::string> targets = available_targets();
  machine.target = targets.front();
  if (const char* forced = std::getenv("CUTLOSS_TARGET"); forced != nullptr && *forced != 0) {
    if (cpu::find_kernels(forced) == nullptr) {
      return Status(StatusCode::unavailable,
                    text("CUTLOSS_TARGET is \"", forced, "\"; this build and CPU have: ", join(targets)));
    }
    machine.target = forced;
  }
  machine.threads = affinity_threads();
  if (const int quota = cpu_quota("/sys/fs/cgroup", "/proc/self/cgroup"); quota > 0) {
    machine.threads = std::min(machine.threads, quota);
  }
  for (const char* variable : {"CUTLOSS_NUM_THREADS", "OMP_NUM_THREADS"}) {
    if (const int threads = env_threads(variable); threads > 0) {
      machine.threads = std::min(machine.threads, threads);
      break;
    }
  }
  machine.l1_bytes = cache_bytes(1, machine.l1_bytes);
  machine.l2_bytes = cache_bytes(2, machine.l2_bytes);
  machine.l3_bytes = cache_bytes(3, machine.l3_bytes);
  if (const auto left =
          available_memory("/sys/fs/cgroup", "/proc/self/cgroup", "/proc/meminfo", address_space_left())) {
    machine.spare_bytes = std::min(machine.spare_bytes, *left);
  }
  TuningFile tuning = read_tuning(tuning_path(this_cpu()), this_cpu());
  machine.tuning = std::move(tuning.entries);
  machine.tuning_note = std::move(tuning.note);
  return machine;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace cutloss
