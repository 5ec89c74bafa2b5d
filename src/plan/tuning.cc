#include "src/plan/tuning.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <new>
#include <optional>

#include "src/problem/text.h"

namespace cutloss {
namespace {

constexpr std::size_t kMaxEntries = 256;
constexpr std::int64_t kMaxHidden = std::int64_t{1} << 24;  // as in validate()
constexpr std::int64_t kMaxSize = 1 << 16;                  // of a block: bytes of a workspace stay far below 2^63

constexpr std::array kModes = {Mode::loss, Mode::stream, Mode::chunk, Mode::recompute};
constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
constexpr std::array kLayouts = {HeadLayout::vd, HeadLayout::dv};

template <typename Values>
auto find_name(const Values& values, std::string_view text) {
  const auto found = std::find_if(values.begin(), values.end(), [&](auto value) { return name(value) == text; });
  return found == values.end() ? std::nullopt : std::optional(*found);
}

std::optional<std::int64_t> number(std::string_view text, std::int64_t most) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > most) return std::nullopt;
  return value;
}

bool is_target_name(std::string_view text) {
  return !text.empty() && text.size() <= 32 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t end = std::min(text.find(at, start), text.size());
    parts.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

std::optional<TunedBlocks> parse_entry(std::string_view line) {
  const std::vector<std::string_view> words = split(line, ' ');
  if (words.size() != 10 || !is_target_name(words[0])) return std::nullopt;
  const auto mode = find_name(kModes, words[1]);
  const auto hidden = number(words[2], kMaxHidden);
  const auto dtype = find_name(kTypes, words[3]);
  const auto layout = find_name(kLayouts, words[4]);
  std::array<std::optional<std::int64_t>, 5> sizes;
  for (std::size_t k = 0; k < sizes.size(); ++k) sizes[k] = number(words[5 + k], kMaxSize);
  if (!mode || !hidden || !dtype || !layout ||
      !std::all_of(sizes.begin(), sizes.end(), [](auto& s) { return bool(s); })) {
    return std::nullopt;
  }
  return TunedBlocks{
      std::string(words[0]), *mode, *hidden, *dtype, *layout, {*sizes[0], *sizes[1], *sizes[2], *sizes[3], *sizes[4]}};
}

bool same_key(const TunedBlocks& a, const TunedBlocks& b) {
  return a.target == b.target && a.mode == b.mode && a.hidden == b.hidden && a.c_dtype == b.c_dtype &&
         a.head_layout == b.head_layout;
}

}  // namespace

std::string format_tuning(const std::vector<TunedBlocks>& entries) {
  std::string all;
  for (const TunedBlocks& e : entries) {
    const Blocks& b = e.blocks;
    all += text(e.target, ' ', name(e.mode), ' ', e.hidden, ' ', name(e.c_dtype), ' ', name(e.head_layout), ' ',
                b.token_block, ' ', b.vocab_tile, ' ', b.chunk_tokens, ' ', b.head_tokens, ' ', b.head_rows, '\n');
  }
  return all;
}

Result<std::vector<TunedBlocks>> parse_tuning(std::string_view lines) try {
  std::vector<TunedBlocks> entries;
  if (!lines.empty() && lines.back() != '\n') return invalid("the last line of the tuning table has no end");
  for (std::size_t start = 0, line = 1; start < lines.size(); ++line) {
    const std::size_t end = lines.find('\n', start);
    const std::optional<TunedBlocks> entry = parse_entry(lines.substr(start, end - start));
    if (!entry) return invalid("line ", line, " of the tuning table is not an entry, or a size is out of range");
    if (entries.size() == kMaxEntries) return invalid("the tuning table has more than ", kMaxEntries, " entries");
    entries.push_back(*entry);
    start = end + 1;
  }
  return entries;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

const TunedBlocks* find_tuned(const std::vector<TunedBlocks>& entries, const Problem& problem, Mode mode,
                              std::string_view target) {
  const TunedBlocks wanted{std::string(target), mode, problem.hidden, problem.c_dtype, problem.head_layout, {}};
  const auto found =
      std::find_if(entries.begin(), entries.end(), [&](const TunedBlocks& e) { return same_key(e, wanted); });
  if (found == entries.end()) return nullptr;
  const Blocks& b = found->blocks;
  // A Machine may be written by hand: sizes that a file could not have are not used either.
  for (const std::int64_t size : {b.token_block, b.vocab_tile, b.chunk_tokens, b.head_tokens, b.head_rows}) {
    if (size < 1 || size > kMaxSize) return nullptr;
  }
  return &*found;
}

std::vector<TunedBlocks> with_tuned(std::vector<TunedBlocks> entries, const TunedBlocks& entry) {
  std::erase_if(entries, [&](const TunedBlocks& e) { return same_key(e, entry); });
  if (entries.size() >= kMaxEntries) entries.erase(entries.begin());  // the oldest
  entries.push_back(entry);
  return entries;
}

}  // namespace cutloss
