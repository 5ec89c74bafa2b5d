// The text header of .npy files: a Python dict, written by anyone and trusted for nothing.
#include <fmt/format.h>

#include <charconv>

#include "src/cli/npy.h"

namespace cutloss::cli {
namespace {

// numpy writes at most a few hundred bytes; anything near this is no array of ours.
constexpr std::size_t kMaxHeader = 1 << 16;
constexpr std::size_t kMaxRank = 32;

Status bad(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

// Text out of a file, made safe to print.
std::string quoted(std::string_view text) {
  std::string out = "'";
  for (const char ch : text.substr(0, 24)) out += ch >= ' ' && ch <= '~' ? ch : '?';
  return out + (text.size() > 24 ? "...'" : "'");
}

Result<NpyType> parse_descr(std::string_view descr) {
  if (descr == "bfloat16") return NpyType::bf16;
  const char order = descr.empty() ? '\0' : descr[0];
  const std::string_view kind = descr.substr(descr.empty() ? 0 : 1);
  if (order == '>' && kind != "i1" && kind != "u1" && kind != "b1") {
    return bad(fmt::format("dtype {} is big-endian; save it as little-endian", quoted(descr)));
  }
  if (order == '<' || order == '|' || order == '=' || order == '>') {
    if (kind == "f4") return NpyType::f32;
    if (kind == "f2") return NpyType::f16;
    if (kind == "V2") return NpyType::bf16;
    if (kind == "i1") return NpyType::i8;
    if (kind == "i2") return NpyType::i16;
    if (kind == "i4") return NpyType::i32;
    if (kind == "i8") return NpyType::i64;
    if (kind == "u1") return NpyType::u8;
    if (kind == "u2") return NpyType::u16;
    if (kind == "u4") return NpyType::u32;
    if (kind == "u8") return NpyType::u64;
    if (kind == "f8") return NpyType::f64;
    if (kind == "b1") return NpyType::boolean;
  }
  return bad(fmt::format("dtype {} is not supported; float32, bfloat16, float16, float64, bool and integers are",
                         quoted(descr)));
}

// Reads the one form of Python literal that a header is: a dict of descr, fortran_order and shape, in any order.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  Status parse(NpyHeader& header) {
    bool have_descr = false, have_order = false, have_shape = false;
    if (!take('{')) return malformed();
    while (!take('}')) {
      std::string_view key, value;
      if (!string(key) || !take(':')) return malformed();
      if (key == "descr" && !have_descr) {
        have_descr = true;
        if (!string(value)) return bad("header: structured dtypes are not supported");
        const Result<NpyType> type = parse_descr(value);
        if (!type.ok()) return type.status();
        header.type = type.value();
      } else if (key == "fortran_order" && !have_order) {
        have_order = true;
        header.fortran_order = word("True");
        if (!header.fortran_order && !word("False")) return malformed();
      } else if (key == "shape" && !have_shape) {
        have_shape = true;
        const Status status = shape(header.shape);
        if (!status.ok()) return status;
      } else {
        return bad(fmt::format("header: unexpected or repeated key {}", quoted(key)));
      }
      if (!take(',') && !at('}')) return malformed();
    }
    if (!have_descr || !have_order || !have_shape) return bad("header lacks descr, fortran_order or shape");
    space();
    return text_.empty() ? Status() : malformed();
  }

 private:
  static Status malformed() { return bad("header is malformed"); }

  void space() {
    while (!text_.empty() && (text_[0] == ' ' || text_[0] == '\n' || text_[0] == '\t')) text_.remove_prefix(1);
  }
  bool at(char ch) {
    space();
    return !text_.empty() && text_[0] == ch;
  }
  bool take(char ch) {
    const bool found = at(ch);
    if (found) text_.remove_prefix(1);
    return found;
  }
  bool word(std::string_view expected) {
    space();
    if (!text_.starts_with(expected)) return false;
    text_.remove_prefix(expected.size());
    return true;
  }
  bool string(std::string_view& out) {
    space();
    if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) return false;
    const std::size_t end = text_.find(text_[0], 1);
    if (end == std::string_view::npos) return false;
    out = text_.substr(1, end - 1);
    text_.remove_prefix(end + 1);
    return out.find('\\') == std::string_view::npos;
  }
  Status shape(std::vector<std::int64_t>& out) {
    if (!take('(')) return malformed();
    while (!take(')')) {
      space();
      std::int64_t extent = 0;
      const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), extent);
      if (error == std::errc::result_out_of_range) return bad("header: an extent does not fit 64 bits");
      if (error != std::errc()) return malformed();
      if (extent < 0) return bad(fmt::format("header: extent {} is negative", extent));
      if (out.size() == kMaxRank) return bad(fmt::format("header: more than {} dimensions", kMaxRank));
      out.push_back(extent);
      text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
      word("L");  // numpy on Python 2 wrote 3L
      if (!take(',') && !at(')')) return malformed();
    }
    return {};
  }

  std::string_view text_;
};

}  // namespace

Result<NpyHeader> parse_npy_header(std::string_view bytes) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  if (!bytes.starts_with(kMagic)) return bad("not a .npy file");
  if (bytes.size() < 10) return bad("header is truncated");
  const auto byte = [&](std::size_t i) { return static_cast<std::size_t>(static_cast<unsigned char>(bytes[i])); };
  const std::size_t major = byte(6);
  if (major < 1 || major > 3) return bad(fmt::format(".npy version {} is unknown; 1, 2 and 3 are read", major));
  std::size_t start = 10;
  std::size_t length = byte(8) | byte(9) << 8;
  if (major >= 2) {
    if (bytes.size() < 12) return bad("header is truncated");
    start = 12;
    length |= byte(10) << 16 | byte(11) << 24;
  }
  if (length > kMaxHeader) return bad(fmt::format("header of {} bytes is over the limit of {}", length, kMaxHeader));
  if (bytes.size() - start < length) return bad("header is truncated");
  NpyHeader header;
  const Status status = HeaderParser(bytes.substr(start, length)).parse(header);
  if (!status.ok()) return status;
  header.data_offset = start + length;
  return header;
}

}  // namespace cutloss::cli
