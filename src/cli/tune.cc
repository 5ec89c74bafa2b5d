// cutloss tune: measures block sizes for one kind of problem and keeps the fastest for the planner.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "src/cli/bench_data.h"
#include "src/cli/cli.h"
#include "src/cli/options.h"
#include "src/plan/tuning.h"

namespace cutloss::cli {
namespace {

// Sizes closer than the noise of a measurement stay as they are.
constexpr double kGain = 0.98;
constexpr std::int64_t kMaxTokens = 2048;  // no block is larger

struct TuneOptions {
  ProblemOptions problem;
  double seconds = 0.5;
  std::int64_t reps = 3;
  std::string file;
  bool dry_run = false, json = false;
};

// One of the sizes, and what is tried for it.
struct Knob {
  const char* name;
  std::int64_t Blocks::*size;
  std::vector<std::int64_t> values;
};

std::vector<Knob> knobs_of(Mode mode) {
  std::vector<Knob> knobs = {{"vocab_tile", &Blocks::vocab_tile, {48, 96, 144, 192, 224}},
                             {"token_block", &Blocks::token_block, {256, 512, 1024, 2048}}};
  if (mode == Mode::chunk) knobs.push_back({"chunk_tokens", &Blocks::chunk_tokens, {256, 512, 1024, 2048}});
  if (mode == Mode::chunk || mode == Mode::recompute) {
    knobs.push_back({"head_tokens", &Blocks::head_tokens, {256, 512, 1024}});
  }
  if (mode == Mode::recompute) knobs.push_back({"head_rows", &Blocks::head_rows, {384, 768, 1536}});
  return knobs;
}

class Tuner {
 public:
  Tuner(const TuneOptions& options, const Machine& machine) : options_(options), machine_(machine) {}

  // Searches one size after the other from the planner's own; an error if a plan or a result is wrong.
  Status search(const Problem& asked, const Limits& limits, Mode mode) {
    problem_ = asked;
    limits_ = limits;
    limits_.mode = mode;
    problem_.tokens = std::min(asked.tokens, kMaxTokens);
    if (Status s = shrink(asked.vocab); !s.ok()) return s;
    for (const Knob& knob : knobs_of(mode)) {
      std::vector<Blocks> candidates = {best_};
      for (const std::int64_t value : knob.values) {
        candidates.push_back(best_);
        candidates.back().*knob.size = value;
      }
      if (Status s = race(knob, candidates); !s.ok()) return s;
    }
    return Status();
  }

  const Problem& problem() const { return problem_; }
  const Blocks& best() const { return best_; }
  const Json& measured() const { return measured_; }
  TunedBlocks entry(const Blocks& blocks) const {
    return {machine_.target, limits_.mode, problem_.hidden, problem_.c_dtype, problem_.head_layout, blocks};
  }

 private:
  // Time grows with the vocabulary and block sizes do not care: takes a part of it that runs for about the time asked
  // for, but not one whose table and saved logits would fit into L3, where the whole does not.
  Status shrink(std::int64_t vocab) {
    const auto l3 = static_cast<std::int64_t>(machine_.l3_bytes);
    const std::int64_t least = 2 * l3 / (4 * std::min<std::int64_t>(problem_.hidden, 256));
    problem_.vocab = std::min<std::int64_t>(vocab, 4096);
    arrays_ = make_bench_arrays(problem_, 1, machine_.threads);
    Result<Plan> plan = make_plan(problem_, limits_, machine_);
    if (!plan.ok()) return plan.status();
    double seconds = 0;
    if (Status s = time(plan.value(), seconds); !s.ok()) return s;  // the first run is slower
    if (Status s = time(plan.value(), seconds); !s.ok()) return s;
    const double factor = std::clamp(options_.seconds / std::max(seconds, 1e-6), 1.0, 1e6);
    const auto wanted = static_cast<std::int64_t>(static_cast<double>(problem_.vocab) * factor);
    problem_.vocab = std::min(vocab, std::max(wanted, least));
    arrays_ = make_bench_arrays(problem_, 1, machine_.threads);
    plan = make_plan(problem_, limits_, machine_);
    if (!plan.ok()) return plan.status();
    best_ = default_blocks();
    best_.vocab_tile = plan->vocab_tile;
    return Status();
  }

