// Bytes -> a .npy file -> either a clear refusal, or an array whose every element can be read.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "src/cli/npy.h"

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not true: %s\n", what);
  std::abort();
}

void check_file(const std::string& path) {
  using namespace cutloss::cli;
  const cutloss::Result<NpyArray> array = read_npy(path);
  require(array.ok() || !array.status().message().empty(), "a refusal says why");
  if (!array.ok()) return;
  require(array->size() >= 0 && array->shape.size() == array->strides.size(), "a size and a stride for each axis");
  const auto size = static_cast<std::size_t>(array->size());
  const cutloss::Result<std::vector<std::int64_t>> ids = to_ids(array.value(), "array");
  require(!ids.ok() || ids->size() == size, "as many ids as elements");
  require(to_floats(array.value()).size() == size, "as many floats as elements");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Exactly the bytes, so that AddressSanitizer sees the first one behind them.
  const std::vector<char> exact(data, data + size);
  (void)cutloss::cli::parse_npy_header({exact.data(), exact.size()});
  const int file = memfd_create("npy", 0);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) std::abort();
  check_file("/proc/self/fd/" + std::to_string(file));
  close(file);
  return 0;
}
