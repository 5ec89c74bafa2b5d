// `cutloss NAME` for a NAME that is no subcommand runs `cutloss-NAME`, as git does.
#include <dirent.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include "src/cli/cli.h"

namespace cutloss::cli {
namespace {

namespace fs = std::filesystem;

// The executable's own directory, so that the tools of a virtual environment are found without activating it; then
// PATH. Relative entries of PATH are skipped: what runs should not depend on where one stands.
std::vector<fs::path> directories() {
  std::vector<fs::path> out;
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (!error) out.push_back(self.parent_path());
  const char* const variable = std::getenv("PATH");
  std::string_view path = variable == nullptr ? "" : variable;
  while (!path.empty()) {
    const std::size_t end = std::min(path.find(':'), path.size());
    if (path[0] == '/') out.emplace_back(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  return out;
}

bool is_program(const fs::path& file) {
  std::error_code error;
  return fs::is_regular_file(file, error) && access(file.c_str(), X_OK) == 0;
}

std::vector<std::string> external_names() {
  std::set<std::string> names;
  for (const fs::path& directory : directories()) {
    std::error_code error;
    for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
      const std::string file = entry->path().filename();
      if (file.starts_with("cutloss-") && is_program(entry->path())) names.insert(file.substr(8));
    }
  }
  return {names.begin(), names.end()};
}

std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> suggestions(std::string_view word, const std::vector<std::string>& names) {
  std::vector<std::pair<std::size_t, std::string>> near;
  for (const std::string& name : names) {
    const std::size_t distance = name.starts_with(word) ? 0 : edits(word, name);
    if (distance <= 2 && distance < name.size()) near.emplace_back(distance, name);
  }
  std::sort(near.begin(), near.end());
  std::vector<std::string> out;
  for (auto& [distance, name] : near) out.push_back(std::move(name));
  return out;
}

int run_external(const std::string& name, char** arguments, std::vector<std::string> subcommands) {
  const bool plain = std::all_of(name.begin(), name.end(),
                                 [](unsigned char ch) { return std::isalnum(ch) || ch == '-' || ch == '_'; });
  if (plain) {
    for (const fs::path& directory : directories()) {
      const std::string program = directory / ("cutloss-" + name);
      if (!is_program(program)) continue;
      std::string first = program;
      arguments[0] = first.data();
      execv(program.c_str(), arguments);
      return report_usage(fmt::format("cannot run {}: {}", program, std::strerror(errno)));
    }
  }
  for (std::string& external : external_names()) subcommands.push_back(std::move(external));
  const std::vector<std::string> near = suggestions(name, subcommands);
  std::string hint = "'cutloss --help' lists the subcommands";
  if (!near.empty()) hint = fmt::format("did you mean {}?", fmt::join(near, " or "));
  return report_usage(
      fmt::format("'{}' is no subcommand, and there is no program cutloss-{} on the PATH; {}", name, name, hint));
}

}  // namespace cutloss::cli
