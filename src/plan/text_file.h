// The small files of /sys and /proc, read without streams: those swallow a failed allocation and report half a file.
#ifndef CUTLOSS_SRC_PLAN_TEXT_FILE_H_
#define CUTLOSS_SRC_PLAN_TEXT_FILE_H_

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <string_view>

namespace cutloss {

// The first 64 KiB of a file; "" if it cannot be read. Throws std::bad_alloc.
inline std::string read_text_file(const std::string& path) {
  constexpr std::size_t kMost = 64 << 10;
  std::string all;
  char block[1024];
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return all;
  struct Closer {
    int file;
    ~Closer() { close(file); }
  } const closer{file};
  while (all.size() < kMost) {
    const ssize_t got = read(file, block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    all.append(block, static_cast<std::size_t>(got));
  }
  return all;
}

// look(line) for each line, until it returns false.
template <typename Look>
void for_each_line(std::string_view text, const Look& look) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (!look(text.substr(0, end))) return;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_TEXT_FILE_H_
