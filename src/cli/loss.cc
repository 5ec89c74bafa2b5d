// cutloss loss: the loss and gradients of arrays in .npy files.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "src/cli/cli.h"
#include "src/cli/data.h"
#include "src/cli/npy.h"
#include "src/cli/options.h"

namespace cutloss::cli {
namespace {

struct LossOptions {
  ProblemOptions problem;
  std::string e, c, labels;
  std::string d_e, d_c, nll, lse;
  bool nan_labels = false;
  bool no_gradient = false;
  int reps = 1;
  bool json = false;
};

Status bad(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

Result<DType> float_type(const NpyArray& array, const std::string& option) {
  if (array.type == NpyType::f32) return DType::f32;
  if (array.type == NpyType::bf16) return DType::bf16;
  return bad(fmt::format("{} holds integers; it must be float32 or bfloat16", option));
}

// Fills in the problem's shapes, dtypes and strides.
Status describe(const NpyArray& e, const NpyArray& c, const NpyArray& labels, Problem& problem) {
  if (e.shape.size() != 2) return bad(fmt::format("--e must be [N, D], got shape {}", e.shape_text()));
  if (c.shape.size() != 2) {
    return bad(fmt::format("--c must be [V, D], or [D, V] with --head-layout dv, got shape {}", c.shape_text()));
  }
  if (labels.shape.size() != 1) return bad(fmt::format("--labels must be [N], got shape {}", labels.shape_text()));
  const bool vd = problem.head_layout == HeadLayout::vd;
  const std::int64_t hidden = c.shape[vd ? 1 : 0];
  if (e.shape[1] != hidden) {
    const bool swapped = e.shape[1] == c.shape[vd ? 0 : 1];
    return bad(fmt::format("--e {} and --c {} disagree on D with --head-layout {}{}", e.shape_text(), c.shape_text(),
                           name(problem.head_layout), swapped ? (vd ? "; is it dv?" : "; is it vd?") : ""));
  }
  if (e.shape[0] != labels.shape[0]) {
    return bad(fmt::format("--e {} and --labels {} disagree on N", e.shape_text(), labels.shape_text()));
  }
  const Result<DType> e_type = float_type(e, "--e");
  if (!e_type.ok()) return e_type.status();
  const Result<DType> c_type = float_type(c, "--c");
  if (!c_type.ok()) return c_type.status();
  problem.tokens = e.shape[0];
  problem.hidden = e.shape[1];
  problem.vocab = c.shape[vd ? 0 : 1];
  problem.e_dtype = e_type.value();
  problem.c_dtype = c_type.value();
  problem.label_dtype = DType::i64;
  problem.e_strides = Strides{e.strides[0], e.strides[1]};
  problem.c_strides = Strides{c.strides[0], c.strides[1]};
  return {};
}

// An output that would overwrite an input or another output, or "".
std::string clash(const LossOptions& options) {
  const std::pair<const char*, const std::string*> files[] = {
      {"--e", &options.e},     {"--c", &options.c},     {"--labels", &options.labels}, {"--d-e", &options.d_e},
      {"--d-c", &options.d_c}, {"--nll", &options.nll}, {"--lse", &options.lse}};
  constexpr std::size_t kInputs = 3;
  std::error_code ignored;
  for (std::size_t b = kInputs; b < std::size(files); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (files[a].second->empty() || files[b].second->empty()) continue;
      if (std::filesystem::weakly_canonical(*files[a].second, ignored) ==
          std::filesystem::weakly_canonical(*files[b].second, ignored)) {
        return fmt::format("{} and {} name the same file, {}", files[a].first, files[b].first, *files[b].second);
      }
    }
  }
  return "";
}

int loss(const LossOptions& options) {
  if (const std::string both = clash(options); !both.empty()) return report_usage(both);
  const auto read = [](const std::string& option, const std::string& path) -> Result<NpyArray> {
    Result<NpyArray> array = read_npy(path);
    if (!array.ok()) return Status(array.status().code(), fmt::format("{}: {}", option, array.status().message()));
    return array;
  };
  const Result<NpyArray> e = read("--e", options.e);
  if (!e.ok()) return report(e.status());
  const Result<NpyArray> c = read("--c", options.c);
  if (!c.ok()) return report(c.status());
  const Result<NpyArray> label_file = read("--labels", options.labels);
  if (!label_file.ok()) return report(label_file.status());

  Problem problem = options.problem.problem();
  if (options.no_gradient) problem.want_d_e = problem.want_d_c = false;
  if (options.nan_labels) problem.bad_labels = BadLabels::nan;
  if (!options.d_e.empty() && !problem.want_d_e) return report_usage("--d-e: no gradient is computed without one");
  if (!options.d_c.empty() && !problem.want_d_c) {
    return report_usage("--d-c: the head gets no gradient with --frozen, --no-gradient or --mode loss");
  }
  const Status described = describe(e.value(), c.value(), label_file.value(), problem);
  if (!described.ok()) return report(described);
  const Result<std::vector<std::int64_t>> labels = to_labels(label_file.value());
  if (!labels.ok()) return report(labels.status());

  const Result<Machine> machine = options.problem.machine();
  if (!machine.ok()) return report(machine.status());
  const Result<Plan> plan = make_plan(problem, options.problem.limits(), machine.value());
  if (!plan.ok()) return report(plan.status());

  const std::int64_t n = problem.tokens;
  const DType d_e_type = problem.d_e_dtype.value_or(problem.e_dtype);
  const DType d_c_type = problem.d_c_dtype.value_or(problem.c_dtype);
  std::vector<float> losses(problem.reduction == Reduction::none ? static_cast<std::size_t>(n) : 1);
  std::vector<float> nll(static_cast<std::size_t>(n)), lse(static_cast<std::size_t>(n));
  std::vector<std::byte> d_e = array_of(d_e_type, problem.want_d_e ? n * problem.hidden : 0);
  std::vector<std::byte> d_c = array_of(d_c_type, problem.want_d_c ? problem.vocab * problem.hidden : 0);
  std::vector<std::byte> workspace(plan->workspace_bytes);
  std::int64_t valid = 0;

  double seconds = std::numeric_limits<double>::infinity();
  for (int rep = 0; rep < options.reps; ++rep) {
    const auto start = std::chrono::steady_clock::now();
    const Status status = run(plan.value(), {.e = e->data, .c = c->data, .labels = labels->data()},
                              {.loss = losses.data(),
                               .nll = nll.data(),
                               .lse = lse.data(),
                               .d_e = problem.want_d_e ? d_e.data() : nullptr,
                               .d_c = problem.want_d_c ? d_c.data() : nullptr,
                               .valid_count = &valid},
                              workspace);
    if (!status.ok()) return report(status);
    seconds = std::min(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }

  const struct {
    const std::string& path;
    DType dtype;
    std::vector<std::int64_t> shape;
    const void* data;
  } files[] = {{options.d_e, d_e_type, {n, problem.hidden}, d_e.data()},
               {options.d_c, d_c_type, c->shape, d_c.data()},
               {options.nll, DType::f32, {n}, nll.data()},
               {options.lse, DType::f32, {n}, lse.data()}};
  for (const auto& file : files) {
    if (file.path.empty()) continue;
    const Status status = write_npy(file.path, file.dtype, file.shape, file.data);
    if (!status.ok()) return report(status);
  }

  if (options.json) {
    // JSON has no NaN: such a loss is null.
    Json out = {{"loss", losses}};
    if (problem.reduction != Reduction::none) out["loss"] = losses[0];
    out.update({{"valid_count", valid},
                {"n", n},
                {"v", problem.vocab},
                {"d", problem.hidden},
                {"mode", name(plan->mode)},
                {"target", plan->target},
                {"threads", plan->threads},
                {"seconds", seconds},
                {"extra_bytes", plan->workspace_bytes}});
    print_json(out);
    return kOk;
  }
  std::vector<std::pair<std::string, std::string>> facts;
  if (problem.reduction == Reduction::none) {
    facts.emplace_back("loss", fmt::format("{} values; --nll FILE writes them", n));
  } else {
    facts.emplace_back("loss", fmt::format("{:.9g}", losses[0]));
  }
  facts.insert(facts.end(),
               {{"tokens that count", fmt::format("{} of {}", valid, n)},
                {"mode", fmt::format("{} on {}, {} threads", name(plan->mode), plan->target, plan->threads)},
                {"time", fmt::format("{} ({})", human_seconds(seconds),
                                     options.reps == 1 ? "one run" : fmt::format("best of {}", options.reps))},
                {"extra memory", fmt::format("{} beyond inputs and gradients", human_bytes(plan->workspace_bytes))}});
  print_facts(facts);
  return kOk;
}

}  // namespace

void add_loss(CLI::App& app, int& code) {
  CLI::App* const command = app.add_subcommand("loss", "Compute the loss and gradients of arrays in .npy files");
  command->footer(
      "E and C are float32 or bfloat16 (as numpy saves ml_dtypes.bfloat16), labels any integers. Gradients are\n"
      "computed, and timed, whether they are written or not; --frozen, --no-gradient leave them out.\n\n"
      "Examples:\n"
      "  cutloss loss --e e.npy --c c.npy --labels y.npy --d-e d_e.npy --d-c d_c.npy\n"
      "  cutloss loss --e e.npy --c kernel.npy --head-layout dv --labels y.npy --frozen --budget 64MiB --json");
  static LossOptions options;
  command->add_option("--e", options.e, "Hidden states [N, D]")->required()->type_name("FILE");
  command->add_option("--c", options.c, "Head's table, [V, D] or [D, V]")->required()->type_name("FILE");
  command->add_option("--labels", options.labels, "Labels [N]")->required()->type_name("FILE");
  options.problem.add_objective(*command);
  command->add_flag("--no-gradient", options.no_gradient, "Loss only");
  command->add_flag("--nan-labels", options.nan_labels, "A label outside [0, V) gives NaN, not an error");
  options.problem.add_limits(*command);
  command->add_option("--d-e", options.d_e, "Write the gradient of E here")->type_name("FILE");
  command->add_option("--d-c", options.d_c, "Write the gradient of C here")->type_name("FILE");
  command->add_option("--nll", options.nll, "Write each token's loss here")->type_name("FILE");
  command->add_option("--lse", options.lse, "Write each token's log-sum-exp here")->type_name("FILE");
  command->add_option("--reps", options.reps, "Runs; the best time is shown")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--json", options.json, "Print JSON");
  command->callback([&code] { code = loss(options); });
}

}  // namespace cutloss::cli
