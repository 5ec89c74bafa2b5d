// cutloss analyze: what gradient filters keep and cost on one's own hidden states, table and labels.
#include "src/cli/analyze.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "src/cli/loss_data.h"
#include "src/cli/options.h"

namespace cutloss::cli {
namespace {

using analysis::Order;
using analysis::Sections;

struct AnalyzeOptions {
  ProblemOptions problem;
  LossFiles files;
  std::string order_file, counts_file, json, tile = "128x128", exponents = "8:26:2", error_order = "sorted";
  std::vector<std::string> what, orders;
  analysis::Options analysis;
};

Status bad(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

struct Section {
  const char* name;
  bool Sections::*wanted;
};
constexpr std::array kSections = {
    Section{"mass", &Sections::mass},
    Section{"shares", &Sections::shares},
    Section{"temperature", &Sections::temperature},
    Section{"map", &Sections::map},
    Section{"d_e", &Sections::d_e},
    Section{"d_c", &Sections::d_c},
    Section{"variants", &Sections::variants},
    Section{"tolerance", &Sections::tolerance},
};

Status read_sections(const std::vector<std::string>& names, Sections& to) {
  if (names.empty()) return Status();
  for (const Section& section : kSections) to.*section.wanted = false;
  for (const std::string& wanted : names) {
    const auto found =
        std::find_if(kSections.begin(), kSections.end(), [&](const Section& s) { return s.name == wanted; });
    if (found == kSections.end()) {
      std::vector<std::string> known;
      for (const Section& s : kSections) known.emplace_back(s.name);
      return bad(fmt::format("--what: '{}' is not one of {} (commas between)", wanted, fmt::join(known, ", ")));
    }
    to.*found->wanted = true;
  }
  if (to.temperature) to.shares = true;
  if (to.variants && !to.d_e && !to.d_c) to.d_e = to.d_c = true;
  return Status();
}

// Whole numbers between separators, nothing else.
std::optional<std::vector<std::int64_t>> numbers(std::string_view text, char separator) {
  std::vector<std::int64_t> out;
  while (true) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc()) return std::nullopt;
    out.push_back(value);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (text.empty()) return out;
    if (text[0] != separator) return std::nullopt;
    text.remove_prefix(1);
  }
}

Status read_tile(const std::string& text, analysis::Options& to) {
  const auto parts = numbers(text, 'x');
  if (!parts || parts->size() != 2) return bad(fmt::format("--tile: '{}' is no TOKENSxIDS, such as 128x128", text));
  to.tile_tokens = (*parts)[0];
  to.tile_vocab = (*parts)[1];
  return Status();
}

Status read_exponents(const std::string& text, analysis::Options& to) {
  to.exponents.clear();
  const auto in_range = [](std::int64_t k) { return k >= 1 && k <= 60; };
  const auto fail = [&] {
    return bad(
        fmt::format("--exponents: '{}' is neither FIRST:LAST[:STEP] nor a rising list such as 8,12,20, of k in "
                    "[1, 60] of epsilon = 2^-k",
                    text));
  };
  auto list = numbers(text, ':');
  if (list && (list->size() == 2 || list->size() == 3)) {
    const std::int64_t step = list->size() == 3 ? (*list)[2] : 1;
    if (step < 1 || !in_range((*list)[0]) || !in_range((*list)[1])) return fail();
    for (std::int64_t k = (*list)[0]; k <= (*list)[1]; k += step) to.exponents.push_back(static_cast<int>(k));
  } else {
    list = numbers(text, ',');
    if (!list || !std::all_of(list->begin(), list->end(), in_range)) return fail();
    for (const std::int64_t k : *list) to.exponents.push_back(static_cast<int>(k));
  }
  return to.exponents.empty() ? fail() : Status();
}

Status read_order(const char* option, const std::string& text, const std::string& file, Order& to) {
  for (const Order order : {Order::natural, Order::sorted, Order::frequency, Order::random, Order::given}) {
    if (analysis::name(order) != text) continue;
    if (order == Order::given && file.empty()) return bad(fmt::format("{} given needs --order FILE", option));
    to = order;
    return Status();
  }
  return bad(fmt::format("{}: '{}' is not one of natural, sorted, frequency, random, given", option, text));
}

Status read_orders(const AnalyzeOptions& options, std::int64_t vocab, analysis::Options& to) {
  if (!options.orders.empty()) to.orders.clear();
  for (const std::string& text : options.orders) {
    to.orders.emplace_back();
    if (Status s = read_order("--orders", text, options.order_file, to.orders.back()); !s.ok()) return s;
  }
  if (Status s = read_order("--error-order", options.error_order, options.order_file, to.error_order); !s.ok())
    return s;
  const auto read = [&](const char* option, const std::string& path, NpyArray& array) {
    Result<NpyArray> result = read_npy(path);
    if (!result.ok()) return Status(result.status().code(), fmt::format("{}: {}", option, result.status().message()));
    array = std::move(result.value());
    if (array.shape == std::vector<std::int64_t>{vocab}) return Status();
    return bad(fmt::format("{} must be [V] = [{}], got shape {}", option, vocab, array.shape_text()));
  };
  NpyArray array;
  if (!options.order_file.empty()) {
    if (Status s = read("--order", options.order_file, array); !s.ok()) return s;
    Result<std::vector<std::int64_t>> ids = to_ids(array, "--order");
    if (!ids.ok()) return ids.status();
    to.given_order = std::move(ids.value());
    if (options.orders.empty()) to.orders.push_back(Order::given);
  }
  if (!options.counts_file.empty()) {
    if (Status s = read("--counts", options.counts_file, array); !s.ok()) return s;
    const std::vector<float> counts = to_floats(array);
    to.counts.assign(counts.begin(), counts.end());
  }
  return Status();
}

// One line on a terminal, rewritten; nothing elsewhere.
void show_progress(std::string_view stage, double done) {
  fmt::print(stderr, "\r\x1b[K{:<14} {:3.0f}%", stage, 100 * done);
  if (done >= 1) fmt::print(stderr, "\r\x1b[K");
  std::fflush(stderr);
}

Status write_json(const std::string& path, const Json& value) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return bad(fmt::format("--json: cannot write {}: {}", path, std::strerror(errno)));
  const std::string text = value.dump() + "\n";
  bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  written = std::fclose(file) == 0 && written;
  return written ? Status() : bad(fmt::format("--json: cannot write {}: {}", path, std::strerror(error)));
}

