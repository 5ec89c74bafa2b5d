#include "src/plan/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "src/plan/cgroup.h"
#include "src/plan/text_file.h"

namespace cutloss {
namespace {

using Bytes = std::optional<std::uint64_t>;

Bytes least(Bytes a, Bytes b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

// The first word of a file as a number; "max", -1 and anything malformed are none.
Bytes first_number(const std::string& path) {
  const std::string text = read_text_file(path);
  const std::string_view word = std::string_view(text).substr(0, text.find_first_of(" \n"));
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (word.empty() || error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return value;
}

// The number after `key` at the front of a line; 0 if there is none.
Bytes field(const std::string& path, const std::string& key) {
  Bytes found;
  for_each_line(read_text_file(path), [&](std::string_view line) {
    if (!line.starts_with(key)) return true;
    const std::size_t at = std::min(line.find_first_of("0123456789", key.size()), line.size());
    std::uint64_t value = 0;
    if (std::from_chars(line.data() + at, line.data() + line.size(), value).ec == std::errc()) found = value;
    return false;
  });
  return found;
}

Bytes left_in(const std::string& folder) {
  const bool v2 = access((folder + "/memory.max").c_str(), R_OK) == 0;
  const Bytes limit = first_number(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  const Bytes use = first_number(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  // Version 1 spells "no limit" as the largest multiple of a page below 2^63.
  if (!limit || *limit >= std::uint64_t{1} << 62) return std::nullopt;
  const std::uint64_t cache =
      field(folder + "/memory.stat", v2 ? "inactive_file " : "total_inactive_file ").value_or(0);
  const std::uint64_t used = use.value_or(0) - std::min(use.value_or(0), cache);
  return *limit - std::min(*limit, used);
}

}  // namespace

Bytes available_memory(const std::string& root, const std::string& membership, const std::string& meminfo,
                       Bytes address_space) {
  Bytes available = address_space;
  if (const Bytes host = field(meminfo, "MemAvailable:"); host && *host < std::uint64_t{1} << 53) {
    available = least(available, *host << 10);
  }
  for_each_cgroup(root, membership, "memory",
                  [&](const std::string& folder) { available = least(available, left_in(folder)); });
  return available;
}

Bytes address_space_left() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  const std::uint64_t pages = first_number("/proc/self/statm").value_or(0);
  const std::uint64_t mapped = pages * static_cast<std::uint64_t>(std::max(1L, sysconf(_SC_PAGESIZE)));
  return limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, mapped);
}

}  // namespace cutloss
