#include "src/plan/quota.h"

#include <algorithm>
#include <fstream>
#include <sstream>

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
  const auto look = [&](const std::string& mount, std::string path) {
    for (;;) {
      const double limit = limit_of(mount + path);
      if (limit > 0) tightest = tightest < 0 ? limit : std::min(tightest, limit);
      if (path.empty()) return;
      path.erase(path.rfind('/'));
    }
  };
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {  // "id:controllers:/path"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path == "/" || path.empty() || path[0] != '/') path.clear();
    if (controllers == ",,") {
      look(root, path);
    } else if (controllers.find(",cpu,") != std::string::npos) {
      look(root + "/cpu", path);
    }
  }
  if (tightest < 0) return 0;
  return std::max(1, static_cast<int>(tightest));
}

}  // namespace cutloss
