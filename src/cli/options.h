// The options that subcommands share.
#ifndef CUTLOSS_SRC_CLI_OPTIONS_H_
#define CUTLOSS_SRC_CLI_OPTIONS_H_

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "cutloss/cutloss.hpp"
#include "src/cli/cli.h"

namespace cutloss::cli {

// The options of a problem and of a plan, with the spelling of the fields of Problem and Limits.
struct ProblemOptions {
  std::int64_t n = 512, v = 32768, d = 640;
  std::string dtype = "f32", e_dtype, c_dtype, head_layout = "vd", reduction = "mean", mode = "auto", target;
  std::int64_t ignore_index = -100;
  std::optional<float> softcap, tolerance, epsilon;
  float logit_scale = 1, label_smoothing = 0, z_loss = 0;
  std::string filter = "none";
  std::optional<std::uint64_t> budget;
  std::int64_t threads = 0;
  bool frozen = false;

  void add_shape(CLI::App& command);      // --n --v --d --dtype --e-dtype --c-dtype
  void add_objective(CLI::App& command);  // --head-layout --softcap --reduction --ignore-index --frozen
  void add_terms(CLI::App& command);      // --logit-scale --label-smoothing --z-loss
  void add_filter(CLI::App& command);     // --filter --tolerance --epsilon
  void add_limits(CLI::App& command);     // --mode --budget --threads --target

  Problem problem() const;          // gradients: dE, and dC unless frozen; none in mode loss
  Result<Machine> machine() const;  // detected, with --target in place of its target; an error for bad --threads
  Limits limits() const;            // after machine()
};

// Validators with the names that name() gives.
CLI::Validator dtype_names();
CLI::Validator layout_names();
CLI::Validator reduction_names();
CLI::Validator mode_names();
CLI::Validator filter_names();

// CLI11's own says what a number may be with all 309 digits of the largest double.
CLI::Validator at_least(int low);

// Checks that a number is one of float32, not 0 or infinite there; argument: its field's name.
CLI::Validator float32(const char* argument);

// Adds to every option that takes a whole number the check that it fits 64 bits: CLI11 would take the nearest that
// does.
void refuse_numbers_beyond_64_bits(CLI::App& app);

// "64MiB", "1.5 GB" or plain bytes; KiB, MiB, ... are powers of 1024, KB, MB, ... of 1000.
void add_bytes_option(CLI::App& command, const std::string& name, std::optional<std::uint64_t>& value,
                      const std::string& help);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_OPTIONS_H_
