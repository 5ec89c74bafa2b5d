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
#include <iterator>
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

Result<DType> buffer_dtype(std::string_view what, const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return DType::f32;
    case ffi::DataType::F16: return DType::f16;
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
  std::optional<T> get_if(std::string_view name) {
    if (!dictionary_.contains(name)) return std::nullopt;
    return get<T>(name);
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

Problem read_problem(Attributes& attributes) {
  Problem p;
  p.head_layout = attributes.keep(head_layout_from(attributes.get<std::string_view>("head_layout")));
  p.reduction = attributes.keep(reduction_from(attributes.get<std::string_view>("reduction")));
  p.ignore_index = attributes.get<std::int64_t>("ignore_index");
  p.bad_labels = BadLabels::nan;
  p.logit_scale = attributes.get<float>("logit_scale");
  p.softcap = attributes.get_if<float>("softcap");
  p.token_weights = attributes.get<bool>("token_weights");
  p.class_weights = attributes.get<bool>("class_weights");
  p.label_smoothing = attributes.get<float>("label_smoothing");
  p.z_loss = attributes.get<float>("z_loss");
  p.soft_targets = attributes.get<std::int64_t>("soft_targets");
  p.shift = attributes.get<std::int64_t>("shift");
  p.sequence = attributes.get<std::int64_t>("sequence");
  p.lse_cotangent = attributes.get<bool>("lse_cotangent");
  p.metrics.entropy = attributes.get<bool>("entropy");
  p.metrics.argmax = attributes.get<bool>("argmax");
  p.metrics.rank = attributes.get<bool>("rank");
  p.metrics.top_k = attributes.get<std::int64_t>("top_k");
  p.metrics.mean_logits = attributes.get<bool>("mean_logits");
  if (const auto filter = attributes.get_if<std::string_view>("filter")) {
    p.filter = attributes.keep(filter_from(*filter));
    p.vocab_order = attributes.get<bool>("vocab_order");
  }
  p.tolerance = attributes.get_if<float>("tolerance");
  p.epsilon = attributes.get_if<float>("epsilon");
  p.want_d_e = attributes.get<bool>("want_d_e");
  p.want_d_c = attributes.get<bool>("want_d_c");
  p.want_d_bias = attributes.get<bool>("want_d_bias");
  return p;
}

Limits read_limits(Attributes& attributes) {
  Limits limits;
  limits.mode = attributes.keep(mode_from(attributes.get<std::string_view>("mode")));
  limits.threads = static_cast<int>(attributes.get<std::int64_t>("threads"));
  if (const auto budget = attributes.get_if<std::int64_t>("budget")) limits.budget_bytes = *budget;
  return limits;
}

// The machine that the program was traced for: with it the plan, and so the workspace, is what tracing found.
Machine read_machine(Attributes& attributes) {
  Machine machine;
  machine.target = std::string(attributes.get<std::string_view>("target"));
  machine.threads = static_cast<int>(attributes.get<std::int64_t>("machine_threads"));
  machine.l1_bytes = attributes.get<std::int64_t>("l1_bytes");
  machine.l2_bytes = attributes.get<std::int64_t>("l2_bytes");
  machine.l3_bytes = attributes.get<std::int64_t>("l3_bytes");
  machine.spare_bytes = attributes.get<std::int64_t>("spare_bytes");
  machine.tuning = attributes.keep(parse_tuning(attributes.get<std::string_view>("tuning")));
  return machine;
}

// The operands and results of the call, in the order in which _ffi.py lists them. Those that are not there are empty.
// JAX has no integers of 64 bits where x64 is off, the library has such ids: they come and go as the low and the high
// word of each, so that XLA's plan counts them and nothing is copied here.
struct Arguments {
  enum In { e, c, labels, cotangent, bias, token_weights, class_weights, lse_cotangent, soft_ids, soft_probabilities,
            vocab_order, denominator, seed, inputs };
  enum Out { loss, nll, lse, d_e, d_c, d_bias, entropy, argmax, correct, rank, top_k_ids, top_k_logprobs, mean_logits,
             filter_report, workspace, outputs };

  Arguments(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}
  bool complete() const { return args_.size() == inputs && rets_.size() == outputs; }
  ffi::AnyBuffer in(In which) const { return args_.get<ffi::AnyBuffer>(which).value(); }
  ffi::AnyBuffer out(Out which) const { return *rets_.get<ffi::AnyBuffer>(which).value(); }
  template <typename T>
  const T* input(bool there, In which) const {
    return there ? address<T>(in(which)) : nullptr;
  }
  template <typename T>
  T* output(bool there, Out which) const {
    return there ? address<T>(out(which)) : nullptr;
  }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
};

// In the order in which _options.py names the numbers.
void write_report(const FilterReport& r, ffi::AnyBuffer to) {
  const double values[] = {static_cast<double>(r.rows), static_cast<double>(r.rows_redone), r.kept_entries, r.epsilon,
                           r.dropped_mass_mean, r.dropped_mass_max, r.error_bound};
  if (to.element_count() == std::size(values)) {
    std::transform(std::begin(values), std::end(values), address<float>(to),
                   [](double value) { return static_cast<float>(value); });
  }
}

Status read_shapes(const Arguments& arguments, bool has_bias, Attributes& attributes, Problem& p) {
  const ffi::AnyBuffer e = arguments.in(Arguments::e);
  const ffi::AnyBuffer c = arguments.in(Arguments::c);
  if (e.dimensions().size() != 2 || c.dimensions().size() != 2) {
    return Status(StatusCode::invalid_argument, "e and c must have two axes");
  }
  p.tokens = e.dimensions()[0];
  p.hidden = e.dimensions()[1];
  p.vocab = c.dimensions()[p.head_layout == HeadLayout::vd ? 0 : 1];
  p.e_dtype = attributes.keep(buffer_dtype("e", e));
  p.c_dtype = attributes.keep(buffer_dtype("c", c));
  p.label_dtype = attributes.keep(
      buffer_dtype("labels", arguments.in(p.soft_targets > 0 ? Arguments::soft_ids : Arguments::labels)));
  if (has_bias) p.bias_dtype = attributes.keep(buffer_dtype("bias", arguments.in(Arguments::bias)));
  return attributes.failure();
}

Inputs read_inputs(const Arguments& a, const Problem& p, bool has_labels) {
  using A = Arguments;
  Inputs in;
  in.e = a.input<void>(true, A::e);
  in.c = a.input<void>(true, A::c);
  in.labels = a.input<void>(has_labels, A::labels);
  in.cotangent = a.input<float>(true, A::cotangent);
  in.bias = a.input<void>(p.bias_dtype.has_value(), A::bias);
  in.token_weights = a.input<float>(p.token_weights, A::token_weights);
  in.class_weights = a.input<float>(p.class_weights, A::class_weights);
  in.lse_cotangent = a.input<float>(p.lse_cotangent, A::lse_cotangent);
  in.soft_ids = a.input<void>(p.soft_targets > 0, A::soft_ids);
  in.soft_probabilities = a.input<float>(p.soft_targets > 0, A::soft_probabilities);
  in.vocab_order = a.input<std::int64_t>(p.vocab_order, A::vocab_order);
  if (a.in(A::denominator).element_count() > 0) in.denominator = *a.input<float>(true, A::denominator);
  if (a.in(A::seed).element_count() > 1) {
    const auto* words = a.input<std::uint32_t>(true, A::seed);
    in.seed = words[0] | std::uint64_t{words[1]} << 32;
  }
  return in;
}

Status evaluate(ffi::ThreadPool pool, const Arguments& arguments, const ffi::Dictionary& dictionary) {
  using A = Arguments;
  if (!arguments.complete()) return Status(StatusCode::invalid_argument, "wrong number of operands: trace it again");
  Attributes attributes(dictionary);
  Problem problem = read_problem(attributes);
  const Limits limits = read_limits(attributes);
  const Machine machine = read_machine(attributes);
  const bool has_labels = attributes.get<bool>("has_labels");
  const bool has_bias = attributes.get<bool>("has_bias");
  if (Status s = read_shapes(arguments, has_bias, attributes, problem); !s.ok()) return s;

  Result<Plan> plan = make_plan(problem, limits, machine);
  if (!plan.ok()) return plan.status();
  const ffi::AnyBuffer workspace = arguments.out(A::workspace);
  if (plan->workspace_bytes > workspace.size_bytes()) {
    return Status(StatusCode::invalid_argument, "this program was traced with a workspace of " +
                                                    std::to_string(workspace.size_bytes()) +
                                                    " bytes, and this version of cutloss needs " +
                                                    std::to_string(plan->workspace_bytes) + ": trace it again");
  }

  const Inputs inputs = read_inputs(arguments, problem, has_labels);
  const Metrics& metrics = problem.metrics;
  Outputs outputs;
  outputs.loss = arguments.output<float>(true, A::loss);
  outputs.nll = arguments.output<float>(true, A::nll);
  outputs.lse = arguments.output<float>(true, A::lse);
  outputs.d_e = arguments.output<void>(problem.want_d_e, A::d_e);
  outputs.d_c = arguments.output<void>(problem.want_d_c, A::d_c);
  outputs.d_bias = arguments.output<void>(problem.want_d_bias, A::d_bias);
  outputs.entropy = arguments.output<float>(metrics.entropy, A::entropy);
  outputs.argmax = arguments.output<std::int64_t>(metrics.argmax, A::argmax);
  outputs.correct = arguments.output<std::uint8_t>(metrics.argmax, A::correct);
  outputs.rank = arguments.output<std::int64_t>(metrics.rank, A::rank);
  outputs.top_k_ids = arguments.output<std::int64_t>(metrics.top_k > 0, A::top_k_ids);
  outputs.top_k_logprobs = arguments.output<float>(metrics.top_k > 0, A::top_k_logprobs);
  outputs.mean_logits = arguments.output<float>(metrics.mean_logits, A::mean_logits);
  FilterReport report;
  outputs.filter_report = &report;
  PoolExecutor executor(pool, plan->threads);
  Status status = run(plan.value(), inputs, outputs,
                      {static_cast<std::byte*>(workspace.untyped_data()), workspace.size_bytes()}, &executor);
  write_report(report, arguments.out(A::filter_report));
  return status;
}

ffi::Error linear_cross_entropy(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                ffi::Dictionary attributes) {
  try {
    return error_from(evaluate(pool, Arguments(args, rets), attributes));
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory beside the workspace");
  } catch (const std::exception& failure) {
    return ffi::Error(ffi::ErrorCode::kInternal, failure.what());
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "cutloss: unknown exception");
  }
}

XLA_FFI_DEFINE_HANDLER(kLinearCrossEntropy, linear_cross_entropy,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace

void* xla_handler() { return reinterpret_cast<void*>(+kLinearCrossEntropy); }

}  // namespace cutloss::python

#endif  // CUTLOSS_WITH_XLA_FFI
