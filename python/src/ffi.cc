// The XLA FFI handler: the same library inside a jitted JAX program on CPU.
#include "ffi.hpp"

#ifndef CUTLOSS_WITH_XLA_FFI

void* cutloss::python::xla_handler() { return nullptr; }

#else

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>

#include "cutloss/cutloss.hpp"
#include "names.hpp"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cutloss::python {
namespace {

// What the helpers of one parallel_for share. A pool thread may start its helper long after parallel_for has returned:
// it then holds the last reference, finds no task left and touches nothing else. `body` lives on the caller's stack and
// is used only by one who has claimed a task, which the caller waits for.
struct Batch {
  Batch(std::int64_t task_count, const Executor::Body& task_body) : tasks(task_count), body(&task_body) {}

  void drain(int worker) {
    for (std::int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) {
      try {
        (*body)(task, worker);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
      std::lock_guard lock(mutex);
      if (++finished == tasks) all_finished.notify_one();
    }
  }

  void wait() {
    std::unique_lock lock(mutex);
    all_finished.wait(lock, [this] { return finished == tasks; });
    if (failure) std::rethrow_exception(failure);
  }

  const std::int64_t tasks;
  const Executor::Body* const body;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_finished;
  std::int64_t finished = 0;   // guarded by mutex
  std::exception_ptr failure;  // guarded by mutex
};

// XLA's intra-op pool. The caller may itself be one of the pool's threads, and all others may be busy or waiting in
// handlers like this one: so it works through the tasks too and waits only for tasks that have begun.
class PoolExecutor final : public Executor {
 public:
  PoolExecutor(ffi::ThreadPool pool, int concurrency) : pool_(pool), concurrency_(std::max(1, concurrency)) {}

  int concurrency() const override { return concurrency_; }

  void parallel_for(std::int64_t tasks, const Body& body) override {
    if (tasks <= 0) return;
    auto batch = std::make_shared<Batch>(tasks, body);
    const std::int64_t helpers = std::min({std::int64_t{concurrency_} - 1, tasks - 1, pool_.num_threads()});
    try {
      for (int worker = 1; worker <= helpers; ++worker) {
        pool_.Schedule([batch, worker] { batch->drain(worker); });
      }
    } catch (const std::bad_alloc&) {
      // Fewer helpers, then. To leave now would take `body` from those who have begun.
    }
    batch->drain(0);
    batch->wait();
  }

 private:
  ffi::ThreadPool pool_;
  int concurrency_;
};

ffi::Error error_from(const Status& status) {
  switch (status.code()) {
    case StatusCode::ok: return ffi::Error::Success();
    case StatusCode::invalid_argument: return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message());
    case StatusCode::unavailable: return ffi::Error(ffi::ErrorCode::kUnavailable, status.message());
    default: return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.message());
  }
}

Result<DType> buffer_dtype(std::string_view what, ffi::AnyBuffer buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return DType::f32;
    case ffi::DataType::BF16: return DType::bf16;
    case ffi::DataType::S32: return DType::i32;
    case ffi::DataType::S64: return DType::i64;
    default: return Status(StatusCode::invalid_argument, std::string(what) + ": unexpected XLA element type");
  }
}

// Reads attributes and keeps the first failure, so that a handler reads them all and asks once.
class Attributes {
 public:
  explicit Attributes(const ffi::Dictionary& dictionary) : dictionary_(dictionary) {}

  template <typename T>
  T get(std::string_view name) {
    ffi::ErrorOr<T> value = dictionary_.get<T>(name);
    if (value.has_value()) return *value;
    if (failure_.ok()) failure_ = Status(StatusCode::invalid_argument, value.error().message());
    return T{};
  }
  template <typename T>
  T keep(Result<T> result) {
    if (result.ok()) return result.value();
    if (failure_.ok()) failure_ = result.status();
    return T{};
  }
  const Status& failure() const { return failure_; }

 private:
  const ffi::Dictionary& dictionary_;
  Status failure_;
};

// XLA may give an empty array no address, where the library takes null for "not wanted".
template <typename T>
T* address(const ffi::AnyBuffer& buffer) {
  static std::max_align_t nothing;
  return static_cast<T*>(buffer.element_count() > 0 ? buffer.untyped_data() : &nothing);
}

