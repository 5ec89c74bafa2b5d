// .npy files: read by mapping them, written in one go.
//
// A file is refused, with nothing allocated for it, unless its header is well formed and the file is as long as the
// header says. Versions 1, 2 and 3 of the format are read; version 1 is written.
#ifndef CUTLOSS_SRC_CLI_NPY_H_
#define CUTLOSS_SRC_CLI_NPY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cutloss/cutloss.hpp"

namespace cutloss::cli {

enum class NpyType { f32, bf16, f16, f64, boolean, i8, i16, i32, i64, u8, u16, u32, u64 };
std::string_view name(NpyType type);  // numpy's

struct NpyArray {
  NpyType type = NpyType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements; Fortran order is a matter of strides
  const void* data = nullptr;         // aligned for its type, valid as long as mapping
  std::shared_ptr<const void> mapping;

  std::int64_t size() const;
  std::string shape_text() const;  // "[3, 4]"
};

// The part of a file before its data; exposed for tests.
struct NpyHeader {
  NpyType type = NpyType::f32;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
  std::size_t data_offset = 0;
};

// bytes: the file's first bytes, all of them or at least the header. Errors do not name the file; read_npy does.
Result<NpyHeader> parse_npy_header(std::string_view bytes);

Result<NpyArray> read_npy(const std::string& path);

// data: contiguous, row-major. bf16 is written as numpy writes ml_dtypes.bfloat16, as two raw bytes ('<V2').
Status write_npy(const std::string& path, DType dtype, const std::vector<std::int64_t>& shape, const void* data);
// One byte each, as booleans ('|b1').
Status write_npy(const std::string& path, const std::vector<std::int64_t>& shape, const std::uint8_t* data);

// The elements in row-major order: ids as i64, whatever integer type the file has, weights as f32, whatever type it
// has. `what` names the array in errors. to_ids fails on floats, truth values and a u64 that i64 cannot hold.
Result<std::vector<std::int64_t>> to_ids(const NpyArray& array, const std::string& what);
std::vector<float> to_floats(const NpyArray& array);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_NPY_H_
