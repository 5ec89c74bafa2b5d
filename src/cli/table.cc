#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "src/cli/cli.h"

namespace cutloss::cli {
namespace {

// Columns on the screen: bytes that begin a character of UTF-8.
std::size_t width(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char ch) { return (static_cast<unsigned char>(ch) & 0xC0) != 0x80; }));
}

std::string padding(std::size_t columns, std::string_view text) {
  return std::string(columns - std::min(columns, width(text)), ' ');
}

}  // namespace

std::string human_bytes(std::uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return fmt::format("{:.1f} {}iB", value, " KMGT"[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds >= 1) return fmt::format("{:.3f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.3f} ms", seconds * 1e3);
  return fmt::format("{:.3f} us", seconds * 1e6);
}

void print_facts(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::size_t columns = 0;
  for (const auto& [key, value] : facts) columns = std::max(columns, width(key));
  for (const auto& [key, value] : facts) fmt::print("{}{}  {}\n", key, padding(columns, key), value);
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> columns;
  for (const auto& row : rows) {
    columns.resize(std::max(columns.size(), row.size()));
    for (std::size_t k = 0; k < row.size(); ++k) columns[k] = std::max(columns[k], width(row[k]));
  }
  for (const auto& row : rows) {
    for (std::size_t k = 0; k < row.size(); ++k) {
      const std::string space = padding(columns[k], row[k]);
      if (k == 0) {
        fmt::print("{}{}", row[k], space);
      } else {
        fmt::print("  {}{}", space, row[k]);
      }
    }
    fmt::print("\n");
  }
}

std::vector<std::pair<std::string, std::string>> plan_facts(const Plan& plan) {
  std::vector<std::pair<std::string, std::string>> facts = {
      {"mode", std::string(name(plan.mode))},
      {"cost", fmt::format("{:g}u, {:.3g} GFLOP", plan.units, plan.flops / 1e9)},
      {"workspace", human_bytes(plan.workspace_bytes)},
      {"lower bound", fmt::format("{:.1f} MiB: the gradients; the workspace comes on top",
                                  static_cast<double>(gradient_bytes(plan.problem)) / (1 << 20))},
      {"target", plan.target},
      {"threads", fmt::format("{}", plan.threads)},
      {"tiles", fmt::format("{} tokens x {} vocabulary rows{}", plan.token_block, plan.vocab_tile,
                            plan.tuned ? " (measured by 'cutloss tune')" : "")},
  };
  if (plan.vocab_slices > 1) facts.emplace_back("vocabulary slices", fmt::format("{}", plan.vocab_slices));
  if (plan.chunk_tokens > 0) facts.emplace_back("chunk", fmt::format("{} tokens", plan.chunk_tokens));
  if (plan.mode == Mode::sparse) {
    facts.emplace_back("filter", fmt::format("p < {:.3g} ({})", plan.epsilon, name(plan.problem.filter)));
    facts.emplace_back("redone rows", std::string(name(plan.exact->mode)));
  }
  for (const Rejection& rejection : plan.rejected) {
    facts.emplace_back(fmt::format("not {}", name(rejection.mode)), rejection.reason);
  }
  return facts;
}

}  // namespace cutloss::cli
