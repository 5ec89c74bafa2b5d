#include "src/cli/plan_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "src/cli/bench_data.h"
#include "src/plan/speeds.h"
#include "src/plan/text_file.h"

namespace cutloss::cli {
namespace {

// What a filter keeps on the head of Gemma 3 270M with English text at these epsilons (docs/design.md); of tiles, what
// Cut Cross-Entropy keeps of Qwen 2.5 0.5B's, sorted, by the measurement that docs/cost-model.md names.
struct Typical {
  Filter filter;
  float epsilon;
  double kept;
};
constexpr std::array kTypical = {Typical{Filter::certified, 0x1p-20f, 0.021},
                                 Typical{Filter::unbiased, 0x1p-14f, 0.0054}, Typical{Filter::tile, 0x1p-12f, 0.49}};

struct Row {
  std::optional<Mode> mode;  // none: the dense loss
  Problem problem;
  Kept kept;
  std::optional<Plan> plan;
  Status refused;
  Cost cost;
  double measured = 0;
};

std::string mode_name(const Row& row) { return row.mode ? std::string(name(*row.mode)) : "dense"; }

std::string gradients(const Problem& p) { return p.want_d_c ? "dE, dC" : p.want_d_e ? "dE" : "none"; }

class Table {
 public:
  Table(const ProblemOptions& problem, const CostOptions& options) : asked_(problem), options_(options) {}

  // Leaves rows(), or says what is wrong.
  Status make() {
    Result<Machine> machine = asked_.machine();
    if (!machine.ok()) return machine.status();
    machine_ = std::move(machine.value());
    if (asked_.threads > 0) machine_.threads = asked_.limits().threads;
    const Problem problem = asked_.problem();
    if (problem.tokens < 1) {
      return {StatusCode::invalid_argument, fmt::format("--n {}: nothing to do, give at least 1", problem.tokens)};
    }
    if (Status s = validate(problem); !s.ok()) return s;
    if (Status s = read_machine(); !s.ok()) return s;
    list(problem);
    if (options_.measure) return measure();
    for (Row& row : rows_) row.cost = predicted(row);
    return Status();
  }

  const Speeds& speeds() const { return speeds_; }
  const std::vector<Row>& rows() const { return rows_; }

 private:
  Status read_machine() {
    if (options_.machine == "here") {
      Result<Speeds> here = measure_machine(machine_, machine_.threads);
      if (here.ok()) speeds_ = std::move(here.value());
      return here.status();
    }
    if (const std::optional<Speeds> known = known_machine(options_.machine)) {
      speeds_ = *known;
      return Status();
    }
    const std::string content = read_text_file(options_.machine);
    if (content.empty()) {
      return {StatusCode::invalid_argument,
              fmt::format("--machine is '{}'; it must be here, {} or a file that can be read and is not empty",
                          options_.machine, fmt::join(machine_names(), ", "))};
    }
    Result<Speeds> described = parse_machine(content, options_.machine);
    if (!described.ok()) return described.status();
    speeds_ = std::move(described.value());
    machine_.threads = speeds_.threads;
    machine_.l3_bytes = static_cast<std::size_t>(std::min(speeds_.cache_bytes, 0x1p40));
    return Status();
  }

  void list(const Problem& asked) {
    for (const bool d_e : {false, true}) {
      for (const bool d_c : {false, true}) {
        if ((d_c && !d_e) || (d_e && !asked.want_d_e) || (d_c && !asked.want_d_c)) continue;
        Problem p = asked;
        p.filter = Filter::none;
        p.tolerance.reset();
        p.epsilon.reset();
        p.want_d_e = d_e;
        p.want_d_c = d_c;
        if (asked.filter == Filter::none) {
          add(std::nullopt, p, {});
          for (const Mode mode : legal_modes(p)) add(mode, p, {});
        }
        if (d_e) list_filters(asked, p);
      }
    }
  }

  void list_filters(const Problem& asked, Problem p) {
    for (const Typical& typical : kTypical) {
      if (asked.filter != Filter::none && asked.filter != typical.filter) continue;
      p.filter = typical.filter;
      p.tolerance = asked.tolerance;
      p.epsilon = asked.epsilon;
      if (!p.tolerance && !p.epsilon) p.epsilon = typical.epsilon;
      const double redone = p.filter == Filter::tile ? 0 : options_.redone_share.value_or(0);
      add(legal_modes(p).front(), p, {options_.kept_share.value_or(typical.kept), redone});
    }
  }

  void add(std::optional<Mode> mode, const Problem& p, const Kept& kept) {
    if (asked_.limits().mode != Mode::automatic && mode != asked_.limits().mode) return;
    Row row{mode, p, kept, {}, {}, {}, 0};
    if (mode && speeds_.kernels) {
      Limits limits = asked_.limits();
      limits.mode = *mode;
      Result<Plan> plan = make_plan(p, limits, machine_);
      row.refused = plan.status();
      if (plan.ok()) row.plan = std::move(plan.value());
    }
    rows_.push_back(std::move(row));
  }

