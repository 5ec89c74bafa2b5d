// The functions of the C interface.
#include <algorithm>
#include <cstring>
#include <string>

#include "cutloss/cutloss.h"
#include "cutloss/cutloss.hpp"
#include "src/capi/convert.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

struct cutloss_plan {
  cutloss::Plan plan;
  std::string json;
};

namespace {

using cutloss::capi::guarded;

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

// Defaults for as much of a struct as the caller has.
template <typename T>
void set_defaults(T* to, std::size_t size, void (*init)(T*)) {
  if (to == nullptr || size < sizeof(to->size)) return;
  T defaults;
  init(&defaults);
  defaults.size = std::min(size, sizeof(T));
  std::memcpy(to, &defaults, defaults.size);
}

}  // namespace

using namespace cutloss::capi;
using cutloss::Status;

void(cutloss_problem_init)(cutloss_problem* to) { set_defaults(to, sizeof *to, problem_defaults); }
void(cutloss_limits_init)(cutloss_limits* to) { set_defaults(to, sizeof *to, zeros<cutloss_limits>); }
void(cutloss_inputs_init)(cutloss_inputs* to) { set_defaults(to, sizeof *to, zeros<cutloss_inputs>); }
void(cutloss_outputs_init)(cutloss_outputs* to) { set_defaults(to, sizeof *to, zeros<cutloss_outputs>); }
void(cutloss_filter_report_init)(cutloss_filter_report* to) {
  set_defaults(to, sizeof *to, zeros<cutloss_filter_report>);
}
void cutloss_problem_init_sized(cutloss_problem* to, size_t size) { set_defaults(to, size, problem_defaults); }
void cutloss_limits_init_sized(cutloss_limits* to, size_t size) { set_defaults(to, size, zeros<cutloss_limits>); }
void cutloss_inputs_init_sized(cutloss_inputs* to, size_t size) { set_defaults(to, size, zeros<cutloss_inputs>); }
void cutloss_outputs_init_sized(cutloss_outputs* to, size_t size) { set_defaults(to, size, zeros<cutloss_outputs>); }
void cutloss_filter_report_init_sized(cutloss_filter_report* to, size_t size) {
  set_defaults(to, size, zeros<cutloss_filter_report>);
}

cutloss_status cutloss_make_plan(const cutloss_problem* problem, const cutloss_limits* limits, cutloss_plan** out) {
  if (out != nullptr) *out = nullptr;
  return guarded([&]() -> Status {
    if (out == nullptr) return cutloss::invalid("out is null");
    cutloss::Problem wanted;
    CUTLOSS_TRY(to_problem(problem, wanted));
    cutloss_limits l;
    zeros(&l);
    if (limits != nullptr) CUTLOSS_TRY(read("limits", limits, zeros<cutloss_limits>, l));
    cutloss::Limits bounds;
    CUTLOSS_TRY(to_enum("mode", l.mode, 6, bounds.mode));
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
    cutloss::Inputs from;
    CUTLOSS_TRY(to_inputs(inputs, from));
    cutloss::Outputs results;
    cutloss_filter_report* report = nullptr;
    CUTLOSS_TRY(to_outputs(outputs, results, report));
    if (workspace == nullptr) return cutloss::invalid("workspace is null");
    const std::span<std::byte> bytes(static_cast<std::byte*>(workspace), workspace_bytes);
    const auto run_on = [&](cutloss::Executor* workers) -> Status {
      if (report == nullptr) return cutloss::run(plan->plan, from, results, bytes, workers);
      // run() will see only the copy. The caller's own is as long as it says.
      CUTLOSS_TRY(cutloss::check_alignment("filter_report", report, alignof(cutloss_filter_report)));
      CUTLOSS_TRY(cutloss::validate_buffers(plan->plan.problem, from, results,
                                            {cutloss::written_range("filter_report", report, report->size),
                                             cutloss::written_range("workspace", workspace, workspace_bytes)}));
      cutloss::FilterReport filled;
      results.filter_report = &filled;
      CUTLOSS_TRY(cutloss::run(plan->plan, from, results, bytes, workers));
      write_report(filled, report);
      return Status();
    };
    if (executor == nullptr) return run_on(nullptr);
    cutloss_executor host;
    CUTLOSS_TRY(read("executor", executor, executor_defaults, host));
    if (host.parallel_for == nullptr || host.concurrency < 1) {
      return cutloss::invalid("executor needs parallel_for and a concurrency of 1 or more; concurrency is ",
                              host.concurrency);
    }
    HostExecutor adapted(host);
    return run_on(&adapted);
  });
}

cutloss_status cutloss_learn_vocab_order(const cutloss_problem* problem, const cutloss_inputs* inputs, int64_t* order) {
  return guarded([&]() -> Status {
    cutloss::Problem wanted;
    CUTLOSS_TRY(to_problem(problem, wanted));
    cutloss::Inputs from;
    CUTLOSS_TRY(to_inputs(inputs, from));
    return cutloss::learn_vocab_order(wanted, from, order);
  });
}

const char* cutloss_last_error(void) { return last_error_text(); }

const char* cutloss_version(void) { return CUTLOSS_VERSION; }
