#include "src/plan/speeds.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <new>

#include "src/cpu/bandwidth.h"
#include "src/cpu/peak.h"
#include "src/plan/text_file.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

constexpr double kMiB = 1 << 20;

// Dense peaks. f32 of a TPU: its matrix unit multiplies bf16, and a product right to f32 takes six passes.
const std::array kKnown = {
    Speeds{"v5e", "cloud.google.com/tpu/docs/v5e: 197 TFLOP/s bf16, 819 GB/s; 128 MiB VMEM; f32 as six bf16 products",
           false, 1, 197e12 / 6, 197e12, 819e9, 128 * kMiB},
    Speeds{"a100", "NVIDIA A100 SXM 80 GB data sheet: 312 TFLOP/s bf16, 19.5 f32, 2039 GB/s; 40 MB L2", false, 1,
           19.5e12, 312e12, 2039e9, 40 * kMiB},
    Speeds{"h100", "NVIDIA H100 SXM data sheet: 989.4 TFLOP/s bf16 (dense), 66.9 f32, 3352 GB/s; 50 MB L2", false, 1,
           66.9e12, 989.4e12, 3352e9, 50 * kMiB},
};

std::string_view trim(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") + 1 - first);
}

constexpr double kMost = 1e21;

struct Key {
  std::string_view name;
  double Speeds::*value;
};
constexpr std::array kKeys = {Key{"f32_flops", &Speeds::f32_flops}, Key{"bf16_flops", &Speeds::bf16_flops},
                              Key{"bandwidth", &Speeds::bandwidth}, Key{"cache_bytes", &Speeds::cache_bytes}};
constexpr std::string_view kKeyNames = "f32_flops, bf16_flops, bandwidth, cache_bytes, threads, name, source";

Status set(Speeds& speeds, std::string_view key, std::string_view value) {
  if (key == "name" || key == "source") {
    (key == "name" ? speeds.name : speeds.source) = value;
    return Status();
  }
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool read = error == std::errc() && end == value.data() + value.size();
  if (key == "threads") {
    if (!read || !(number >= 1 && number <= 1024) || number != std::floor(number)) {
      return invalid("threads is \"", value, "\"; it must be a whole number from 1 to 1024");
    }
    speeds.threads = static_cast<int>(number);
    speeds.kernels = true;
    return Status();
  }
  const auto found = std::find_if(kKeys.begin(), kKeys.end(), [&](const Key& k) { return k.name == key; });
  if (found == kKeys.end()) return invalid("\"", key, "\" is no key; there are: ", kKeyNames);
  if (!read || !(number > 0 && number <= kMost)) {
    return invalid(key, " is \"", value, "\"; it must be a number in (0, 1e21], such as 312e12");
  }
  speeds.*found->value = number;
  return Status();
}

}  // namespace

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const Speeds& speeds : kKnown) names.push_back(speeds.name);
  return names;
}

std::optional<Speeds> known_machine(std::string_view name) {
  const auto found = std::find_if(kKnown.begin(), kKnown.end(), [&](const Speeds& s) { return s.name == name; });
  return found == kKnown.end() ? std::nullopt : std::optional(*found);
}

Result<Speeds> measure_machine(const Machine& machine, int threads) {
  Speeds speeds;
  speeds.name = "here";
  speeds.kernels = true;
  speeds.threads = threads;
  speeds.cache_bytes = static_cast<double>(machine.l3_bytes);
  speeds.f32_flops = 1e9 * cpu::measure_peak_gflops(machine.target, threads);
  speeds.bf16_flops = speeds.f32_flops;  // widened before they are multiplied
  const Result<double> bandwidth = cpu::measure_bandwidth(machine.l3_bytes, threads);
  if (!bandwidth.ok()) return bandwidth.status();
  speeds.bandwidth = bandwidth.value();
  speeds.source = text("measured just now, ", machine.target, ", ", threads, threads == 1 ? " thread" : " threads");
  return speeds;
}

Result<Speeds> parse_machine(std::string_view content, const std::string& what) try {
  Speeds speeds;
  Status bad;
  int line = 0;
  for_each_line(content, [&](std::string_view whole) {
    ++line;
    const std::string_view text_line = trim(whole.substr(0, whole.find('#')));
    if (text_line.empty()) return true;
    const std::size_t equals = text_line.find('=');
    Status status = equals == std::string_view::npos
                        ? invalid("\"", text_line, "\" is no \"key = value\"")
                        : set(speeds, trim(text_line.substr(0, equals)), trim(text_line.substr(equals + 1)));
    if (!status.ok()) bad = Status(status.code(), text(what, ", line ", line, ": ", status.message()));
    return status.ok();
  });
  if (!bad.ok()) return bad;
  if (speeds.bf16_flops == 0) speeds.bf16_flops = speeds.f32_flops;
  if (speeds.f32_flops == 0) speeds.f32_flops = speeds.bf16_flops;
  for (const Key& key : kKeys) {
    if (speeds.*key.value == 0) return invalid(what, ": ", key.name, " is missing; a machine needs it");
  }
  if (speeds.name.empty()) speeds.name = what;
  if (speeds.source.empty()) speeds.source = what;
  return speeds;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace cutloss
