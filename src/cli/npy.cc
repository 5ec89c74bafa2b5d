#include "src/cli/npy.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <type_traits>

#include "src/cpu/element.h"

namespace cutloss::cli {
namespace {

Status bad(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

std::size_t size_of(NpyType type) {
  switch (type) {
    case NpyType::boolean:
    case NpyType::i8:
    case NpyType::u8: return 1;
    case NpyType::bf16:
    case NpyType::f16:
    case NpyType::i16:
    case NpyType::u16: return 2;
    case NpyType::f32:
    case NpyType::i32:
    case NpyType::u32: return 4;
    case NpyType::f64:
    case NpyType::i64:
    case NpyType::u64: return 8;
  }
  return 0;
}

bool is_integer(NpyType type) { return type >= NpyType::i8; }

// Bytes of the data, or nothing when they overflow.
std::optional<std::size_t> data_bytes(const NpyHeader& header) {
  std::size_t bytes = size_of(header.type);
  for (const std::int64_t extent : header.shape) {
    if (extent == 0) return 0;
  }
  for (const std::int64_t extent : header.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) return std::nullopt;
  }
  if (bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  return bytes;
}

std::vector<std::int64_t> strides_of(const NpyHeader& header) {
  const std::size_t rank = header.shape.size();
  std::vector<std::int64_t> strides(rank, 1);
  if (data_bytes(header) == 0u) return strides;  // the other extents may be as large as they like
  std::int64_t step = 1;
  for (std::size_t k = 0; k < rank; ++k) {
    const std::size_t axis = header.fortran_order ? k : rank - 1 - k;
    strides[axis] = step;
    step *= header.shape[axis];
  }
  return strides;
}

}  // namespace

std::string_view name(NpyType type) {
  constexpr std::string_view kNames[] = {"float32", "bfloat16", "float16", "float64", "bool",   "int8",  "int16",
                                         "int32",   "int64",    "uint8",   "uint16",  "uint32", "uint64"};
  return kNames[static_cast<std::size_t>(type)];
}

std::int64_t NpyArray::size() const {
  std::int64_t product = 1;
  if (std::count(shape.begin(), shape.end(), 0) != 0) return 0;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}

std::string NpyArray::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Result<NpyArray> read_npy(const std::string& path) {
  const auto fail = [&](std::string_view why) { return bad(fmt::format("{}: {}", path, why)); };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return fail(std::strerror(errno));
  const std::shared_ptr<const void> closer(nullptr, [file](const void*) { close(file); });
  struct stat info = {};
  if (fstat(file, &info) != 0) return fail(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return fail("not a regular file");
  if (info.st_size == 0) return fail("file is empty");
  const std::size_t bytes = static_cast<std::size_t>(info.st_size);
  void* const memory = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  if (memory == MAP_FAILED) {
    const StatusCode code = errno == ENOMEM ? StatusCode::out_of_memory : StatusCode::invalid_argument;
    return Status(code, fmt::format("{}: cannot map {} bytes: {}", path, bytes, std::strerror(errno)));
  }

  NpyArray array;
  array.mapping = std::shared_ptr<const void>(memory, [bytes](const void* p) { munmap(const_cast<void*>(p), bytes); });
  const char* const begin = static_cast<const char*>(memory);
  const Result<NpyHeader> header = parse_npy_header({begin, bytes});
  if (!header.ok()) return fail(header.status().message());
  const std::optional<std::size_t> wanted = data_bytes(header.value());
  if (!wanted) return fail(fmt::format("shape [{}] is too large", fmt::join(header->shape, ", ")));
  if (*wanted > bytes - header->data_offset) {
    return fail(fmt::format("truncated: the header promises {} bytes of data, the file has {}", *wanted,
                            bytes - header->data_offset));
  }
  if (header->data_offset % size_of(header->type) != 0) {
    return fail(fmt::format("data begins at byte {}, which is not aligned for its type; save it again with numpy",
                            header->data_offset));
  }
  array.type = header->type;
  array.shape = header->shape;
  array.strides = strides_of(header.value());
  array.data = begin + header->data_offset;
  return array;
}

namespace {

Status write_array(const std::string& path, std::string_view descr, std::size_t item,
                   const std::vector<std::int64_t>& shape, const void* data) {
  std::string extents;
  std::size_t count = 1;
  for (const std::int64_t extent : shape) {
    extents += fmt::format("{}, ", extent);
    count *= static_cast<std::size_t>(extent);
  }
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr, extents);
  if (shape.size() > 1) header.replace(header.rfind(", ), }"), 2, "");
  header.append(63 - (10 + header.size()) % 64, ' ');  // data begins at a multiple of 64
  header += '\n';
  std::string prefix("\x93NUMPY\x01\x00", 8);
  prefix += static_cast<char>(header.size() & 0xff);
  prefix += static_cast<char>(header.size() >> 8);

  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return bad(fmt::format("cannot write {}: {}", path, std::strerror(errno)));
  prefix += header;
  const std::size_t bytes = count * item;
  bool written = std::fwrite(prefix.data(), 1, prefix.size(), file) == prefix.size() &&
                 (bytes == 0 || std::fwrite(data, 1, bytes, file) == bytes) && std::fflush(file) == 0;
  const int error = errno;
  written = std::fclose(file) == 0 && written;
  if (!written) {
    // Half a file is worse than none; a device or a pipe is not ours to remove.
    std::error_code ignored;
    if (std::filesystem::is_regular_file(path, ignored)) std::filesystem::remove(path, ignored);
    return bad(fmt::format("cannot write {}: {}", path, std::strerror(error)));
  }
  return {};
}

// Calls visit(element) for each element in row-major order.
template <typename T, typename Visit>
void for_each(const NpyArray& array, const Visit& visit) {
  const auto* const data = static_cast<const T*>(array.data);
  std::vector<std::int64_t> index(array.shape.size(), 0);
  std::int64_t at = 0;
  for (std::int64_t left = array.size(); left > 0; --left) {
    visit(data[at]);
    for (std::size_t axis = index.size(); axis-- > 0;) {
      at += array.strides[axis];
      if (++index[axis] < array.shape[axis]) break;
      at -= array.strides[axis] * array.shape[axis];
      index[axis] = 0;
    }
  }
}

template <typename Visit>
void visit_elements(const NpyArray& array, const Visit& visit) {
  switch (array.type) {
    case NpyType::f32: return for_each<float>(array, visit);
    case NpyType::bf16: return for_each<cpu::Bf16>(array, visit);
    case NpyType::f16: return for_each<cpu::F16>(array, visit);
    case NpyType::f64: return for_each<double>(array, visit);
    case NpyType::boolean: return for_each<std::uint8_t>(array, visit);
    case NpyType::i8: return for_each<std::int8_t>(array, visit);
    case NpyType::i16: return for_each<std::int16_t>(array, visit);
    case NpyType::i32: return for_each<std::int32_t>(array, visit);
    case NpyType::i64: return for_each<std::int64_t>(array, visit);
    case NpyType::u8: return for_each<std::uint8_t>(array, visit);
    case NpyType::u16: return for_each<std::uint16_t>(array, visit);
    case NpyType::u32: return for_each<std::uint32_t>(array, visit);
    case NpyType::u64: return for_each<std::uint64_t>(array, visit);
  }
}

}  // namespace

Status write_npy(const std::string& path, DType dtype, const std::vector<std::int64_t>& shape, const void* data) {
  const std::string_view descr = dtype == DType::f32    ? "<f4"
                                 : dtype == DType::bf16 ? "<V2"
                                 : dtype == DType::f16  ? "<f2"
                                 : dtype == DType::i32  ? "<i4"
                                                        : "<i8";
  return write_array(path, descr, cutloss::size_of(dtype), shape, data);
}

Status write_npy(const std::string& path, const std::vector<std::int64_t>& shape, const std::uint8_t* data) {
  return write_array(path, "|b1", 1, shape, data);
}

Result<std::vector<std::int64_t>> to_ids(const NpyArray& array, const std::string& what) {
  if (!is_integer(array.type)) {
    return bad(fmt::format("{} are {}; they must be integers (int8 to int64, uint8 to uint64)", what, name(array.type)));
  }
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::vector<std::int64_t> ids;
  ids.reserve(static_cast<std::size_t>(array.size()));
  Status failure;
  visit_elements(array, [&]<typename T>(T value) {
    if constexpr (std::is_integral_v<T>) {
      if (std::is_unsigned_v<T> && static_cast<std::uint64_t>(value) > kMost && failure.ok()) {
        failure = bad(fmt::format("{}[{}] is {}, over the limit of a 64-bit signed id", what, ids.size(), value));
      }
      ids.push_back(static_cast<std::int64_t>(value));
    }
  });
  if (!failure.ok()) return failure;
  return ids;
}

std::vector<float> to_floats(const NpyArray& array) {
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(array.size()));
  const bool truth = array.type == NpyType::boolean;  // any byte but 0
  visit_elements(array, [&]<typename T>(T value) {
    if constexpr (std::is_arithmetic_v<T>) {
      values.push_back(truth ? static_cast<float>(value != 0) : static_cast<float>(value));
    } else {
      values.push_back(cpu::ToFloat(value));
    }
  });
  return values;
}

}  // namespace cutloss::cli