  Status time(const Plan& plan, double& seconds) {
    arrays_.workspace.resize(plan.workspace_bytes);
    const auto start = std::chrono::steady_clock::now();
    const Status status = run_once(plan, arrays_);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return status;
  }

  // Candidates take turns, so that a slow minute of the machine hits all of them. The first one holds the place.
  Status race(const Knob& knob, const std::vector<Blocks>& candidates) {
    struct Runner {
      Blocks blocks;
      Plan plan;
      double seconds = std::numeric_limits<double>::infinity();
    };
    std::vector<Runner> runners;
    for (const Blocks& blocks : candidates) {
      Machine machine = machine_;
      machine.tuning = with_tuned({}, entry(blocks));
      Result<Plan> plan = make_plan(problem_, limits_, machine);
      if (!plan.ok()) return plan.status();
      const bool known = std::any_of(runners.begin(), runners.end(),
                                     [&](const Runner& other) { return other.plan.json() == plan->json(); });
      if (known || !plan->tuned) continue;  // the same sizes after rounding, or over the budget
      runners.push_back({blocks, std::move(plan.value())});
    }
    for (Runner& runner : runners) {
      double ignored = 0;
      if (Status s = time(runner.plan, ignored); !s.ok()) return s;
      if (!acceptable(sampled_errors(problem_, arrays_, machine_.threads), problem_)) {
        return {StatusCode::unavailable, fmt::format("wrong result with {} {}: nothing is kept; please run "
                                                     "'cutloss check' and report it",
                                                     knob.name, runner.blocks.*knob.size)};
      }
    }
    for (std::int64_t rep = 0; rep < options_.reps; ++rep) {
      for (Runner& runner : runners) {
        double seconds = 0;
        if (Status s = time(runner.plan, seconds); !s.ok()) return s;
        runner.seconds = std::min(runner.seconds, seconds);
      }
    }
    if (runners.empty()) return Status();
    const Runner* winner = &runners.front();
    for (const Runner& runner : runners) {
      if (runner.seconds < (winner == &runners.front() ? kGain : 1.0) * winner->seconds) winner = &runner;
    }
    for (const Runner& runner : runners) {
      fmt::print(stderr, "  {} {:>5}  {}{}\n", knob.name, runner.blocks.*knob.size, human_seconds(runner.seconds),
                 &runner == winner ? "  <-" : "");
      measured_.push_back({{"knob", knob.name},
                           {"size", runner.blocks.*knob.size},
                           {"seconds_min", runner.seconds},
                           {"taken", &runner == winner}});
    }
    best_ = winner->blocks;
    return Status();
  }

