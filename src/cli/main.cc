// The cutloss tool: one file per subcommand beside this one.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>
#include <string>

#include "src/cli/cli.h"
#include "src/cli/options.h"

namespace {

constexpr const char* kFooter = R"(Examples:
  cutloss info                                      what this machine can run
  cutloss check --cases 500                         compare every kernel and mode with float64
  cutloss bench --n 1024 --v 262144 --d 640 --frozen --dtype bf16
  cutloss tune --n 2048 --v 262144 --d 640 --frozen  block sizes measured on this machine
  cutloss plan --n 8192 --v 262144 --d 640 --budget 256MiB
  cutloss loss --e e.npy --c c.npy --labels y.npy --d-e d_e.npy --frozen
  cutloss analyze --hidden e.npy --table c.npy --labels y.npy   what filters would keep and cost there

`cutloss NAME` with another NAME runs the program cutloss-NAME from this tool's directory or the PATH.

Exit codes: 0 done; 1 a check failed; 2 bad usage or input; 3 the budget is too small or memory ran out;
4 the kernel target asked for is not available.

Environment: CUTLOSS_TARGET forces a kernel target (a name from `cutloss info`); CUTLOSS_TUNING_FILE names the file
of `cutloss tune`.)";

int run(int argc, char** argv) {
  using namespace cutloss::cli;
  CLI::App app("cutloss: the loss of a language model's head and its gradients, without the logits", "cutloss");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string(cutloss::version()));
  app.require_subcommand(1);
  int code = kOk;
  add_info(app, code);
  add_plan(app, code);
  add_check(app, code);
  add_bench(app, code);
  add_tune(app, code);
  add_loss(app, code);
  add_analyze(app, code);
  refuse_numbers_beyond_64_bits(app);

  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  if (argc > 1 && argv[1][0] != '-' && std::find(names.begin(), names.end(), argv[1]) == names.end()) {
    return run_external(argv[1], argv + 1, std::move(names));
  }
  if (argc == 1) {
    fmt::print(stderr, "{}", app.help());
    return kBadUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto chosen = app.get_subcommands();
    const std::string command = chosen.empty() ? "" : " " + chosen[0]->get_name();
    return report_usage(fmt::format("{} (see 'cutloss{} --help')", error.what(), command));
  }
  return code;
}

// A result that nobody could read is no success: what was printed may still be in a buffer, and the disk full.
int finish(int code) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return code;
  std::fprintf(stderr, "cutloss: error: cannot write to standard output: %s\n", std::strerror(errno));
  return code == cutloss::cli::kOk ? cutloss::cli::kBadUsage : code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return finish(run(argc, argv));
  } catch (const std::bad_alloc&) {
    std::fputs("cutloss: error: out of memory\n", stderr);
    return cutloss::cli::kNoMemory;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cutloss: error: %s\n", error.what());
    return cutloss::cli::kBadUsage;
  }
}
