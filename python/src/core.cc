// cutloss._core: the C++ library for Python. Buffers come in as addresses; who owns them, what dtype they have and how
// they are strided is settled in Python (cutloss/_arrays.py), so this file needs no array library.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cutloss/cutloss.hpp"
#include "ffi.hpp"
#include "names.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cutloss::python {
namespace {

struct BudgetError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void raise(const Status& status) {
  switch (status.code()) {
    case StatusCode::budget_too_small: throw BudgetError(status.message());
    case StatusCode::out_of_memory:
      PyErr_SetString(PyExc_MemoryError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::unavailable: throw std::runtime_error(status.message());
    default: throw nb::value_error(status.message().c_str());
  }
}

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result.value());
}

using StridePair = std::optional<std::pair<std::int64_t, std::int64_t>>;

std::optional<Strides> strides_from(const StridePair& pair) {
  if (!pair) return std::nullopt;
  return Strides{pair->first, pair->second};
}

Machine detect_machine(std::optional<std::string> target) {
  Machine machine = value_or_raise(Machine::detect());
  if (target) machine.target = *std::move(target);
  return machine;
}

Plan plan_for(const Machine& machine, std::int64_t tokens, std::int64_t hidden, std::int64_t vocab,
              std::string_view e_dtype, std::string_view c_dtype, std::string_view label_dtype,
              std::string_view head_layout, const StridePair& e_strides, const StridePair& c_strides,
              std::int64_t label_stride, std::string_view reduction, std::int64_t ignore_index,
              std::optional<float> softcap, bool nan_for_bad_labels, bool want_d_e, bool want_d_c,
              std::string_view mode, std::optional<std::uint64_t> budget, int threads) {
  Problem problem;
  problem.tokens = tokens;
  problem.hidden = hidden;
  problem.vocab = vocab;
  problem.e_dtype = value_or_raise(dtype_from("e", e_dtype));
  problem.c_dtype = value_or_raise(dtype_from("c", c_dtype));
  problem.label_dtype = value_or_raise(dtype_from("labels", label_dtype));
  problem.head_layout = value_or_raise(head_layout_from(head_layout));
  problem.e_strides = strides_from(e_strides);
  problem.c_strides = strides_from(c_strides);
  problem.label_stride = label_stride;
  problem.reduction = value_or_raise(reduction_from(reduction));
  problem.ignore_index = ignore_index;
  problem.softcap = softcap;
  problem.bad_labels = nan_for_bad_labels ? BadLabels::nan : BadLabels::error;
  problem.want_d_e = want_d_e;
  problem.want_d_c = want_d_c;

  Limits limits;
  limits.mode = value_or_raise(mode_from(mode));
  limits.budget_bytes = budget;
  limits.threads = threads;
  return value_or_raise(make_plan(problem, limits, machine));
}

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::int64_t run_plan(const Plan& plan, std::uintptr_t e, std::uintptr_t c, std::uintptr_t labels,
                      std::uintptr_t cotangent, std::uintptr_t loss, std::uintptr_t nll, std::uintptr_t lse,
                      std::uintptr_t d_e, std::uintptr_t d_c) {
  std::int64_t valid_count = 0;
  Status status;
  {
    nb::gil_scoped_release released;
    Inputs inputs{pointer<void>(e), pointer<void>(c), pointer<void>(labels), pointer<float>(cotangent)};
    Outputs outputs{pointer<float>(loss), pointer<float>(nll), pointer<float>(lse),
                    pointer<void>(d_e),   pointer<void>(d_c),  &valid_count};
    status = run(plan, inputs, outputs);
  }
  if (!status.ok()) raise(status);
  return valid_count;
}

// NumPy has no bfloat16, so numpy.from_dlpack refuses one: here the same memory as uint16, to be viewed in Python.
using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;

