#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "src/cli/options.h"
#include "src/problem/resolve.h"

namespace cutloss::cli {
namespace {

constexpr std::array kFloatTypes = {DType::f32, DType::bf16, DType::f16};
constexpr std::array kLayouts = {HeadLayout::vd, HeadLayout::dv};
constexpr std::array kReductions = {Reduction::mean, Reduction::sum, Reduction::none};
constexpr std::array kModes = {Mode::automatic, Mode::loss, Mode::stream, Mode::chunk, Mode::recompute, Mode::sparse};
constexpr std::array kFilters = {Filter::none, Filter::certified, Filter::unbiased, Filter::tile};

template <typename Values>
CLI::Validator names_of(const Values& values) {
  std::vector<std::string> names;
  for (const auto value : values) names.emplace_back(name(value));
  return CLI::IsMember(names);
}

template <typename Values>
auto parse(const Values& values, std::string_view text) {
  const auto found = std::find_if(values.begin(), values.end(), [&](auto value) { return name(value) == text; });
  return found == values.end() ? values.front() : *found;
}

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !(number >= 0)) return std::nullopt;
  std::string unit(end, text.data() + text.size());
  std::erase(unit, ' ');
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char ch) { return std::tolower(ch); });
  double factor = 1;
  if (!unit.empty() && unit != "b") {
    const std::size_t power = std::string_view("kmgt").find(unit[0]);
    const std::string_view rest = std::string_view(unit).substr(1);
    if (power == std::string_view::npos || (rest != "" && rest != "b" && rest != "ib")) return std::nullopt;
    factor = std::pow(rest == "b" ? 1000.0 : 1024.0, static_cast<double>(power + 1));
  }
  if (number * factor >= 0x1p63) return std::nullopt;
  return static_cast<std::uint64_t>(std::floor(number * factor));
}

}  // namespace

CLI::Validator dtype_names() { return names_of(kFloatTypes); }
CLI::Validator layout_names() { return names_of(kLayouts); }
CLI::Validator reduction_names() { return names_of(kReductions); }
CLI::Validator mode_names() { return names_of(kModes); }
CLI::Validator filter_names() { return names_of(kFilters); }
DType parse_dtype(std::string_view text) { return parse(kFloatTypes, text); }
HeadLayout parse_layout(std::string_view text) { return parse(kLayouts, text); }
Reduction parse_reduction(std::string_view text) { return parse(kReductions, text); }
Mode parse_mode(std::string_view text) { return parse(kModes, text); }
Filter parse_filter(std::string_view text) { return parse(kFilters, text); }

CLI::Validator at_least(int low) {
  const auto check = [low](std::string& text) {
    double value = 0;
    const bool right = CLI::detail::lexical_cast(text, value) && value >= low;
    return right ? std::string() : fmt::format("'{}' is no number of {} or more", text, low);
  };
  return CLI::Validator(check, fmt::format("FROM {}", low), "at_least");
}

CLI::Validator float32(const char* argument) {
  const auto check = [argument](std::string& text) {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value)) return std::string();  // is no number, which is said elsewhere
    return float_from(argument, value).status().message();
  };
  return CLI::Validator(check, "", "float32");
}

void refuse_numbers_beyond_64_bits(CLI::App& app) {
  for (CLI::Option* const option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (!type.starts_with("INT") && !type.starts_with("UINT")) continue;
    option->check([is_signed = type[0] == 'I'](const std::string& text) -> std::string {
      if (!is_signed && text.starts_with('-')) return text + " is negative";
      errno = 0;
      if (is_signed) {
        static_cast<void>(std::strtoll(text.c_str(), nullptr, 0));
      } else {
        static_cast<void>(std::strtoull(text.c_str(), nullptr, 0));
      }
      return errno == ERANGE ? text + " does not fit 64 bits" : "";
    });
  }
  for (CLI::App* const command : app.get_subcommands({})) refuse_numbers_beyond_64_bits(*command);
}

void add_bytes_option(CLI::App& command, const std::string& option, std::optional<std::uint64_t>& value,
                      const std::string& help) {
  command
      .add_option_function<std::string>(
          option, [&value](const std::string& text) { value = parse_bytes(text); }, help)
      ->type_name("BYTES")
      ->check([option](const std::string& text) {
        return parse_bytes(text) ? std::string() : fmt::format("'{}' is no size; try 64MiB, 1.5GB or bytes", text);
      });
}

