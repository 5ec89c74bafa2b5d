// Walks the cgroups that limit this process.
#ifndef CUTLOSS_SRC_PLAN_CGROUP_H_
#define CUTLOSS_SRC_PLAN_CGROUP_H_

#include <string>

#include "src/plan/text_file.h"

namespace cutloss {

// Calls look(folder) for the process's cgroup and every ancestor, innermost first: those of version 2, and those of
// version 1's `controller`. `root` is where cgroups are mounted, `membership` a file like /proc/self/cgroup.
template <typename Look>
void for_each_cgroup(const std::string& root, const std::string& membership, const std::string& controller,
                     const Look& look) {
  const auto climb = [&](const std::string& mount, std::string path) {
    for (;;) {
      look(mount + path);
      if (path.empty()) return;
      path.erase(path.rfind('/'));
    }
  };
  for_each_line(read_text_file(membership), [&](std::string_view line) {  // "id:controllers:/path"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) return true;
    const std::string controllers = "," + std::string(line.substr(first + 1, second - first - 1)) + ",";
    std::string path(line.substr(second + 1));
    if (path == "/" || path.empty() || path[0] != '/') path.clear();
    if (controllers == ",,") {
      climb(root, path);
    } else if (controllers.find("," + controller + ",") != std::string::npos) {
      climb(root + "/" + controller, path);
    }
    return true;
  });
}

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_CGROUP_H_