  Cost predicted(const Row& row) const {
    if (!row.mode) return predict_dense(row.problem, speeds_);
    if (row.plan) return predict(*row.plan, speeds_, row.kept);
    return row.refused.ok() ? predict_on(row.problem, *row.mode, speeds_, row.kept) : Cost{};
  }

  // Predicts and runs each row in turn, so that both see the machine in the same state.
  Status measure() {
    BenchArrays arrays = make_bench_arrays(asked_.problem(), 1, machine_.threads);
    for (Row& row : rows_) {
      if (row.plan) {
        if (Status s = read_machine(); !s.ok()) return s;
        if (Status s = time(row, arrays); !s.ok()) return s;
      }
      row.cost = predicted(row);
    }
    return Status();
  }

  Status time(Row& row, BenchArrays& a) const {
    const Problem& p = row.problem;
    a.workspace.resize(row.plan->workspace_bytes);
    FilterReport report;
    std::vector<double> seconds;
    for (std::int64_t rep = 0; rep <= options_.reps; ++rep) {  // the first to warm up
      const auto start = std::chrono::steady_clock::now();
      const Status status = run(*row.plan, {.e = a.e.data(), .c = a.c.data(), .labels = a.labels.data()},
                                {.loss = p.reduction == Reduction::none ? a.losses.data() : &a.loss,
                                 .d_e = p.want_d_e ? a.d_e.data() : nullptr,
                                 .d_c = p.want_d_c ? a.d_c.data() : nullptr,
                                 .filter_report = p.filter == Filter::none ? nullptr : &report},
                                a.workspace);
      if (!status.ok()) return status;
      if (rep > 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(seconds.begin(), seconds.end());
    row.measured = seconds[seconds.size() / 2];
    if (p.filter == Filter::none) return Status();
    const double stayed = static_cast<double>(report.rows - report.rows_redone);
    row.kept.redone = 1 - stayed / static_cast<double>(std::max<std::int64_t>(report.rows, 1));
    row.kept.share = report.kept_entries / (std::max(stayed, 1.0) * static_cast<double>(p.vocab));
    return Status();
  }

  const ProblemOptions& asked_;
  const CostOptions& options_;
  Machine machine_;
  Speeds speeds_;
  std::vector<Row> rows_;
};

std::string percent(double share) { return fmt::format("{:.3g} %", 100 * share); }

void print_rows(const Table& table, bool measured) {
  const Speeds& s = table.speeds();
  print_facts(
      {{"machine", s.name},
       {"source", s.source},
       {"peak", fmt::format("{:.4g} GFLOP/s f32, {:.4g} GFLOP/s bf16", s.f32_flops / 1e9, s.bf16_flops / 1e9)},
       {"bandwidth", fmt::format("{:.4g} GB/s", s.bandwidth / 1e9)},
       {"cache", human_bytes(static_cast<std::uint64_t>(s.cache_bytes))},
       {"times", s.kernels ? "of our kernels, with what they were measured to waste"
                           : "of products and memory traffic alone: a lower bound, nothing was measured there"}});
  std::vector<std::vector<std::string>> lines = {
      {"mode", "gradients", "filter", "kept", "redone", "GFLOP", "traffic", "bound by", "predicted"}};
  if (measured) lines.front().insert(lines.front().end(), {"measured", "measured / predicted"});
  std::vector<std::string> refused;
  for (const Row& row : table.rows()) {
    if (!row.refused.ok()) {
      refused.push_back(fmt::format("no {}: {}", mode_name(row), row.refused.message()));
      continue;
    }
    const bool filtered = row.problem.filter != Filter::none;
    const double seconds = row.cost.seconds();
    lines.push_back({mode_name(row), gradients(row.problem), filtered ? std::string(name(row.problem.filter)) : "",
                     filtered ? percent(row.kept.share) : "", filtered ? percent(row.kept.redone) : "",
                     fmt::format("{:.{}f}", row.cost.flops() / 1e9, row.cost.flops() < 1e11 ? 3 : 0),
                     human_bytes(static_cast<std::uint64_t>(row.cost.bytes())),
                     row.cost.memory_bound() ? "memory" : "compute", human_seconds(seconds)});
    if (!measured) continue;
    lines.back().push_back(row.measured > 0 ? human_seconds(row.measured) : "");
    lines.back().push_back(row.measured > 0 ? fmt::format("{:.2f}", row.measured / seconds) : "");
  }
  fmt::print("\n");
  print_table(lines);
  for (const std::string& line : refused) fmt::print("{}\n", line);
}

Json row_json(const Row& row) {
  Json out = {{"mode", mode_name(row)},
              {"d_e", row.problem.want_d_e},
              {"d_c", row.problem.want_d_c},
              {"filter", name(row.problem.filter)}};
  if (!row.refused.ok()) {
    out["refused"] = row.refused.message();
    return out;
  }
  if (row.problem.filter != Filter::none) {
    out["kept_share"] = row.kept.share;
    out["redone_share"] = row.kept.redone;
  }
  out["flops"] = row.cost.flops();
  out["bytes"] = row.cost.bytes();
  out["bound"] = row.cost.memory_bound() ? "memory" : "compute";
  out["seconds"] = row.cost.seconds();
  if (row.measured > 0) out["measured_seconds"] = row.measured;
  if (row.plan) out["plan"] = parse_json(row.plan->json());
  out["stages"] = Json::array();
  for (const Stage& stage : row.cost.stages()) {
    out["stages"].push_back({{"name", stage.name},
                             {"flops", stage.flops},
                             {"bytes", stage.bytes},
                             {"compute_seconds", stage.compute_seconds},
                             {"memory_seconds", stage.memory_seconds}});
  }
  return out;
}

Json table_json(const Table& table, const Problem& p) {
  const Speeds& s = table.speeds();
  Json rows = Json::array();
  for (const Row& row : table.rows()) rows.push_back(row_json(row));
  return {{"machine",
           {{"name", s.name},
            {"source", s.source},
            {"measured_kernels", s.kernels},
            {"threads", s.threads},
            {"f32_flops", s.f32_flops},
            {"bf16_flops", s.bf16_flops},
            {"bandwidth", s.bandwidth},
            {"cache_bytes", s.cache_bytes}}},
          {"n", p.tokens},
          {"v", p.vocab},
          {"d", p.hidden},
          {"e_dtype", name(p.e_dtype)},
          {"c_dtype", name(p.c_dtype)},
          {"rows", rows}};
}

// Three times of Cut Cross-Entropy: what share of its tiles it must have kept.
int print_inferred(const CostOptions& options, bool json) {
  const double again = options.infer[0], unfiltered = options.infer[1];
  const Result<double> share = inferred_share(again, unfiltered, options.infer[2]);
  if (!share.ok()) return report(share.status());
  const std::optional<double> kept = options.kept_share;
  const double time = kept ? filtered_time(again, unfiltered, *kept) : 0;
  if (json) {
    Json out = {{"kept_share", share.value()}};
    if (kept) out["time"] = time;
    print_json(out);
    return kOk;
  }
  std::vector<std::pair<std::string, std::string>> facts = {
      {"kept share",
       fmt::format("{:.4f}, if a pass takes {:g} + share x ({:g} - {:g})", share.value(), again, unfiltered, again)}};
  if (kept) facts.emplace_back("time", fmt::format("{:.4g} at a kept share of {:g}", time, *kept));
  print_facts(facts);
  return kOk;
}

std::string check_share(const std::string& text) {  // CLI::Range lets NaN through
  const double share = std::strtod(text.c_str(), nullptr);
  return share >= 0 && share <= 1 ? std::string() : text + " is not in [0, 1]";
}

}  // namespace

void CostOptions::add(CLI::App& command) {
  command.add_flag("--costs", costs, "Print what every mode would cost: FLOP, memory traffic, time");
  command
      .add_option("--machine", machine, "For --costs: here (measured), v5e, a100, h100, or a file that describes one")
      ->type_name("NAME|FILE")
      ->capture_default_str();
  command
      .add_option("--kept-share", kept_share,
                  "For --costs: entries (filter tile: tiles) that a filter keeps, as 'cutloss analyze' measures it")
      ->check(check_share);
  command.add_option("--redone-share", redone_share, "For --costs: rows that a filter leaves to be done exactly")
      ->check(check_share);
  command.add_flag("--measure", measure, "For --costs: run each mode on random data too, and compare");
  command.add_option("--reps", reps, "For --measure: timed runs, after one to warm up")
      ->check(at_least(1))
      ->capture_default_str();
  command
      .add_option("--infer-kept", infer,
                  "Times of the logits alone, of the backward pass without and with a filter: prints the share it kept")
      ->expected(3)
      ->type_name("AGAIN UNFILTERED FILTERED");
}

int print_costs(const ProblemOptions& problem, const CostOptions& options, bool json) {
  if (!options.infer.empty()) return print_inferred(options, json);
  if (options.measure && options.machine != "here") {
    return report_usage(fmt::format("--measure with --machine {}: only here can anything be run", options.machine));
  }
  Table table(problem, options);
  if (const Status status = table.make(); !status.ok()) return report(status);
  if (json) {
    print_json(table_json(table, problem.problem()));
  } else {
    print_rows(table, options.measure);
  }
  return kOk;
}

}  // namespace cutloss::cli
