// What the subcommands share: exit codes, errors, names, tables, JSON. Options are in options.h, so that only files
// which declare some compile CLI11.
//
// A subcommand is one file with one function here: it adds itself to the app and leaves its exit code in `code`.
#ifndef CUTLOSS_SRC_CLI_CLI_H_
#define CUTLOSS_SRC_CLI_CLI_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cutloss/cutloss.hpp"

namespace CLI {
class App;
}

namespace cutloss::cli {

using Json = nlohmann::ordered_json;

enum ExitCode {
  kOk = 0,
  kCheckFailed = 1,  // a result was wrong
  kBadUsage = 2,     // an option or an input
  kNoMemory = 3,     // budget too small, or out of memory
  kUnavailable = 4,  // a kernel target that this CPU or build does not have
};

// Prints the message on stderr and gives the exit code of its kind.
int report(const Status& status);
int report_usage(std::string_view message);

void add_info(CLI::App& app, int& code);
void add_plan(CLI::App& app, int& code);
void add_check(CLI::App& app, int& code);
void add_bench(CLI::App& app, int& code);
void add_tune(CLI::App& app, int& code);
void add_loss(CLI::App& app, int& code);
void add_analyze(CLI::App& app, int& code);

// Runs `cutloss-NAME` from the directory of this executable or from PATH, in place of this process. Returns only if
// there is none, with kBadUsage, after having said so on stderr.
int run_external(const std::string& name, char** arguments, std::vector<std::string> subcommands);

// Names within two edits of word, nearest first.
std::vector<std::string> suggestions(std::string_view word, const std::vector<std::string>& names);

// --------------------------------------------------------------------------------------------------- names

// The inverse of name(); the text is one that the option's validator has let through.
DType parse_dtype(std::string_view text);
HeadLayout parse_layout(std::string_view text);
Reduction parse_reduction(std::string_view text);
Mode parse_mode(std::string_view text);
Filter parse_filter(std::string_view text);

// --------------------------------------------------------------------------------------------------- printing

std::string human_bytes(std::uint64_t bytes);  // "32.0 KiB"
std::string human_seconds(double seconds);     // "1.25 ms"

// Two aligned columns, name and value; an empty name goes on with the value above.
void print_facts(const std::vector<std::pair<std::string, std::string>>& facts);

// Aligned columns under a header; all but the first column are set flush right.
void print_table(const std::vector<std::vector<std::string>>& rows);

std::vector<std::pair<std::string, std::string>> plan_facts(const Plan& plan);

void print_json(const Json& value);
Json parse_json(const std::string& text);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_CLI_H_