Status evaluate(ffi::ThreadPool pool, ffi::AnyBuffer e, ffi::AnyBuffer c, ffi::AnyBuffer labels,
                ffi::AnyBuffer cotangent, ffi::Result<ffi::AnyBuffer> loss, ffi::Result<ffi::AnyBuffer> lse,
                ffi::Result<ffi::AnyBuffer> d_e, ffi::Result<ffi::AnyBuffer> d_c, ffi::Result<ffi::AnyBuffer> workspace,
                const ffi::Dictionary& dictionary) {
  if (e.dimensions().size() != 2 || c.dimensions().size() != 2) {
    return Status(StatusCode::invalid_argument, "e and c must have two axes");
  }
  Attributes attributes(dictionary);
  Problem problem;
  problem.head_layout = attributes.keep(head_layout_from(attributes.get<std::string_view>("head_layout")));
  const bool rows_are_vocab = problem.head_layout == HeadLayout::vd;
  problem.tokens = e.dimensions()[0];
  problem.hidden = e.dimensions()[1];
  problem.vocab = c.dimensions()[rows_are_vocab ? 0 : 1];
  problem.e_dtype = attributes.keep(buffer_dtype("e", e));
  problem.c_dtype = attributes.keep(buffer_dtype("c", c));
  problem.label_dtype = attributes.keep(buffer_dtype("labels", labels));
  problem.reduction = attributes.keep(reduction_from(attributes.get<std::string_view>("reduction")));
  problem.ignore_index = attributes.get<std::int64_t>("ignore_index");
  if (const float cap = attributes.get<float>("softcap"); cap != 0) problem.softcap = cap;
  problem.bad_labels = BadLabels::nan;
  problem.want_d_e = attributes.get<bool>("want_d_e");
  problem.want_d_c = attributes.get<bool>("want_d_c");

  Limits limits;
  limits.mode = attributes.keep(mode_from(attributes.get<std::string_view>("mode")));
  limits.threads = static_cast<int>(attributes.get<std::int64_t>("threads"));
  if (const auto budget = attributes.get<std::int64_t>("budget"); budget >= 0) limits.budget_bytes = budget;

  // The machine that the program was traced for: with it the plan, and so the workspace, is what tracing found.
  Machine machine;
  machine.target = std::string(attributes.get<std::string_view>("target"));
  machine.threads = static_cast<int>(attributes.get<std::int64_t>("machine_threads"));
  machine.l1_bytes = attributes.get<std::int64_t>("l1_bytes");
  machine.l2_bytes = attributes.get<std::int64_t>("l2_bytes");
  machine.l3_bytes = attributes.get<std::int64_t>("l3_bytes");
  if (!attributes.failure().ok()) return attributes.failure();

  Result<Plan> plan = make_plan(problem, limits, machine);
  if (!plan.ok()) return plan.status();
  if (plan->workspace_bytes > workspace->size_bytes()) {
    return Status(StatusCode::invalid_argument, "this program was traced with a workspace of " +
                                                    std::to_string(workspace->size_bytes()) +
                                                    " bytes, and this version of cutloss needs " +
                                                    std::to_string(plan->workspace_bytes) + ": trace it again");
  }

  Inputs inputs{address<void>(e), address<void>(c), address<void>(labels), address<float>(cotangent)};
  Outputs outputs;
  outputs.loss = address<float>(*loss);
  outputs.lse = address<float>(*lse);
  if (problem.want_d_e) outputs.d_e = address<void>(*d_e);
  if (problem.want_d_c) outputs.d_c = address<void>(*d_c);
  PoolExecutor executor(pool, plan->threads);
  return run(plan.value(), inputs, outputs,
             {static_cast<std::byte*>(workspace->untyped_data()), workspace->size_bytes()}, &executor);
}

template <typename... Args>
ffi::Error handle(Args... args) {
  try {
    return error_from(evaluate(args...));
  } catch (const std::exception& failure) {
    return ffi::Error(ffi::ErrorCode::kInternal, failure.what());
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "cutloss: unknown exception");
  }
}

ffi::Error linear_cross_entropy(ffi::ThreadPool pool, ffi::AnyBuffer e, ffi::AnyBuffer c, ffi::AnyBuffer labels,
                                ffi::AnyBuffer cotangent, ffi::Result<ffi::AnyBuffer> loss,
                                ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> d_e,
                                ffi::Result<ffi::AnyBuffer> d_c, ffi::Result<ffi::AnyBuffer> workspace,
                                ffi::Dictionary attributes) {
  return handle(pool, e, c, labels, cotangent, loss, lse, d_e, d_c, workspace, attributes);
}

XLA_FFI_DEFINE_HANDLER(kLinearCrossEntropy, linear_cross_entropy,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // e [N, D]
                           .Arg<ffi::AnyBuffer>()  // c [V, D] or [D, V]
                           .Arg<ffi::AnyBuffer>()  // labels [N]
                           .Arg<ffi::AnyBuffer>()  // cotangent f32 [1], or [N] for reduction "none"
                           .Ret<ffi::AnyBuffer>()  // loss f32 [1] or [N]
                           .Ret<ffi::AnyBuffer>()  // lse f32 [N]
                           .Ret<ffi::AnyBuffer>()  // dE like e, or [0]
                           .Ret<ffi::AnyBuffer>()  // dC like c, or [0]
                           .Ret<ffi::AnyBuffer>()  // workspace u8
                           .Attrs());

}  // namespace

void* xla_handler() { return reinterpret_cast<void*>(+kLinearCrossEntropy); }

}  // namespace cutloss::python

#endif  // CUTLOSS_WITH_XLA_FFI
