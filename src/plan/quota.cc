#include "src/plan/quota.h"

#include <algorithm>
#include <cstdlib>

#include "src/plan/cgroup.h"
#include "src/plan/text_file.h"

namespace cutloss {
namespace {

// A number at the front of `text`; 0 if there is none, as in "max".
double number(const char* text, const char** rest) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  *rest = end;
  return end == text ? 0 : value;
}

// "quota period" of cgroup v2's cpu.max, or v1's pair of files; quota <= 0 if unlimited or unreadable.
double limit_of(const std::string& folder) {
  std::string text = read_text_file(folder + "/cpu.max");
  if (text.empty()) {
    text = read_text_file(folder + "/cpu.cfs_quota_us") + " " + read_text_file(folder + "/cpu.cfs_period_us");
  }
  const char* rest = nullptr;
  const double quota = number(text.c_str(), &rest);
  const double period = number(rest, &rest);
  return quota > 0 && period > 0 ? quota / period : -1;
}

}  // namespace

int cpu_quota(const std::string& root, const std::string& membership) {
  double tightest = -1;
  for_each_cgroup(root, membership, "cpu", [&](const std::string& folder) {
    const double limit = limit_of(folder);
    if (limit > 0) tightest = tightest < 0 ? limit : std::min(tightest, limit);
  });
  if (tightest < 0) return 0;
  return static_cast<int>(std::clamp(tightest, 1.0, 1e6));
}

}  // namespace cutloss
