// Between the names used in Python and the enums of cutloss.hpp; one place, for both the NumPy and the XLA entry.
#ifndef CUTLOSS_PYTHON_NAMES_HPP_
#define CUTLOSS_PYTHON_NAMES_HPP_

#include <array>
#include <string>
#include <string_view>

#include "cutloss/cutloss.hpp"

namespace cutloss::python {

template <typename Enum, std::size_t n>
Result<Enum> from_name(std::string_view what, std::string_view text, const std::array<Enum, n>& values) {
  std::string known;
  for (Enum value : values) {
    if (name(value) == text) return value;
    known += (known.empty() ? "" : ", ") + std::string(name(value));
  }
  return Status(StatusCode::invalid_argument,
                std::string(what) + ": '" + std::string(text) + "' is not one of " + known);
}

inline Result<DType> dtype_from(std::string_view what, std::string_view text) {
  return from_name(what, text, std::array{DType::f32, DType::bf16, DType::f16, DType::i32, DType::i64});
}
inline Result<HeadLayout> head_layout_from(std::string_view text) {
  return from_name("head_layout", text, std::array{HeadLayout::vd, HeadLayout::dv});
}
inline Result<Reduction> reduction_from(std::string_view text) {
  return from_name("reduction", text, std::array{Reduction::mean, Reduction::sum, Reduction::none});
}
inline Result<Mode> mode_from(std::string_view text) {
  return from_name("mode", text,
                   std::array{Mode::automatic, Mode::loss, Mode::stream, Mode::chunk, Mode::recompute, Mode::sparse});
}
inline Result<Filter> filter_from(std::string_view text) {
  return from_name("filter", text, std::array{Filter::certified, Filter::unbiased, Filter::tile});
}

}  // namespace cutloss::python

#endif  // CUTLOSS_PYTHON_NAMES_HPP_
