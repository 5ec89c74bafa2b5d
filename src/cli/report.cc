#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "src/cli/cli.h"

namespace cutloss::cli {

int report(const Status& status) {
  if (status.ok()) return kOk;
  fmt::print(stderr, "cutloss: error: {}\n", status.message());
  switch (status.code()) {
    case StatusCode::ok: return kOk;
    case StatusCode::invalid_argument: return kBadUsage;
    case StatusCode::budget_too_small:
    case StatusCode::out_of_memory: return kNoMemory;
    case StatusCode::unavailable: return kUnavailable;
  }
  return kBadUsage;
}

int report_usage(std::string_view message) {
  return report(Status(StatusCode::invalid_argument, std::string(message)));
}

// Here, so that ordered_json's parser and printer are compiled once.
void print_json(const Json& value) { fmt::print("{}\n", value.dump(2)); }

Json parse_json(const std::string& text) { return Json::parse(text); }

}  // namespace cutloss::cli
