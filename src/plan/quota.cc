#include "src/plan/quota.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "src/plan/cgroup.h"

namespace cutloss {
namespace {

// "quota period" of cgroup v2's cpu.max, or v1's pair of files; quota < 0 if unlimited or unreadable.
double limit_of(const std::string& folder) {
  std::string quota;
  double period = 0;
  std::ifstream v2(folder + "/cpu.max");
  if (!(v2 >> quota >> period)) {
    quota.clear();
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  double value = 0;
  std::istringstream number(quota);
  if (!(number >> value) || value <= 0 || period <= 0) return -1;  // "max", -1, absent, malformed
  return value / period;
}

}  // namespace

int cpu_quota(const std::string& root, const std::string& membership) {
  double tightest = -1;
  for_each_cgroup(root, membership, "cpu", [&](const std::string& folder) {
    const double limit = limit_of(folder);
    if (limit > 0) tightest = tightest < 0 ? limit : std::min(tightest, limit);
  });
  if (tightest < 0) return 0;
  return std::max(1, static_cast<int>(tightest));
}

}  // namespace cutloss
