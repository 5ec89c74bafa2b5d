// Keyword arguments read by name: a function with many of them takes **fields and says here what each one is for.
#ifndef CUTLOSS_PYTHON_FIELDS_HPP_
#define CUTLOSS_PYTHON_FIELDS_HPP_

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cutloss/cutloss.hpp"
#include "src/problem/resolve.h"

namespace cutloss::python {

// Raises the exception that belongs to the code: BudgetError, MemoryError, RuntimeError or ValueError.
[[noreturn]] void raise(const Status& status);

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result.value());
}

// What is not given keeps its default; what nobody read is an error in finish().
class Fields {
 public:
  explicit Fields(const nanobind::kwargs& given) : left_(nanobind::borrow<nanobind::dict>(given)) {}

  template <typename T>
  void read(const char* name, T& to) {
    const nanobind::object value = take(name);
    if (value.is_valid() && !nanobind::try_cast(value, to)) wrong_type(name, value);
  }

  // Python's numbers have more range than an option has.
  void read(const char* name, float& to) {
    double value = to;
    read(name, value);
    to = value_or_raise(float_from(name, value));
  }
  void read(const char* name, std::optional<float>& to) {
    std::optional<double> value = to;
    read(name, value);
    to = value ? std::optional(value_or_raise(float_from(name, *value))) : std::nullopt;
  }

  // Of an enum, by name; None, where that is taken, by std::nullopt.
  template <typename Enum, typename Parse>
  void read(const char* name, Enum& to, const Parse& parse) {
    std::string text;
    read(name, text);
    if (!text.empty()) to = value_or_raise(parse(std::string_view(text)));
  }
  template <typename Enum, typename Parse>
  void read_optional(const char* name, std::optional<Enum>& to, const Parse& parse) {
    std::optional<std::string> text;
    read(name, text);
    if (text) to = value_or_raise(parse(std::string_view(*text)));
  }

  // Memory, given by its address.
  template <typename T>
  void address(const char* name, T*& to) {
    std::uintptr_t number = 0;
    read(name, number);
    to = reinterpret_cast<T*>(number);
  }

  void finish() const {
    for (const auto& [name, value] : left_) {
      throw nanobind::type_error(("there is no field " + nanobind::cast<std::string>(name)).c_str());
    }
  }

 private:
  // The dict is the call's own.
  nanobind::object take(const char* name) {
    if (!left_.contains(name)) return {};
    nanobind::object value = left_[name];
    nanobind::del(left_[name]);
    return value;
  }
  [[noreturn]] static void wrong_type(const char* name, const nanobind::object& value) {
    const auto text = nanobind::cast<std::string>(nanobind::repr(value));
    throw nanobind::type_error((std::string(name) + ": " + text + " has the wrong type").c_str());
  }

  nanobind::dict left_;
};

}  // namespace cutloss::python

#endif  // CUTLOSS_PYTHON_FIELDS_HPP_
