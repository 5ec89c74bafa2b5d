// C structs as C++ values, and the one place where exceptions are caught.
#ifndef CUTLOSS_SRC_CAPI_CONVERT_H_
#define CUTLOSS_SRC_CAPI_CONVERT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cutloss/cutloss.h"
#include "cutloss/cutloss.hpp"
#include "src/cpu/float_env.h"
#include "src/problem/text.h"

namespace cutloss::capi {

#define CUTLOSS_TRY(expression) \
  if (::cutloss::Status try_status = (expression); !try_status.ok()) return try_status

cutloss_status failed(StatusCode code, const char* message) noexcept;
cutloss_status failed_by_exception() noexcept;  // within a catch clause

// Calls, keeps the text of a failure for cutloss_last_error(), lets no exception out and leaves the caller's
// floating-point environment as it was.
template <typename Call>
cutloss_status guarded(const Call& call) noexcept {
  const cpu::KernelFloatEnv float_env;
  try {
    const Status status = call();
    return status.ok() ? CUTLOSS_OK : failed(status.code(), status.message().c_str());
  } catch (...) {
    return failed_by_exception();
  }
}
const char* last_error_text();

// What _init gives a struct of this version.
template <typename T>
void zeros(T* to) {
  std::memset(to, 0, sizeof(T));  // padding too, which an assignment may leave
  to->size = sizeof(T);
}
void problem_defaults(cutloss_problem* to);

// The caller's struct, with defaults for the fields that its version did not have.
template <typename T>
Status read(const char* argument, const T* from, void (*defaults)(T*), T& to) {
  defaults(&to);
  if (from == nullptr) return invalid(argument, " is null");
  decltype(to.size) size;
  std::memcpy(&size, static_cast<const void*>(from), sizeof(size));  // it may be misaligned: no access through the type
  if (size < sizeof(size)) {
    return invalid(argument, ".size is ", size, "; set it (cutloss_", argument, "_init does, where there is one)");
  }
  std::memcpy(&to, static_cast<const void*>(from), std::min(size, sizeof(T)));
  return Status();
}

template <typename E>
Status to_enum(const char* field, std::int32_t value, std::int32_t count, E& to) {
  if (value < 0 || value >= count) return invalid(field, " is ", value, "; it must be in [0, ", count, ")");
  to = static_cast<E>(value);
  return Status();
}

Status to_problem(const cutloss_problem* from, Problem& to);
Status to_inputs(const cutloss_inputs* from, Inputs& to);
// report: where the caller wants the filter's report, or null.
Status to_outputs(const cutloss_outputs* from, Outputs& to, cutloss_filter_report*& report);
void write_report(const FilterReport& from, cutloss_filter_report* to);

}  // namespace cutloss::capi

#endif  // CUTLOSS_SRC_CAPI_CONVERT_H_