int analyze(AnalyzeOptions& options) {
  Problem problem = options.problem.problem();
  LossInputs inputs;
  analysis::Options& to = options.analysis;
  for (const Status& s : {read_sections(options.what, to.sections), read_tile(options.tile, to),
                          read_exponents(options.exponents, to), read_inputs(options.files, problem, inputs)}) {
    if (!s.ok()) return report(s);
  }
  if (const Status s = read_orders(options, problem.vocab, to); !s.ok()) return report(s);
  const Result<Machine> machine = options.problem.machine();
  if (!machine.ok()) return report(machine.status());
  to.threads = options.problem.limits().threads;
  if (isatty(STDERR_FILENO) != 0) to.progress = show_progress;
  const Result<analysis::Report> result = analysis::analyze(problem, inputs.inputs, machine.value(), to);
  if (!result.ok()) return report(result.status());
  if (options.json.empty()) {
    print_analysis(result.value(), to);
    return kOk;
  }
  const Json json = analysis_json(result.value(), to, problem);
  if (options.json == "-") {
    print_json(json);
    return kOk;
  }
  return report(write_json(options.json, json));
}

constexpr const char* kFooter =
    "E, C are float32, bfloat16 or float16 as for 'cutloss loss'; G = softmax - onehot(label); epsilon = 2^-k.\n"
    "Logits are formed in f32 by the engine's kernels; probabilities, gradients and their sums are float64.\n\n"
    "Memory does not grow with N x V. A thread holds, for one tile of tokens, a few numbers for each id (shares) or\n"
    "about 32 D bytes for each token and epsilon (d_e), and for one tile of ids the same (d_c). Mass by rank: of each\n"
    "token the largest 256 probabilities are exact, those after them known to 4.4 % from a histogram of 1/16 "
    "octave.\n\n"
    "Sections (--what; all by default):\n"
    "  mass         probability and cumulative mass by rank; entries kept and mass below each epsilon\n"
    "  shares       entries, table rows and tiles with |G| >= epsilon, for each of --orders\n"
    "  temperature  ... and for each of --temperatures\n"
    "  map          the largest |G| of each tile, in natural and --error-order (JSON alone)\n"
    "  d_e, d_c     gradients that leave out what is below epsilon, against float64: entries (drop), entries with the\n"
    "               mean row of their block of 1024 ids in their place (tail), entries by chance (unbiased), whole "
    "tiles\n"
    "  variants     with d_e, d_c: sums in bf16, bf16 with Kahan's correction, float64; tiles filtered at 2^-12, or "
    "all\n"
    "  tolerance    the library's own filters, certified and unbiased, by --tolerances, on dE (and, beside d_c, dC)\n\n"
    "Examples:\n"
    "  cutloss analyze --hidden e.npy --table c.npy --labels y.npy\n"
    "  cutloss analyze --hidden e.npy --table c.npy --labels y.npy --what shares --tile 64x256 --exponents 12\n"
    "  cutloss analyze --hidden e.npy --table c.npy --labels y.npy --sample-tokens 512 --json analysis.json";

}  // namespace

