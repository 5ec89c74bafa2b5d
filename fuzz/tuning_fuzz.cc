// Bytes -> a tuning file, bare and with header and sum put right -> a refusal, or entries that survive being written.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "src/plan/tuning.h"

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not true: %s\n", what);
  std::abort();
}

const std::string& path() {
  static const std::string made = [] {
    std::string name = (std::filesystem::temp_directory_path() / "cutloss-tuning-fuzz-XXXXXX").string();
    const int file = mkstemp(name.data());
    if (file < 0) std::abort();
    close(file);
    return name;
  }();
  return made;
}

void check_file(const std::string& content) {
  std::ofstream(path(), std::ios::binary | std::ios::trunc) << content;
  const cutloss::TuningFile file = cutloss::read_tuning(path(), "a cpu");
  require(!file.note.empty(), "a note says what became of the file");
  require(file.used || file.entries.empty(), "a file is used as a whole or not at all");
  const std::string text = cutloss::format_tuning(file.entries);
  const auto again = cutloss::parse_tuning(text);
  require(again.ok() && cutloss::format_tuning(again.value()) == text, "entries that were read can be written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  (void)cutloss::parse_tuning(bytes);
  check_file(bytes);
  const std::string body = "cutloss tuning 1\ncpu a cpu\n" + bytes;
  check_file(body + "sum " + cutloss::tuning_sum(body) + "\n");
  return 0;
}
