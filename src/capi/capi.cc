// C structs to C++ values and back; the only place where exceptions are caught.
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "cutloss/cutloss.h"
#include "cutloss/cutloss.hpp"
#include "src/problem/text.h"

struct cutloss_plan {
  cutloss::Plan plan;
  std::string json;
};

namespace {

using cutloss::Status;
using cutloss::StatusCode;

thread_local std::string last_error;

cutloss_status code_of(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return CUTLOSS_OK;
    case StatusCode::invalid_argument: return CUTLOSS_INVALID_ARGUMENT;
    case StatusCode::budget_too_small: return CUTLOSS_BUDGET_TOO_SMALL;
    case StatusCode::out_of_memory: return CUTLOSS_OUT_OF_MEMORY;
    case StatusCode::unavailable: return CUTLOSS_UNAVAILABLE;
  }
  return CUTLOSS_INTERNAL;
}

template <typename Call>
cutloss_status guarded(const Call& call) {
  try {
    const Status status = call();
    if (!status.ok()) last_error = status.message();
    return code_of(status.code());
  } catch (const std::bad_alloc&) {
    last_error.clear();  // no allocation on the way out
    return CUTLOSS_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "unknown exception";
  }
  return CUTLOSS_INTERNAL;
}

// The caller's struct, with defaults for the fields that its version did not have.
template <typename T>
Status read(const char* argument, const T* from, void (*init)(T*), T& to) {
  init(&to);
  if (from == nullptr) return cutloss::invalid(argument, " is null");
  if (from->size < sizeof(from->size)) {
    return cutloss::invalid(argument, ".size is ", from->size, "; set it (cutloss_", argument,
                            "_init does, where there is one)");
  }
  std::memcpy(&to, from, std::min(from->size, sizeof(T)));
  return Status();
}

template <typename E>
Status to_enum(const char* field, std::int32_t value, std::int32_t count, E& to) {
  if (value < 0 || value >= count) {
    return cutloss::invalid(field, " is ", value, "; it must be in [0, ", count, ")");
  }
  to = static_cast<E>(value);
  return Status();
}

#define CUTLOSS_TRY(expression) \
  if (Status try_status = (expression); !try_status.ok()) return try_status

Status to_problem(const cutloss_problem& from, cutloss::Problem& to) {
  to.tokens = from.tokens;
  to.hidden = from.hidden;
  to.vocab = from.vocab;
  CUTLOSS_TRY(to_enum("e_dtype", from.e_dtype, 4, to.e_dtype));
  CUTLOSS_TRY(to_enum("c_dtype", from.c_dtype, 4, to.c_dtype));
  CUTLOSS_TRY(to_enum("label_dtype", from.label_dtype, 4, to.label_dtype));
  CUTLOSS_TRY(to_enum("head_layout", from.head_layout, 2, to.head_layout));
  CUTLOSS_TRY(to_enum("reduction", from.reduction, 3, to.reduction));
  CUTLOSS_TRY(to_enum("bad_labels", from.bad_labels, 2, to.bad_labels));
  if (from.has_e_strides) to.e_strides = cutloss::Strides{from.e_strides[0], from.e_strides[1]};
  if (from.has_c_strides) to.c_strides = cutloss::Strides{from.c_strides[0], from.c_strides[1]};
  to.label_stride = from.label_stride;
  to.ignore_index = from.ignore_index;
  if (from.softcap != 0.0f) to.softcap = from.softcap;
  to.want_d_e = from.want_d_e != 0;
  to.want_d_c = from.want_d_c != 0;
  return Status();
}

class HostExecutor final : public cutloss::Executor {
 public:
  explicit HostExecutor(const cutloss_executor& host) : host_(host) {}
  int concurrency() const override { return host_.concurrency; }
  void parallel_for(std::int64_t tasks, const Body& body) override {
    host_.parallel_for(
        host_.context, tasks,
        [](void* context, std::int64_t task, std::int32_t worker) {
          (*static_cast<const Body*>(context))(task, worker);
        },
        const_cast<Body*>(&body));
  }

 private:
  const cutloss_executor host_;
};

