// cutloss check: random problems in every mode on every kernel target, against float64.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "src/cli/check_case.h"
#include "src/cli/check_run.h"
#include "src/cli/cli.h"
#include "src/cli/options.h"

namespace cutloss::cli {
namespace {

struct Tally {
  std::int64_t runs = 0, failures = 0;
  double worst_share = 0;
};

// Options that make exactly this case again. The seed alone fixes all that is random; the shape is there because it
// was drawn to fit the tiles of one machine, and for the reader.
std::string repro_line(const CheckOptions& options, std::uint64_t seed, const Problem& p, Mode mode,
                       const std::string& target) {
  std::string line = fmt::format("cutloss check --cases 1 --seed {} --target {} --mode {} --n {} --v {} --d {}", seed,
                                 target, name(mode), p.tokens, p.vocab, p.hidden);
  if (!options.e_dtype.empty()) line += " --e-dtype " + options.e_dtype;
  if (!options.c_dtype.empty()) line += " --c-dtype " + options.c_dtype;
  if (!options.head_layout.empty()) line += " --head-layout " + options.head_layout;
  if (!options.reduction.empty()) line += " --reduction " + options.reduction;
  if (options.softcap) line += fmt::format(" --softcap {:.9g}", *options.softcap);
  return line + fmt::format(" --threads {}", options.threads);
}

void show_progress(std::int64_t done, std::int64_t cases) {
  constexpr std::int64_t kWidth = 40;
  const std::int64_t full = done * kWidth / cases;
  fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {} of {} cases{}", "", full, "", kWidth - full, done, cases,
             done == cases ? "\r\033[K" : "");
}

int check(const CheckOptions& options, bool json) {
  std::vector<std::string> targets = available_targets();
  if (options.target != "all") {
    if (std::find(targets.begin(), targets.end(), options.target) == targets.end()) {
      return report(Status(StatusCode::unavailable, fmt::format("--target {} is not available here; there are: all, {}",
                                                                options.target, fmt::join(targets, ", "))));
    }
    targets = {options.target};
  }
  if (targets.empty()) return report(Status(StatusCode::unavailable, "this build has no kernel for this CPU"));

  std::map<std::pair<std::string, std::string>, Tally> tallies;
  std::vector<std::string> failures;
  const bool progress = !json && isatty(STDERR_FILENO) != 0;
  for (std::int64_t k = 0; k < options.cases; ++k) {
    if (progress) show_progress(k, options.cases);
    const std::uint64_t seed = options.seed + static_cast<std::uint64_t>(k);
    const CheckCase test = make_case(options, seed, targets[0]);
    if (const Status valid = validate(test.problem); !valid.ok()) return report(valid);
    const reference::Reference want = reference_of(test);
    for (const std::string& target : targets) {
      for (const Mode mode : test.modes()) {
        if (options.mode != "all" && parse_mode(options.mode) != mode) continue;
        const CheckReport result = run_check(test, want, mode, target, options.threads);
        Tally& tally = tallies[{target, std::string(name(mode))}];
        ++tally.runs;
        tally.worst_share = std::max(tally.worst_share, result.worst_share);
        if (result.failure.empty()) continue;
        ++tally.failures;
        failures.push_back(repro_line(options, seed, test.problem, mode, target));
        // Ten tell enough; the rest is counted.
        if (failures.size() <= 10) {
          fmt::print(stderr, "{}FAILED {}\n  {}\n  repro: {}\n", progress ? "\r\033[K" : "", result.failure,
                     test.text(), failures.back());
        }
      }
    }
  }
  if (progress) show_progress(options.cases, options.cases);

  std::int64_t runs = 0;
  for (const auto& [key, tally] : tallies) runs += tally.runs;
  if (json) {
    Json by = Json::array();
    for (const auto& [key, tally] : tallies) {
      by.push_back({{"target", key.first},
                    {"mode", key.second},
                    {"runs", tally.runs},
                    {"failures", tally.failures},
                    {"worst_share_of_bound", tally.worst_share}});
    }
    const Json out = {
        {"seed", options.seed}, {"cases", options.cases}, {"runs", runs}, {"failures", failures}, {"by", by}};
    print_json(out);
  } else {
    std::vector<std::vector<std::string>> rows = {{"target", "mode", "runs", "failed", "worst error / bound"}};
    for (const auto& [key, tally] : tallies) {
      rows.push_back({key.first, key.second, fmt::format("{}", tally.runs), fmt::format("{}", tally.failures),
                      fmt::format("{:.3f}", tally.worst_share)});
    }
    print_table(rows);
    fmt::print("{} cases, {} runs, {} failed (seeds {} to {})\n", options.cases, runs, failures.size(), options.seed,
               options.seed + static_cast<std::uint64_t>(options.cases) - 1);
  }
  return failures.empty() ? kOk : kCheckFailed;
}

}  // namespace

void add_check(CLI::App& app, int& code) {
  CLI::App* const command = app.add_subcommand("check", "Compare random problems with float64, in all modes");
  command->footer(
      "Half of them also have a bias, weights, soft targets, metrics and the other options of 'cutloss loss'. Some "
      "have a\n"
      "filter: their gradients may also be off by what it may leave out.\n"
      "Each run is also repeated with several threads and with its tasks backwards, which must give the same bits.\n"
      "A failure prints one line that repeats it; exit code 1.\n\n"
      "Examples:\n"
      "  cutloss check --cases 1000 --seed 7\n"
      "  cutloss check --target avx2 --mode recompute --v 1025 --e-dtype bf16");
  static CheckOptions options;
  static std::string dtype;
  static bool json = false;
  command->add_option("--cases", options.cases, "Random problems")->check(at_least(1))->capture_default_str();
  command->add_option("--seed", options.seed, "Of the first; the next has the next seed")->capture_default_str();
  command->add_option("--target", options.target, "Kernel target, or all")->capture_default_str();
  command->add_option("--mode", options.mode, "A mode, or all")
      ->check(CLI::IsMember({"all", "loss", "stream", "chunk", "recompute", "sparse"}))
      ->capture_default_str();
  command->add_option("--threads", options.threads, "That must give the bits of one thread")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--n", options.n, "Tokens (default: random)")->check(at_least(0));
  command->add_option("--v", options.v, "Vocabulary (default: random)")->check(at_least(1));
  command->add_option("--d", options.d, "Hidden size (default: random)")->check(at_least(1));
  command->add_option("--max-n", options.max_n, "Most tokens")->check(at_least(1))->capture_default_str();
  command->add_option("--max-v", options.max_v, "Largest vocabulary")->check(at_least(1))->capture_default_str();
  command->add_option("--max-d", options.max_d, "Largest hidden size")->check(at_least(1))->capture_default_str();
  command->add_option("--dtype", dtype, "Of E and C (default: random)")->check(dtype_names());
  command->add_option("--e-dtype", options.e_dtype, "Of E alone")->check(dtype_names());
  command->add_option("--c-dtype", options.c_dtype, "Of C alone")->check(dtype_names());
  command->add_option("--head-layout", options.head_layout, "Of C (default: random)")->check(layout_names());
  command->add_option("--reduction", options.reduction, "Default: random")->check(reduction_names());
  command->add_option("--softcap", options.softcap, "0: none (default: random)")->check(at_least(0));
  command->add_flag("--json", json, "Print JSON");
  command->callback([&code] {
    if (options.e_dtype.empty()) options.e_dtype = dtype;
    if (options.c_dtype.empty()) options.c_dtype = dtype;
    code = check(options, json);
  });
}

}  // namespace cutloss::cli
