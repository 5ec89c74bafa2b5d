// cutloss loss: the loss, gradients and metrics of arrays in .npy files.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>

#include "src/cli/cli.h"
#include "src/cli/loss_data.h"
#include "src/cli/options.h"

namespace cutloss::cli {
namespace {

struct LossOptions {
  ProblemOptions problem;
  LossFiles files;
  std::vector<std::string> wrt, metrics;
  std::optional<double> denominator;
  std::uint64_t seed = 0;
  std::int64_t shift = 0, sequence = 0;
  bool nan_labels = false, no_gradient = false, compensated = false;
  std::int64_t reps = 1;
  bool json = false;
};

Status bad(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

// The metrics asked for by name and those that are to be written.
Status read_metrics(const LossOptions& options, Metrics& to) {
  const LossFiles& files = options.files;
  to.entropy = !files.entropy.empty();
  to.argmax = !files.argmax.empty() || !files.correct.empty();
  to.rank = !files.rank.empty();
  to.mean_logits = !files.mean_logits.empty();
  for (const std::string& metric : options.metrics) {
    constexpr std::string_view kTopK = "top_k=";
    if (metric == "entropy") {
      to.entropy = true;
    } else if (metric == "argmax" || metric == "correct") {
      to.argmax = true;
    } else if (metric == "rank") {
      to.rank = true;
    } else if (metric == "mean_logits") {
      to.mean_logits = true;
    } else if (metric.starts_with(kTopK)) {
      const char* const end = metric.data() + metric.size();
      std::int64_t k = 0;
      const auto [stop, error] = std::from_chars(metric.data() + kTopK.size(), end, k);
      if (error != std::errc() || stop != end || k < 1) {
        return bad(fmt::format("--metrics: '{}' is none; k is a number, 1 or more: top_k=5", metric));
      }
      if (to.top_k > 0 && to.top_k != k) {
        return bad(
            fmt::format("--metrics: '{}' beside top_k={}; one k is wanted, the larger has both", metric, to.top_k));
      }
      to.top_k = k;
    } else {
      return bad(fmt::format(
          "--metrics: '{}' is not one of entropy, argmax, correct, rank, mean_logits, top_k=5 (commas between)",
          metric));
    }
  }
  if (to.mean_logits && files.mean_logits.empty()) return bad("--metrics mean_logits needs --out-mean-logits FILE");
  const bool top_k_written = !files.top_k_ids.empty() || !files.top_k_logprobs.empty();
  if (to.top_k > 0 && !top_k_written) {
    return bad("--metrics top_k=K needs --out-top-k-ids FILE or --out-top-k-logprobs FILE");
  }
  if (to.top_k == 0 && top_k_written) return bad("--out-top-k-ids and --out-top-k-logprobs need --metrics top_k=K");
  return Status();
}

Status check_outputs(const LossFiles& files, const Problem& p) {
  if (!files.d_e.empty() && !p.want_d_e) {
    return bad("--d-e: E gets no gradient with --no-gradient, --mode loss or a --wrt without e");
  }
  if (!files.d_c.empty() && !p.want_d_c) {
    return bad("--d-c: the head gets no gradient with --frozen, --no-gradient, --mode loss or a --wrt without c");
  }
  if (!files.d_bias.empty() && !p.want_d_bias) {
    return bad(
        "--d-bias: there is no --bias, or it gets no gradient with --frozen, --no-gradient, --mode loss or a --wrt "
        "without bias");
  }
  if (!files.out_vocab_order.empty() && !files.learns_order()) {
    return bad("--out-vocab-order needs --vocab-order learned");
  }
  return Status();
}

// Which gradients: those of --wrt, else of all there is but for --frozen, --no-gradient and --mode loss.
void read_wants(const LossOptions& options, Problem& p) {
  if (options.no_gradient) p.want_d_e = p.want_d_c = false;
  p.want_d_bias = p.want_d_c && !options.files.bias.empty();
  if (options.wrt.empty()) return;
  const auto wanted = [&](const char* what) { return std::ranges::count(options.wrt, what) > 0; };
  p.want_d_e = wanted("e"), p.want_d_c = wanted("c"), p.want_d_bias = wanted("bias");
}

// The problem that the options and the files state.
Status state(const LossOptions& options, Problem& problem, LossInputs& inputs) {
  if (Status s = options.files.check_clash(); !s.ok()) return s;
  problem = options.problem.problem();
  read_wants(options, problem);
  if (options.nan_labels) problem.bad_labels = BadLabels::nan;
  problem.shift = options.shift;
  problem.sequence = options.sequence;
  problem.compensated = options.compensated;
  if (Status s = read_metrics(options, problem.metrics); !s.ok()) return s;
  if (Status s = check_outputs(options.files, problem); !s.ok()) return s;
  if (Status s = read_inputs(options.files, problem, inputs); !s.ok()) return s;
  inputs.inputs.denominator = options.denominator;
  inputs.inputs.seed = options.seed;
  return Status();
}

Status learn_order(const Problem& problem, LossInputs& inputs) {
  inputs.vocab_order.resize(static_cast<std::size_t>(problem.vocab));
  if (Status s = learn_vocab_order(problem, inputs.inputs, inputs.vocab_order.data()); !s.ok()) return s;
  inputs.inputs.vocab_order = inputs.vocab_order.data();
  return Status();
}

// Over the rows that are valid; others hold 0, or -1 as their rank.
template <typename T>
double mean_of(const std::vector<T>& values, std::int64_t valid) {
  double sum = 0;
  for (const T value : values) sum += value > 0 ? static_cast<double>(value) : 0;
  return valid == 0 ? 0.0 : sum / static_cast<double>(valid);
}

std::vector<std::pair<const char*, double>> metric_means(const LossResults& r) {
  std::vector<std::pair<const char*, double>> means;
  if (r.problem.metrics.entropy) means.emplace_back("entropy", mean_of(r.entropy, r.valid));
  if (r.problem.metrics.argmax) means.emplace_back("correct", mean_of(r.correct, r.valid));
  if (r.problem.metrics.rank) means.emplace_back("rank", mean_of(r.rank, r.valid));
  return means;
}

void print_as_json(const Plan& plan, const LossResults& r, double seconds) {
  const Problem& p = r.problem;
  // JSON has no NaN: such a loss is null.
  Json out = {{"loss", r.loss}};
  if (p.reduction != Reduction::none) out["loss"] = r.loss[0];
  out.update({{"valid_count", r.valid},
              {"n", p.tokens},
              {"v", p.vocab},
              {"d", p.hidden},
              {"mode", name(plan.mode)},
              {"target", plan.target},
              {"threads", plan.threads},
              {"seconds", seconds},
              {"extra_bytes", plan.workspace_bytes},
              {"filter", name(p.filter)}});
  if (p.filter != Filter::none) {
    out["filter_report"] = {{"rows", r.report.rows},
                            {"rows_redone", r.report.rows_redone},
                            {"kept_entries", r.report.kept_entries},
                            {"epsilon", r.report.epsilon},
                            {"dropped_mass_mean", r.report.dropped_mass_mean},
                            {"dropped_mass_max", r.report.dropped_mass_max},
                            {"error_bound", r.report.error_bound}};
  }
  for (const auto& [metric, mean] : metric_means(r)) out["metrics"][metric] = mean;
  print_json(out);
}

void print_as_text(const Plan& plan, const LossResults& r, double seconds, std::int64_t reps) {
  const Problem& p = r.problem;
  std::vector<std::pair<std::string, std::string>> facts;
  if (p.reduction == Reduction::none) {
    facts.emplace_back("loss",
                       fmt::format("{} values, which --json prints; --nll FILE writes the nll of each", p.tokens));
  } else {
    facts.emplace_back("loss", fmt::format("{:.9g}", r.loss[0]));
  }
  for (const auto& [metric, mean] : metric_means(r)) {
    facts.emplace_back(fmt::format("mean {}", metric), fmt::format("{:.6g}", mean));
  }
  facts.insert(facts.end(),
               {{"tokens that count", fmt::format("{} of {}", r.valid, p.tokens)},
                {"mode", fmt::format("{} on {}, {} threads", name(plan.mode), plan.target, plan.threads)},
                {"time", fmt::format("{} ({})", human_seconds(seconds),
                                     reps == 1 ? "one run" : fmt::format("best of {}", reps))},
                {"extra memory", fmt::format("{} beyond inputs and gradients", human_bytes(plan.workspace_bytes))}});
  if (p.filter != Filter::none) {
    const FilterReport& f = r.report;
    facts.insert(
        facts.end(),
        {{"filter", fmt::format("{}, epsilon {:.3g}", name(p.filter), f.epsilon)},
         {"kept",
          fmt::format("{:.0f} entries of {} rows; {} of them redone exactly", f.kept_entries, f.rows, f.rows_redone)},
         {"dropped mass", fmt::format("{:.3g} a row, at most {:.3g}", f.dropped_mass_mean, f.dropped_mass_max)},
         {"error of a row of dE",
          p.filter == Filter::tile
              ? "not known"
              : fmt::format("{}{:.3g}", p.filter == Filter::certified ? "at most " : "root mean square at most ",
                            f.error_bound)}});
  }
  print_facts(facts);
}

int loss(const LossOptions& options) {
  Problem problem;
  LossInputs inputs;
  if (const Status s = state(options, problem, inputs); !s.ok()) return report(s);
  const Result<Machine> machine = options.problem.machine();
  if (!machine.ok()) return report(machine.status());
  const Result<Plan> plan = make_plan(problem, options.problem.limits(), machine.value());
  if (!plan.ok()) return report(plan.status());
  if (options.files.learns_order()) {
    if (const Status s = learn_order(problem, inputs); !s.ok()) return report(s);
  }

  LossResults results(problem, inputs);
  const Outputs outputs = results.outputs();
  std::vector<std::byte> workspace(plan->workspace_bytes);
  double seconds = std::numeric_limits<double>::infinity();
  for (std::int64_t rep = 0; rep < options.reps; ++rep) {
    results.restart();
    const auto start = std::chrono::steady_clock::now();
    const Status status = run(plan.value(), inputs.inputs, outputs, workspace);
    if (!status.ok()) return report(status);
    seconds = std::min(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (const Status s = results.write(options.files); !s.ok()) return report(s);
  if (options.json) {
    print_as_json(plan.value(), results, seconds);
  } else {
    print_as_text(plan.value(), results, seconds, options.reps);
  }
  return kOk;
}

constexpr const char* kFooter =
    "E, C and the bias are float32, bfloat16 (as numpy saves ml_dtypes.bfloat16) or float16, each gradient like its\n"
    "input; weights and cotangents are any real numbers (and weights truth values), taken as float32; labels and ids "
    "are\n"
    "any integers. Gradients are computed, and timed, whether they are written or not; --wrt, --frozen (--wrt e) and\n"
    "--no-gradient leave them out.\n\n"
    "The loss of a row with label y, logits z, class weights w and token weight t is\n"
    "  t * ((1-s) * w_y * nll + s/V * sum_v w_v * (lse - z_v) + z_loss * lse^2),   nll = lse - z_y.\n\n"
    "Examples:\n"
    "  cutloss loss --e e.npy --c c.npy --labels y.npy --d-e d_e.npy --d-c d_c.npy\n"
    "  cutloss loss --e e.npy --c kernel.npy --head-layout dv --labels y.npy --frozen --budget 64MiB --json\n"
    "  cutloss loss --e e.npy --c c.npy --labels y.npy --label-smoothing 0.1 --z-loss 1e-4 --metrics entropy,correct\n"
    "  cutloss loss --e e.npy --c c.npy --labels tokens.npy --shift 1 --sequence 512     # next-token prediction\n"
    "  cutloss loss --e e.npy --c c.npy --labels y.npy --filter unbiased --tolerance 1e-3 --seed 7 --json";

}  // namespace

void add_loss(CLI::App& app, int& code) {
  CLI::App* const command = app.add_subcommand("loss", "Compute the loss and gradients of arrays in .npy files");
  command->footer(kFooter);
  static LossOptions options;
  for (const LossFiles::Named& file : LossFiles::read()) {
    CLI::Option* const option =
        command->add_option(file.option, options.files.*file.path, file.help)->type_name("FILE");
    option->group("Arrays to read");
    if (file.path == &LossFiles::e || file.path == &LossFiles::c) option->required();
  }
  command->add_option("--cotangent", options.files.cotangent, "Upstream gradient of the loss: a number, or [N]")
      ->type_name("NUMBER|FILE")
      ->group("Arrays to read");

  command->option_defaults()->group("Objective");
  options.problem.add_objective(*command);
  options.problem.add_terms(*command);
  command->add_option("--denominator", options.denominator, "Of a mean (default: the sum of the weights)");
  command->add_option("--shift", options.shift, "Row i goes with label i + shift")->capture_default_str();
  command->add_option("--sequence", options.sequence, "... of its sequence of this many rows; 0: all are one")
      ->capture_default_str();
  command->add_flag("--no-gradient", options.no_gradient, "Loss only");
  command->add_option("--wrt", options.wrt, "Gradients to compute, of e, c, bias (default: all there is)")
      ->delimiter(',')
      ->check(CLI::IsMember({"e", "c", "bias"}))
      ->type_name("NAME,...")
      ->excludes("--frozen")
      ->excludes("--no-gradient");
  command->add_flag("--nan-labels", options.nan_labels, "A label outside [0, V) gives NaN, not an error");
  command->add_option("--metrics", options.metrics, "entropy, argmax, correct, rank, mean_logits, top_k=K")
      ->delimiter(',')
      ->type_name("NAME,...");

  command->option_defaults()->group("Filter: gradients that leave out what hardly counts");
  options.problem.add_filter(*command);
  command->add_option("--seed", options.seed, "Of unbiased's random numbers")->capture_default_str();
  command->add_option("--vocab-order", options.files.vocab_order, "Permutation [V], or 'learned' by mean logit")
      ->type_name("FILE|learned");

  command->option_defaults()->group("How it is done");
  options.problem.add_limits(*command);
  command->add_flag("--compensated", options.compensated, "Keep the rounding errors of dC's sum over chunks");
  command->add_option("--reps", options.reps, "Runs; the best time is shown")
      ->check(at_least(1))
      ->capture_default_str();

  command->option_defaults()->group("Results");
  for (const LossFiles::Named& file : LossFiles::written()) {
    command->add_option(file.option, options.files.*file.path, file.help)->type_name("FILE");
  }
  command->add_flag("--json", options.json, "Print JSON");
  command->callback([&code] { code = loss(options); });
}

}  // namespace cutloss::cli
