// The file of tuning.h: where it is, and how it is read without trusting it.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "src/plan/text_file.h"
#include "src/plan/tuning.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

constexpr std::string_view kName = "cutloss tuning ";
constexpr std::string_view kVersion = "1";
constexpr std::size_t kMaxBytes = 64 << 10;  // 256 entries take less than 20 KiB
constexpr const char* kMissing = "missing";

// "" or why not. A pipe must not block, nor a device be read for ever; a link may be somebody else's.
std::string read_small(const std::string& path, std::string& content) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW);
  if (file < 0) return errno == ELOOP ? "a symbolic link" : errno == ENOENT ? kMissing : "cannot be opened";
  struct stat about {};
  std::string problem;
  if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode)) {
    problem = "not a regular file";
  } else {
    content.resize(kMaxBytes + 1);
    std::size_t size = 0;
    for (ssize_t got; size < content.size(); size += static_cast<std::size_t>(got)) {
      got = read(file, content.data() + size, content.size() - size);
      if (got < 0) problem = "cannot be read";
      if (got <= 0) break;
    }
    content.resize(size);
    if (size > kMaxBytes) problem = "too long";
  }
  close(file);
  return problem;
}

// The line at the front of `rest`, taken off it; false if none is complete.
bool take_line(std::string_view& rest, std::string_view& line) {
  const std::size_t end = rest.find('\n');
  if (end == std::string_view::npos) return false;
  line = rest.substr(0, end);
  rest.remove_prefix(end + 1);
  return true;
}

// "" or why the content is not used.
std::string parse_file(std::string_view content, std::string_view cpu, std::vector<TunedBlocks>& entries) {
  std::string_view rest = content, line;
  if (!take_line(rest, line) || !line.starts_with(kName)) return "not a tuning file of cutloss, or cut short";
  if (line.substr(kName.size()) != kVersion) return "of another version of the format";
  const std::size_t sum = content.rfind("sum ");
  if (sum == std::string_view::npos || content[sum - 1] != '\n') return "cut short";
  if (content.substr(sum) != "sum " + tuning_sum(content.substr(0, sum)) + "\n") return "cut short or changed";
  if (!take_line(rest, line) || !line.starts_with("cpu ")) return "has no CPU in it";
  if (line.substr(4) != cpu) return "measured on another CPU";
  const auto first = static_cast<std::size_t>(rest.data() - content.data());
  if (first > sum) return "cut short";
  Result<std::vector<TunedBlocks>> table = parse_tuning(content.substr(first, sum - first));
  if (!table.ok()) return table.status().message();
  entries = std::move(table.value());
  return "";
}

}  // namespace

std::string tuning_sum(std::string_view bytes) {
  std::uint64_t value = 0xCBF29CE484222325u;
  for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

std::string cpu_model(const std::string& cpuinfo) {
  // x86 has the first five, Arm the others.
  constexpr std::string_view kKeys[] = {"vendor_id",       "cpu family",  "model",    "stepping",    "model name",
                                        "CPU implementer", "CPU variant", "CPU part", "CPU revision"};
  const std::string file = read_text_file(cpuinfo);
  std::string model;
  for (const std::string_view key : kKeys) {
    for_each_line(file, [&](std::string_view line) {
      if (line.empty()) return false;  // ends a processor
      const std::size_t colon = line.find(':');
      if (colon == std::string_view::npos) return true;
      const std::size_t end = line.find_last_not_of(" \t", colon == 0 ? 0 : colon - 1);
      const std::size_t value = line.find_first_not_of(" \t", colon + 1);
      if (value == std::string_view::npos || line.substr(0, end + 1) != key) return true;
      model += text(model.empty() ? "" : ", ", key == "vendor_id" || key == "model name" ? "" : text(key, ' '),
                    line.substr(value));
      return false;
    });
  }
  for (char& c : model) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';  // must stay one line
  }
  return model.empty() ? "unknown" : model;
}

const std::string& this_cpu() {
  static const std::string model = cpu_model("/proc/cpuinfo");
  return model;
}

std::string tuning_path(std::string_view cpu) {
  if (const char* path = std::getenv("CUTLOSS_TUNING_FILE"); path != nullptr && *path != 0) {
    return std::string_view(path) == "none" ? "" : path;
  }
  std::string folder;
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  if (cache != nullptr && *cache == '/') {  // the specification says to ignore a relative one
    folder = cache;
  } else if (home != nullptr && *home != 0) {
    folder = text(home, "/.cache");
  } else {
    return "";
  }
  return text(folder, "/cutloss/tuning-", tuning_sum(cpu).substr(0, 8), ".txt");
}

TuningFile read_tuning(const std::string& path, std::string_view cpu) {
  TuningFile file;
  if (path.empty()) {
    file.note = "no file, by CUTLOSS_TUNING_FILE or for want of a home folder";
    return file;
  }
  std::string content;
  std::string problem = read_small(path, content);
  if (problem == kMissing) {
    file.note = text("none yet; 'cutloss tune' would write ", path);
    return file;
  }
  if (problem.empty()) problem = parse_file(content, cpu, file.entries);
  file.used = problem.empty();
  file.note = file.used ? text(file.entries.size(), file.entries.size() == 1 ? " entry" : " entries", " in ", path)
                        : text("ignored ", path, ": ", problem);
  return file;
}

Status write_tuning(const std::string& path, std::string_view cpu, const std::vector<TunedBlocks>& entries) {
  const std::string body = text(kName, kVersion, "\ncpu ", cpu, "\n", format_tuning(entries));
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  // A reader sees the old file or the new one, never half of one; two writers do not share a half-written one.
  std::string temporary = path + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  if (file < 0) {
    return invalid("cannot write the tuning file ", path, ": ", std::strerror(errno),
                   "; CUTLOSS_TUNING_FILE names another place");
  }
  close(file);
  std::ofstream out(temporary, std::ios::binary);
  out << body << "sum " << tuning_sum(body) << "\n";
  out.close();
  if (!out) {
    std::filesystem::remove(temporary, error);
    return invalid("cannot write the tuning file ", path, "; CUTLOSS_TUNING_FILE names another place");
  }
  std::filesystem::rename(temporary, path, error);
  if (error) {
    const std::string reason = error.message();
    std::filesystem::remove(temporary, error);
    return invalid("cannot write the tuning file ", path, ": ", reason);
  }
  return Status();
}

}  // namespace cutloss