nb::object bits_of_bfloat16(const AnyArray& array) {
  const nb::dlpack::dtype type = array.dtype();
  if (type.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) || type.bits != 16 || type.lanes != 1) {
    throw nb::type_error("not a bfloat16 array");
  }
  std::vector<std::size_t> shape(array.ndim());
  std::vector<std::int64_t> strides(array.ndim());
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    shape[axis] = array.shape(axis);
    strides[axis] = array.stride(axis);
  }
  nb::capsule owner(new AnyArray(array), [](void* held) noexcept { delete static_cast<AnyArray*>(held); });
  return nb::cast(
      nb::ndarray<nb::numpy, const std::uint16_t>(array.data(), shape.size(), shape.data(), owner, strides.data()));
}

std::vector<std::pair<std::string, std::string>> rejections(const Plan& plan) {
  std::vector<std::pair<std::string, std::string>> list;
  for (const Rejection& rejection : plan.rejected) {
    list.emplace_back(std::string(name(rejection.mode)), rejection.reason);
  }
  return list;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The C++ library behind cutloss. Private: the public functions are cutloss.* and cutloss.jax.*";

  nb::exception<BudgetError>(m, "BudgetError", PyExc_ValueError);

  nb::class_<Machine>(m, "Machine", "What the planner may know of the machine.")
      .def_ro("target", &Machine::target)
      .def_ro("threads", &Machine::threads)
      .def_ro("l1_bytes", &Machine::l1_bytes)
      .def_ro("l2_bytes", &Machine::l2_bytes)
      .def_ro("l3_bytes", &Machine::l3_bytes);

  nb::class_<Plan>(m, "Plan", "How a problem is worked on: mode, tiles, threads and workspace. Read-only.")
      .def_prop_ro("mode", [](const Plan& plan) { return std::string(name(plan.mode)); })
      .def_ro("target", &Plan::target)
      .def_ro("threads", &Plan::threads)
      .def_ro("token_block", &Plan::token_block)
      .def_ro("vocab_tile", &Plan::vocab_tile)
      .def_ro("vocab_slices", &Plan::vocab_slices)
      .def_ro("chunk_tokens", &Plan::chunk_tokens)
      .def_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_ro("units", &Plan::units)
      .def_ro("flops", &Plan::flops)
      .def_prop_ro("rejected", &rejections, "[(mode, reason)] of the modes not taken.")
      .def("json", &Plan::json)
      .def("as_dict", [](const Plan& plan) { return nb::module_::import_("json").attr("loads")(plan.json()); })
      .def("__repr__", [](const Plan& plan) { return "<cutloss plan " + plan.json() + ">"; })
      .def("run", &run_plan, nb::kw_only(), "e"_a, "c"_a, "labels"_a, "cotangent"_a = 0, "loss"_a = 0, "nll"_a = 0,
           "lse"_a = 0, "d_e"_a = 0, "d_c"_a = 0,
           "Arguments are addresses, 0 for none; the memory must stay alive and unaliased. Returns the valid count.");

  m.def("detect_machine", &detect_machine, "target"_a = nb::none());
  m.def("make_plan", &plan_for, "machine"_a, nb::kw_only(), "tokens"_a, "hidden"_a, "vocab"_a, "e_dtype"_a, "c_dtype"_a,
        "label_dtype"_a, "head_layout"_a, "e_strides"_a = nb::none(), "c_strides"_a = nb::none(), "label_stride"_a = 1,
        "reduction"_a, "ignore_index"_a, "softcap"_a = nb::none(), "nan_for_bad_labels"_a = false, "want_d_e"_a,
        "want_d_c"_a, "mode"_a = "auto", "budget"_a = nb::none(), "threads"_a = 0);
  m.def("available_targets", &available_targets);
  m.def("version", [] { return std::string(version()); });
  m.def("bits_of_bfloat16", &bits_of_bfloat16, "array"_a);
  m.def(
      "xla_handler",
      []() -> nb::object {
        void* handler = xla_handler();
        if (handler == nullptr) return nb::none();
        return nb::capsule(handler, "xla._CUSTOM_CALL_TARGET");
      },
      "A capsule for jax.ffi.register_ffi_target, or None in a build without XLA's headers.");
}

}  // namespace cutloss::python
