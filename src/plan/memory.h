// Memory this process may still take. /proc/meminfo is the host's; in a container the limit is elsewhere.
#ifndef CUTLOSS_SRC_PLAN_MEMORY_H_
#define CUTLOSS_SRC_PLAN_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace cutloss {

// The least of: MemAvailable of `meminfo`; limit minus use of this process's cgroup and of each ancestor, where page
// cache that could be dropped is not use; what `address_space_left` says. 0 is an answer (nothing is left), nullopt
// means that nothing could be read. `root` and `membership` are as for cpu_quota().
std::optional<std::uint64_t> available_memory(const std::string& root, const std::string& membership,
                                              const std::string& meminfo,
                                              std::optional<std::uint64_t> address_space_left);

// RLIMIT_AS minus what is mapped; nullopt without a limit.
std::optional<std::uint64_t> address_space_left();

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_MEMORY_H_