void executor_defaults(cutloss_executor* executor) { *executor = {sizeof *executor, nullptr, 1, nullptr}; }

}  // namespace

void cutloss_problem_init(cutloss_problem* problem) {
  *problem = {};
  problem->size = sizeof *problem;
  problem->label_dtype = CUTLOSS_I64;
  problem->label_stride = 1;
  problem->ignore_index = -100;
}

void cutloss_limits_init(cutloss_limits* limits) {
  *limits = {};
  limits->size = sizeof *limits;
}

void cutloss_inputs_init(cutloss_inputs* inputs) {
  *inputs = {};
  inputs->size = sizeof *inputs;
}

void cutloss_outputs_init(cutloss_outputs* outputs) {
  *outputs = {};
  outputs->size = sizeof *outputs;
}

cutloss_status cutloss_make_plan(const cutloss_problem* problem, const cutloss_limits* limits, cutloss_plan** out) {
  if (out != nullptr) *out = nullptr;
  return guarded([&]() -> Status {
    if (out == nullptr) return cutloss::invalid("out is null");
    cutloss_problem p;
    CUTLOSS_TRY(read("problem", problem, cutloss_problem_init, p));
    cutloss_limits l;
    cutloss_limits_init(&l);
    if (limits != nullptr) CUTLOSS_TRY(read("limits", limits, cutloss_limits_init, l));

    cutloss::Problem wanted;
    CUTLOSS_TRY(to_problem(p, wanted));
    cutloss::Limits bounds;
    CUTLOSS_TRY(to_enum("mode", l.mode, 5, bounds.mode));
    bounds.threads = l.threads;
    if (l.has_budget) bounds.budget_bytes = l.budget_bytes;
    cutloss::Result<cutloss::Machine> machine = cutloss::Machine::detect();
    if (!machine.ok()) return machine.status();
    if (l.target != nullptr) machine->target = l.target;
    cutloss::Result<cutloss::Plan> plan = cutloss::make_plan(wanted, bounds, machine.value());
    if (!plan.ok()) return plan.status();
    std::string json = plan->json();
    *out = new cutloss_plan{std::move(plan.value()), std::move(json)};
    return Status();
  });
}

size_t cutloss_plan_workspace_bytes(const cutloss_plan* plan) {
  return plan == nullptr ? 0 : static_cast<size_t>(plan->plan.workspace_bytes);
}

const char* cutloss_plan_json(const cutloss_plan* plan) { return plan == nullptr ? "" : plan->json.c_str(); }

void cutloss_plan_free(cutloss_plan* plan) { delete plan; }

cutloss_status cutloss_run(const cutloss_plan* plan, const cutloss_inputs* inputs, const cutloss_outputs* outputs,
                           void* workspace, size_t workspace_bytes, const cutloss_executor* executor) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return cutloss::invalid("plan is null");
    cutloss_inputs in;
    CUTLOSS_TRY(read("inputs", inputs, cutloss_inputs_init, in));
    cutloss_outputs to;
    CUTLOSS_TRY(read("outputs", outputs, cutloss_outputs_init, to));
    if (workspace == nullptr) return cutloss::invalid("workspace is null");
    const cutloss::Inputs from{in.e, in.c, in.labels, in.cotangent};
    const cutloss::Outputs results{to.loss, to.nll, to.lse, to.d_e, to.d_c, to.valid_count};
    const std::span<std::byte> bytes(static_cast<std::byte*>(workspace), workspace_bytes);
    if (executor == nullptr) return cutloss::run(plan->plan, from, results, bytes);
    cutloss_executor host;
    CUTLOSS_TRY(read("executor", executor, executor_defaults, host));
    if (host.parallel_for == nullptr || host.concurrency < 1) {
      return cutloss::invalid("executor needs parallel_for and a concurrency of 1 or more; concurrency is ",
                              host.concurrency);
    }
    HostExecutor adapted(host);
    return cutloss::run(plan->plan, from, results, bytes, &adapted);
  });
}

const char* cutloss_last_error(void) { return last_error.c_str(); }

const char* cutloss_version(void) { return CUTLOSS_VERSION; }