void ProblemOptions::add_shape(CLI::App& command) {
  command.add_option("--n", n, "Tokens")->capture_default_str();
  command.add_option("--v", v, "Vocabulary")->capture_default_str();
  command.add_option("--d", d, "Hidden size")->capture_default_str();
  command.add_option("--dtype", dtype, "Of E and C")->check(dtype_names())->capture_default_str();
  command.add_option("--e-dtype", e_dtype, "Of E alone")->check(dtype_names());
  command.add_option("--c-dtype", c_dtype, "Of C alone")->check(dtype_names());
}

void ProblemOptions::add_objective(CLI::App& command) {
  command.add_option("--head-layout", head_layout, "C is [V, D] (vd) or [D, V] (dv)")
      ->check(layout_names())
      ->capture_default_str();
  command.add_option("--softcap", softcap, "cap * tanh(logit / cap)")->check(float32("softcap"));
  command.add_option("--reduction", reduction, "Of the tokens' losses")
      ->check(reduction_names())
      ->capture_default_str();
  command.add_option("--ignore-index", ignore_index, "Label of a token that does not count")->capture_default_str();
  command.add_flag("--frozen", frozen, "Gradient of E only, as when the head is not trained");
}

void ProblemOptions::add_terms(CLI::App& command) {
  command.add_option("--logit-scale", logit_scale, "Of the logits before bias and softcap")
      ->check(float32("logit_scale"))
      ->capture_default_str();
  command.add_option("--label-smoothing", label_smoothing, "Share of the loss spread over all ids")
      ->check(float32("label_smoothing"))
      ->capture_default_str();
  command.add_option("--z-loss", z_loss, "Coefficient of lse^2")->check(float32("z_loss"))->capture_default_str();
}

void ProblemOptions::add_filter(CLI::App& command) {
  command.add_option("--filter", filter, "certified: drops and bounds the error; unbiased: right on average; tile")
      ->check(filter_names())
      ->capture_default_str();
  command.add_option("--tolerance", tolerance, "What it may cost a row; rows over it are done exactly")
      ->check(float32("tolerance"));
  command.add_option("--epsilon", epsilon, "In its place: the probability below which entries are filtered")
      ->check(float32("epsilon"));
}

void ProblemOptions::add_limits(CLI::App& command) {
  command.add_option("--mode", mode, "How; see 'cutloss plan'")->check(mode_names())->capture_default_str();
  add_bytes_option(command, "--budget", budget, "Most workspace, such as 64MiB");
  command.add_option("--threads", threads, "At most; 0: as many as the machine allows")->capture_default_str();
  command.add_option("--target", target, "Kernel target, see 'cutloss info' (default: CUTLOSS_TARGET, or the best)");
}

Problem ProblemOptions::problem() const {
  Problem problem;
  problem.tokens = n;
  problem.vocab = v;
  problem.hidden = d;
  problem.e_dtype = parse_dtype(e_dtype.empty() ? dtype : e_dtype);
  problem.c_dtype = parse_dtype(c_dtype.empty() ? dtype : c_dtype);
  problem.head_layout = parse_layout(head_layout);
  problem.reduction = parse_reduction(reduction);
  problem.ignore_index = ignore_index;
  problem.softcap = softcap;
  problem.logit_scale = logit_scale;
  problem.label_smoothing = label_smoothing;
  problem.z_loss = z_loss;
  problem.filter = parse_filter(filter);
  problem.tolerance = tolerance;
  problem.epsilon = epsilon;
  problem.want_d_e = parse_mode(mode) != Mode::loss;
  problem.want_d_c = problem.want_d_e && !frozen;
  return problem;
}

Limits ProblemOptions::limits() const { return {parse_mode(mode), budget, static_cast<int>(threads)}; }

Result<Machine> ProblemOptions::machine() const {
  if (Status s = validate_threads(threads); !s.ok()) return s;
  Result<Machine> machine = Machine::detect();
  if (machine.ok() && machine->tuning_note.starts_with("ignored")) {
    fmt::print(stderr, "cutloss: warning: {}\n", machine->tuning_note);
  }
  if (machine.ok() && !target.empty()) machine->target = target;
  return machine;
}

}  // namespace cutloss::cli