void add_analyze(CLI::App& app, int& code) {
  CLI::App* const command =
      app.add_subcommand("analyze", "Measure what gradient filters keep and cost on given arrays");
  command->footer(kFooter);
  static AnalyzeOptions options;
  analysis::Options& to = options.analysis;
  command->option_defaults()->group("Arrays to read");
  command->add_option("--hidden,--e", options.files.e, "Hidden states E [N, D]")->type_name("FILE")->required();
  command->add_option("--table,--c", options.files.c, "Head's table C, [V, D] or [D, V]")
      ->type_name("FILE")
      ->required();
  command->add_option("--labels", options.files.labels, "Labels [N], any integers")->type_name("FILE")->required();
  command->add_option("--order", options.order_file, "A permutation [V], for the order 'given'")->type_name("FILE");
  command->add_option("--counts", options.counts_file, "Counts [V] for the order 'frequency' (default: of the labels)")
      ->type_name("FILE");

  command->option_defaults()->group("Objective");
  command->add_option("--head-layout", options.problem.head_layout, "C is [V, D] (vd) or [D, V] (dv)")
      ->check(layout_names())
      ->capture_default_str();
  command->add_option("--softcap", options.problem.softcap, "cap * tanh(logit / cap)")->check(float32("softcap"));
  command->add_option("--logit-scale", options.problem.logit_scale, "Of the logits before softcap")
      ->check(float32("logit_scale"))
      ->capture_default_str();
  command->add_option("--ignore-index", options.problem.ignore_index, "Label of a token that does not count")
      ->capture_default_str();

  command->option_defaults()->group("What is measured");
  command->add_option("--what", options.what, "Sections, see below")->delimiter(',')->type_name("NAME,...");
  command->add_option("--tile", options.tile, "Tile of G")->type_name("TOKENSxIDS")->capture_default_str();
  command->add_option("--exponents", options.exponents, "k of epsilon = 2^-k")
      ->type_name("FIRST:LAST[:STEP]|LIST")
      ->capture_default_str();
  command->add_option("--orders", options.orders, "natural, sorted (by mean logit), frequency, random, given")
      ->delimiter(',')
      ->type_name("NAME,...");
  command->add_option("--error-order", options.error_order, "The order of the tiles of d_e, d_c, tolerance")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--temperatures", to.temperatures, "Logits are divided by them")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--tolerances", to.tolerances, "Of the library's filters")->delimiter(',')->capture_default_str();
  command->add_option("--variant-exponent", to.variant_exponent, "k of the variants' epsilon")->capture_default_str();
  command->add_option("--sample-tokens", to.sample_tokens, "At most so many tokens, whole tiles spread evenly; 0: all")
      ->capture_default_str();
  command->add_option("--seed", to.seed, "Of the random order and of unbiased's numbers")->capture_default_str();

  command->option_defaults()->group("How it is done");
  command->add_option("--threads", options.problem.threads, "At most; 0: as many as the machine allows")
      ->capture_default_str();
  command->add_option("--target", options.problem.target, "Kernel target, see 'cutloss info'");
  command->add_option("--json", options.json, "Write JSON, to a file or (no name) to standard output")
      ->type_name("[FILE]")
      ->expected(0, 1)
      ->default_str("-");
  command->callback([&code] { code = analyze(options); });
}

}  // namespace cutloss::cli