  const TuneOptions& options_;
  const Machine machine_;
  Problem problem_;
  Limits limits_;
  BenchArrays arrays_;
  Blocks best_;
  Json measured_ = Json::array();
};

int tune(const TuneOptions& options) {
  Result<Machine> detected = options.problem.machine();
  if (!detected.ok()) return report(detected.status());
  Machine& machine = detected.value();
  machine.tuning.clear();  // an old answer is not the yardstick
  const Problem problem = options.problem.problem();
  if (problem.tokens < 1) return report_usage(fmt::format("--n {}: nothing to time, give at least 1", problem.tokens));
  const Result<Plan> plan = make_plan(problem, options.problem.limits(), machine);
  if (!plan.ok()) return report(plan.status());
  const std::string path = options.file.empty() ? tuning_path(this_cpu()) : options.file;
  if (path.empty() && !options.dry_run) {
    return report_usage("no place for the result: CUTLOSS_TUNING_FILE is 'none' or HOME is not set; use --file");
  }

  fmt::print(stderr, "mode {} on {}, {} threads; best of {} runs for each size\n", name(plan->mode), plan->target,
             plan->threads, options.reps);
  Tuner tuner(options, machine);
  const Status status = tuner.search(problem, options.problem.limits(), plan->mode);
  if (!status.ok()) return status.code() == StatusCode::unavailable ? (report(status), kCheckFailed) : report(status);

  const TunedBlocks entry = tuner.entry(tuner.best());
  if (!options.dry_run) {
    TuningFile old = read_tuning(path, this_cpu());
    if (old.note.starts_with("ignored")) fmt::print(stderr, "replacing the old file: {}\n", old.note);
    const Status written = write_tuning(path, this_cpu(), with_tuned(std::move(old.entries), entry));
    if (!written.ok()) return report(written);
  }
  const Blocks& b = entry.blocks;
  if (options.json) {
    print_json({{"file", options.dry_run ? "" : path},
                {"cpu", this_cpu()},
                {"target", entry.target},
                {"mode", name(entry.mode)},
                {"hidden", entry.hidden},
                {"c_dtype", name(entry.c_dtype)},
                {"head_layout", name(entry.head_layout)},
                {"threads", plan->threads},
                {"measured_tokens", tuner.problem().tokens},
                {"measured_vocab", tuner.problem().vocab},
                {"blocks",
                 {{"token_block", b.token_block},
                  {"vocab_tile", b.vocab_tile},
                  {"chunk_tokens", b.chunk_tokens},
                  {"head_tokens", b.head_tokens},
                  {"head_rows", b.head_rows}}},
                {"measured", tuner.measured()}});
    return kOk;
  }
  print_facts({{"for", fmt::format("mode {} on {}, D {}, {} table [{}]", name(entry.mode), entry.target, entry.hidden,
                                   name(entry.c_dtype), entry.head_layout == HeadLayout::vd ? "V, D" : "D, V")},
               {"measured", fmt::format("{} tokens, {} of {} words, {} threads", tuner.problem().tokens,
                                        tuner.problem().vocab, problem.vocab, plan->threads)},
               {"sizes", fmt::format("at most {} tokens a block, {} words a tile, {} tokens a chunk, {} tokens and {} "
                                     "words a step of dC",
                                     b.token_block, b.vocab_tile, b.chunk_tokens, b.head_tokens, b.head_rows)},
               {"kept in", options.dry_run ? "nowhere (--dry-run)" : path}});
  return kOk;
}

}  // namespace

void add_tune(CLI::App& app, int& code) {
  CLI::App* const command =
      app.add_subcommand("tune", "Measure block sizes for a kind of problem; the planner then uses the fastest");
  command->footer(
      "Times a few sizes of each kind, one kind after the other, on random data with part of the vocabulary, on this\n"
      "machine as it is now: leave it alone meanwhile. A size replaces the planner's own only if it is 2 % faster.\n"
      "The answer is for this CPU model, target, mode, D, dtype and layout of the table, and for any N, V, budget\n"
      "and number of threads; other answers in the file stay. Results keep their error bounds and their independence\n"
      "of threads; budgets are kept. Delete the file to forget everything.\n\n"
      "Environment: CUTLOSS_TUNING_FILE names the file that is written and that every program using cutloss reads;\n"
      "'none' is no file. By default it is tuning-*.txt in $XDG_CACHE_HOME/cutloss or ~/.cache/cutloss; 'cutloss "
      "info'\n"
      "shows which, and why it is ignored if it is.\n\n"
      "Examples:\n"
      "  cutloss tune --n 2048 --v 262144 --d 640 --frozen          LoRA on a Gemma 3 270M\n"
      "  cutloss tune --n 2048 --v 128256 --d 2048 --dtype bf16 --mode recompute\n"
      "  cutloss tune --n 2048 --v 151936 --d 1024 --dry-run --json");
  static TuneOptions options;
  options.problem.add_shape(*command);
  options.problem.add_objective(*command);
  options.problem.add_limits(*command);
  command->add_option("--seconds", options.seconds, "Aimed at for each run: a larger part of the vocabulary")
      ->check([](const std::string& text) {  // CLI::Range lets NaN through
        const double seconds = std::strtod(text.c_str(), nullptr);
        return seconds >= 0 && seconds <= 3600 ? std::string() : text + " is not in [0, 3600]";
      })
      ->capture_default_str();
  command->add_option("--reps", options.reps, "Runs of each size; the best counts")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_option("--file", options.file, "Keep the answer here instead")->type_name("FILE");
  command->add_flag("--dry-run", options.dry_run, "Measure and print only");
  command->add_flag("--json", options.json, "Print JSON on stdout; progress stays on stderr");
  command->callback([&code] { code = tune(options); });
}

}  // namespace cutloss::cli
