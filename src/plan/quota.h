// CPU time a container may use. hardware_concurrency() knows nothing of it, and 192 threads on a quota of 8 cores run
// slower than 8.
#ifndef CUTLOSS_SRC_PLAN_QUOTA_H_
#define CUTLOSS_SRC_PLAN_QUOTA_H_

#include <string>

namespace cutloss {

// Whole CPUs (rounded down, at least 1) that the tightest limit among this process's cgroup and its ancestors allows;
// 0 if there is no limit. `root` is where cgroups are mounted, `membership` a file like /proc/self/cgroup.
int cpu_quota(const std::string& root, const std::string& membership);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_QUOTA_H_
