// cutloss._core: the C++ library for Python. Buffers come in as addresses; who owns them, what dtype they have and how
// they are strided is settled in Python (cutloss/_arrays.py), so this file needs no array library.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "cutloss/cutloss.hpp"
#include "ffi.hpp"
#include "fields.hpp"
#include "names.hpp"
#include "problem.hpp"
#include "src/problem/resolve.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cutloss::python {
namespace {

struct BudgetError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

void raise(const Status& status) {
  switch (status.code()) {
    case StatusCode::budget_too_small: throw BudgetError(status.message());
    case StatusCode::out_of_memory:
      PyErr_SetString(PyExc_MemoryError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::unavailable: throw std::runtime_error(status.message());
    default: throw nb::value_error(status.message().c_str());
  }
}

namespace {

Machine detect_machine(std::optional<std::string> target) {
  Machine machine = value_or_raise(Machine::detect());
  if (target) machine.target = *std::move(target);
  return machine;
}

Plan plan_for(const Machine& machine, const nb::kwargs& given) {
  Fields fields(given);
  const Problem problem = read_problem(fields);
  const Limits limits = read_limits(fields);
  fields.finish();
  return value_or_raise(make_plan(problem, limits, machine));
}

void check(const Status& status) {
  if (!status.ok()) raise(status);
}

void validate_fields(const nb::kwargs& given) {
  Fields fields(given);
  const Problem problem = read_problem(fields);
  read_limits(fields);
  fields.finish();
  check(validate(problem));
}

void validate_order(const std::string& what, std::uintptr_t order, std::size_t vocab) {
  std::vector<std::int64_t> position(vocab);
  check(invert_order(what.c_str(), {reinterpret_cast<const std::int64_t*>(order), vocab}, position));
}

std::int64_t run_plan(const Plan& plan, FilterReport* filter_report, const nb::kwargs& given) {
  Fields fields(given);
  const Inputs inputs = read_inputs(fields);
  Outputs outputs = read_outputs(fields);
  fields.finish();
  std::int64_t valid_count = 0;
  outputs.valid_count = &valid_count;
  outputs.filter_report = filter_report;
  Status status;
  {
    nb::gil_scoped_release released;
    status = run(plan, inputs, outputs);
  }
  if (!status.ok()) raise(status);
  return valid_count;
}

void learn_order(const Plan& plan, std::uintptr_t order, const nb::kwargs& given) {
  Fields fields(given);
  const Inputs inputs = read_inputs(fields);
  fields.finish();
  Status status;
  {
    nb::gil_scoped_release released;
    status = learn_vocab_order(plan.problem, inputs, reinterpret_cast<std::int64_t*>(order));
  }
  if (!status.ok()) raise(status);
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

std::string report_text(const FilterReport& r) {
  std::ostringstream out;
  out << "<cutloss filter report: " << r.rows << " rows, " << r.rows_redone << " redone, " << r.kept_entries
      << " entries kept, epsilon " << r.epsilon << ", dropped mass " << r.dropped_mass_mean << " (at most "
      << r.dropped_mass_max << "), error bound " << r.error_bound << ">";
  return out.str();
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
      .def_ro("l3_bytes", &Machine::l3_bytes)
      .def_ro("spare_bytes", &Machine::spare_bytes)
      .def_prop_ro("tuning", [](const Machine& machine) { return format_tuning(machine.tuning); })
      .def_ro("tuning_note", &Machine::tuning_note);

  nb::class_<Plan>(m, "Plan", "How a problem is worked on: mode, tiles, threads and workspace. Read-only.")
      .def_prop_ro("mode", [](const Plan& plan) { return std::string(name(plan.mode)); })
      .def_ro("target", &Plan::target)
      .def_ro("threads", &Plan::threads)
      .def_ro("token_block", &Plan::token_block)
      .def_ro("vocab_tile", &Plan::vocab_tile)
      .def_ro("vocab_slices", &Plan::vocab_slices)
      .def_ro("chunk_tokens", &Plan::chunk_tokens)
      .def_ro("tuned", &Plan::tuned)
      .def_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_ro("units", &Plan::units)
      .def_ro("flops", &Plan::flops)
      .def_prop_ro("rejected", &rejections, "[(mode, reason)] of the modes not taken.")
      .def("json", &Plan::json)
      .def("as_dict", [](const Plan& plan) { return nb::module_::import_("json").attr("loads")(plan.json()); })
      .def("__repr__", [](const Plan& plan) { return "<cutloss plan " + plan.json() + ">"; })
      .def(
          "run", &run_plan, "filter_report"_a = nb::none(), "arrays"_a,
          "Arrays are addresses, by the names of Inputs and Outputs; the memory must stay alive and unaliased. Returns "
          "the valid count.")
      .def("learn_vocab_order", &learn_order, "order"_a, "arrays"_a, "Writes int64 [V] to an address.");

  nb::class_<FilterReport>(m, "FilterReport", "What a filter did, and what its error can be at most.")
      .def(nb::init<>())
      .def_ro("rows", &FilterReport::rows, "Rows that were filtered or redone.")
      .def_ro("rows_redone", &FilterReport::rows_redone, "Rows done exactly after all.")
      .def_ro("kept_entries", &FilterReport::kept_entries, "Of the rows that stayed filtered, labels included.")
      .def_ro("epsilon", &FilterReport::epsilon, "The one that was used.")
      .def_ro("dropped_mass_mean", &FilterReport::dropped_mass_mean, "Softmax mass below epsilon of a row.")
      .def_ro("dropped_mass_max", &FilterReport::dropped_mass_max)
      .def_ro("error_bound", &FilterReport::error_bound,
              "On the norm of the error of any row of d_e: certified at most, unbiased root mean square.")
      .def("__repr__", &report_text);

  m.def("detect_machine", &detect_machine, "target"_a = nb::none());
  m.def("make_plan", &plan_for, "machine"_a, "fields"_a, "Fields by the names of Problem, Metrics and Limits.");
  m.def("validate", &validate_fields, "fields"_a, "make_plan's checks of the problem alone, without a plan.");
  m.def("validate_targets", [](bool labels, bool soft) { check(validate_targets(labels, soft)); });
  m.def("validate_denominator", [](double denominator, const std::string& reduction) {
    check(validate_denominator(denominator, value_or_raise(reduction_from(reduction))));
  });
  m.def("validate_order", &validate_order, "what"_a, "order"_a, "vocab"_a, "order: the address of int64 [vocab].");
  m.def(
      "raise_bad_id",
      [](const std::string& what, const std::string& id, std::int64_t vocab, std::int64_t ignore_index) {
        raise(bad_id(what, id, vocab, ignore_index));
      },
      "what"_a, "id"_a, "vocab"_a, "ignore_index"_a);
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
