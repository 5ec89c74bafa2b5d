// Bytes -> structs of cutloss.h of any size, with any enums, flags, numbers and strides -> plan, and run where the
// extents are small. Every buffer has the very size that the problem states, so that a byte too far is an error of
// AddressSanitizer; a call that fails says why and has written nothing.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cutloss/cutloss.h"

namespace {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), left_(size) {}
  void fill(void* to, std::size_t size) {
    const std::size_t taken = std::min(size, left_);
    std::memset(to, 0, size);
    if (taken > 0) std::memcpy(to, at_, taken);
    at_ += taken;
    left_ -= taken;
  }
  template <typename T>
  T take() {
    T value;
    fill(&value, sizeof value);
    return value;
  }
  std::int64_t below(std::int64_t count) { return take<std::uint16_t>() % count; }

 private:
  const std::uint8_t* at_;
  std::size_t left_;
};

void require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "%s; last error: %s\n", what, cutloss_last_error());
  std::abort();
}

bool failed(cutloss_status status) {
  require(status >= CUTLOSS_OK && status < CUTLOSS_INTERNAL, "a status that must not be");
  require(status == CUTLOSS_OK || *cutloss_last_error() != 0, "a failure without a text");
  return status != CUTLOSS_OK;
}

// A struct of the caller's size, in just so much memory; at least its size field.
template <typename T>
class Sized {
 public:
  Sized(const T& value, std::size_t size) : memory_(new std::byte[std::max(size, sizeof(std::size_t))]()) {
    std::memcpy(memory_.get(), &value, std::min(size, sizeof value));
    std::memcpy(memory_.get(), &size, sizeof size);
  }
  const T* get() const { return reinterpret_cast<const T*>(memory_.get()); }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

// Of this version, a later one or any earlier one: a version ends behind a field, never within a pointer.
template <typename T>
std::size_t draw_size(Bytes& bytes) {
  const std::int64_t kind = bytes.below(8);
  return kind > 1 ? sizeof(T) : kind == 1 ? sizeof(T) + 8 : static_cast<std::size_t>(bytes.below(sizeof(T))) / 8 * 8;
}

std::size_t item(std::int32_t dtype) {
  return dtype == CUTLOSS_F32 || dtype == CUTLOSS_I32 ? 4 : dtype == CUTLOSS_I64 ? 8 : 2;
}

// A field of any value now and then, else one of a size that can be run.
void confine(Bytes& bytes, std::int64_t& field, std::int64_t least, std::int64_t most) {
  if (bytes.below(32) > 0) field = least + bytes.below(most - least + 1);
}

// Flags that are on now and then, and go together: else nearly every problem is refused.
void settle(Bytes& bytes, cutloss_problem& p) {
  for (std::int32_t* flag :
       {&p.has_e_strides, &p.has_c_strides, &p.want_d_e, &p.want_d_c, &p.has_bias, &p.token_weights, &p.class_weights,
        &p.lse_cotangent, &p.vocab_order, &p.want_d_bias, &p.accumulate_d_e, &p.accumulate_d_c, &p.accumulate_d_bias,
        &p.has_d_e_dtype, &p.has_d_c_dtype, &p.entropy, &p.argmax, &p.rank, &p.mean_logits}) {
    *flag = static_cast<std::int32_t>(bytes.below(2));
  }
  p.want_d_bias &= p.has_bias;
  p.accumulate_d_e &= p.want_d_e, p.accumulate_d_c &= p.want_d_c, p.accumulate_d_bias &= p.want_d_bias;
  p.logit_scale = 1, p.bad_labels = CUTLOSS_BAD_LABELS_NAN;
  if (p.soft_targets > 0) p.class_weights = 0, p.label_smoothing = 0;
  if (p.filter != CUTLOSS_FILTER_TILE && p.softcap != 0) p.label_smoothing = 0;
  p.tolerance = 0, p.epsilon = p.filter == CUTLOSS_FILTER_NONE ? 0.0f : 1e-3f;
}

cutloss_problem draw_problem(Bytes& bytes) {
  cutloss_problem p;
  cutloss_problem_init(&p);
  if (bytes.below(4) > 0) {
    bytes.fill(&p, sizeof p);
    // Mostly what may be, or all ends at the first enum.
    for (std::int32_t* dtype : {&p.e_dtype, &p.c_dtype, &p.bias_dtype, &p.d_e_dtype, &p.d_c_dtype}) {
      if (bytes.below(32) > 0) *dtype = std::int32_t{CUTLOSS_F16} * (bytes.below(3) == 2) + bytes.below(2);
    }
    if (bytes.below(32) > 0) p.label_dtype = CUTLOSS_I32 + static_cast<std::int32_t>(bytes.below(2));
    if (bytes.below(32) > 0) p.reduction = static_cast<std::int32_t>(bytes.below(3));
    if (bytes.below(32) > 0) p.head_layout = static_cast<std::int32_t>(bytes.below(2));
    if (bytes.below(32) > 0) p.bad_labels = static_cast<std::int32_t>(bytes.below(2));
    if (bytes.below(32) > 0) p.filter = static_cast<std::int32_t>(bytes.below(4));
    const float numbers[] = {0, 0.25f, 1e-3f};
    for (float* number : {&p.softcap, &p.label_smoothing, &p.tolerance, &p.epsilon, &p.z_loss, &p.logit_scale}) {
      if (bytes.below(16) > 0) *number = numbers[bytes.below(3)];
    }
  }
  confine(bytes, p.tokens, 0, 40);
  confine(bytes, p.hidden, 1, 20);
  confine(bytes, p.vocab, 1, 150);
  confine(bytes, p.soft_targets, 0, 2);
  confine(bytes, p.top_k, 0, 4);
  confine(bytes, p.sequence, 0, 1);
  confine(bytes, p.shift, 0, 1);
  confine(bytes, p.label_stride, -2, 2);
  for (std::int64_t* stride : {&p.e_strides[0], &p.e_strides[1], &p.c_strides[0], &p.c_strides[1]}) {
    confine(bytes, *stride, -30, 30);
  }
  if (bytes.below(4) > 0) settle(bytes, p);
  return p;
}

bool can_run(const cutloss_problem& p) {
  const auto small = [](std::int64_t x, std::int64_t most) { return x >= -most && x <= most; };
  return small(p.tokens, 64) && small(p.hidden, 64) && small(p.vocab, 256) && small(p.soft_targets, 8) &&
         small(p.top_k, 128) && small(p.label_stride, 64) && small(p.e_strides[0], 64) && small(p.e_strides[1], 64) &&
         small(p.c_strides[0], 64) && small(p.c_strides[1], 64);
}

// The arrays of one call.
class Memory {
 public:
  explicit Memory(Bytes& bytes) : bytes_(bytes) {}

  // n0 x n1 elements with strides, of bytes out of the input and then zeros; the address of [0, 0].
  template <typename T>
  T* input(std::int64_t n0, std::int64_t stride0, std::int64_t n1, std::int64_t stride1, std::size_t size) {
    std::int64_t first = 0, count = n0 > 0 && n1 > 0;
    for (const auto& [n, stride] : {std::pair{n0, stride0}, std::pair{n1, stride1}}) {
      const std::int64_t reach = std::max<std::int64_t>(n - 1, 0) * std::abs(stride);
      if (stride < 0) first += reach;
      if (count > 0) count += reach;
    }
    std::byte* const memory = take(static_cast<std::size_t>(count) * size);
    bytes_.fill(memory, static_cast<std::size_t>(count) * size);
    return reinterpret_cast<T*>(memory + (count > 0 ? first : 0) * static_cast<std::int64_t>(size));
  }
  template <typename T>
  T* output(bool wanted, std::int64_t count, std::size_t size = sizeof(T)) {
    if (!wanted) return nullptr;
    std::byte* const memory = take(static_cast<std::size_t>(count) * size);
    outputs_.emplace_back(memory, static_cast<std::size_t>(count) * size);
    std::memset(memory, kUntouched, outputs_.back().second);
    return reinterpret_cast<T*>(memory);
  }
  bool untouched() const {
    return std::all_of(outputs_.begin(), outputs_.end(), [](const auto& o) {
      return std::all_of(o.first, o.first + o.second, [](std::byte b) { return b == std::byte{kUntouched}; });
    });
  }

 private:
  static constexpr unsigned char kUntouched = 0x5A;
  std::byte* take(std::size_t size) { return all_.emplace_back(new std::byte[size]).get(); }
  Bytes& bytes_;
  std::vector<std::unique_ptr<std::byte[]>> all_;
  std::vector<std::pair<std::byte*, std::size_t>> outputs_;
};

cutloss_inputs draw_inputs(const cutloss_problem& p, Memory& memory, Bytes& bytes) {
  const bool vd = p.head_layout == CUTLOSS_HEAD_VD;
  const std::int64_t rows = vd ? p.vocab : p.hidden, columns = vd ? p.hidden : p.vocab, n = p.tokens;
  const auto vector = [&](bool there, std::int64_t count, auto* as, std::size_t size) {
    return there ? memory.input<std::remove_pointer_t<decltype(as)>>(count, 1, 1, 1, size) : nullptr;
  };
  float* const f = nullptr;
  std::byte* const any = nullptr;
  cutloss_inputs in;
  cutloss_inputs_init(&in);
  in.e = memory.input<std::byte>(n, p.has_e_strides ? p.e_strides[0] : p.hidden, p.hidden,
                                 p.has_e_strides ? p.e_strides[1] : 1, item(p.e_dtype));
  in.c = memory.input<std::byte>(rows, p.has_c_strides ? p.c_strides[0] : columns, columns,
                                 p.has_c_strides ? p.c_strides[1] : 1, item(p.c_dtype));
  const bool soft = p.soft_targets > 0;
  if (!soft) in.labels = memory.input<std::byte>(n, p.label_stride, 1, 1, item(p.label_dtype));
  in.soft_ids = vector(soft, n * p.soft_targets, any, item(p.label_dtype));
  in.soft_probabilities = vector(soft, n * p.soft_targets, f, 4);
  in.cotangent = vector(bytes.below(2) > 0, p.reduction == CUTLOSS_NONE ? n : 1, f, 4);
  in.bias = vector(p.has_bias, p.vocab, any, item(p.bias_dtype));
  in.token_weights = vector(p.token_weights, n, f, 4);
  in.class_weights = vector(p.class_weights, p.vocab, f, 4);
  in.lse_cotangent = vector(p.lse_cotangent, n, f, 4);
  if (p.vocab_order) {
    auto* const order = memory.input<std::int64_t>(p.vocab, 1, 1, 1, 8);
    if (bytes.below(4) > 0) {
      for (std::int64_t v = 0; v < p.vocab; ++v) order[v] = p.vocab - 1 - v;
    }
    in.vocab_order = order;
  }
  in.has_denominator = p.reduction == CUTLOSS_MEAN && bytes.below(4) == 0;
  in.denominator = bytes.take<double>();
  return in;
}

cutloss_outputs draw_outputs(const cutloss_problem& p, Memory& memory, cutloss_filter_report& report) {
  const std::int64_t n = p.tokens;
  cutloss_outputs out;
  cutloss_outputs_init(&out);
  out.loss = memory.output<float>(true, p.reduction == CUTLOSS_NONE ? n : 1);
  out.nll = memory.output<float>(true, n);
  out.lse = memory.output<float>(true, n);
  out.d_e = memory.output<std::byte>(p.want_d_e, n * p.hidden, item(p.has_d_e_dtype ? p.d_e_dtype : p.e_dtype));
  out.d_c = memory.output<std::byte>(p.want_d_c, p.vocab * p.hidden, item(p.has_d_c_dtype ? p.d_c_dtype : p.c_dtype));
  out.d_bias = memory.output<std::byte>(p.want_d_bias, p.vocab, item(p.bias_dtype));
  out.valid_count = memory.output<std::int64_t>(true, 1);
  out.entropy = memory.output<float>(p.entropy, n);
  out.argmax = memory.output<std::int64_t>(p.argmax, n);
  out.correct = memory.output<std::uint8_t>(p.argmax, n);
  out.rank = memory.output<std::int64_t>(p.rank, n);
  out.top_k_ids = memory.output<std::int64_t>(p.top_k > 0, n * p.top_k);
  out.top_k_logprobs = memory.output<float>(p.top_k > 0, n * p.top_k);
  out.mean_logits = memory.output<float>(p.mean_logits, p.vocab);
  out.filter_report = &report;
  return out;
}

void run_plan(const cutloss_plan* plan, const cutloss_problem& p, Bytes& bytes) {
  Memory memory(bytes);
  const cutloss_inputs in = draw_inputs(p, memory, bytes);
  cutloss_filter_report report;
  cutloss_filter_report_init(&report);
  const cutloss_outputs out = draw_outputs(p, memory, report);
  const Sized<cutloss_inputs> inputs(in, draw_size<cutloss_inputs>(bytes));
  const Sized<cutloss_outputs> outputs(out, draw_size<cutloss_outputs>(bytes));
  const std::size_t needed = cutloss_plan_workspace_bytes(plan);
  const std::size_t given = needed - std::min<std::size_t>(needed, bytes.below(16) == 0);
  const std::unique_ptr<std::byte[]> workspace(new std::byte[given]);
  if (failed(cutloss_run(plan, inputs.get(), outputs.get(), workspace.get(), given, nullptr))) {
    require(memory.untouched(), "written before an error");
  } else {
    require(given == needed, "a workspace that is too small was taken");
  }
}

void combine(Bytes& bytes) {
  const std::int64_t shards = bytes.below(5), rows = bytes.below(9);
  Memory memory(bytes);
  const auto* const max = memory.input<float>(shards, rows, rows, 1, 4);
  const auto* const sum = memory.input<float>(shards, rows, rows, 1, 4);
  const auto* const target = memory.input<float>(shards, rows, rows, 1, 4);
  float* const lse = memory.output<float>(bytes.below(4) > 0, rows);
  float* const nll = memory.output<float>(bytes.below(4) > 0, rows);
  const std::int64_t given = bytes.below(16) == 0 ? -bytes.take<std::int16_t>() : shards;
  if (given > shards) return;
  if (failed(cutloss_combine_shards(given, rows, max, sum, target, lse, nll))) {
    require(memory.untouched(), "written before an error");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  if (bytes.below(8) == 0) {
    combine(bytes);
    return 0;
  }
  const cutloss_problem drawn = draw_problem(bytes);
  const std::size_t problem_size = draw_size<cutloss_problem>(bytes);
  const Sized<cutloss_problem> problem(drawn, problem_size);
  cutloss_limits limits;
  cutloss_limits_init(&limits);
  limits.mode = static_cast<std::int32_t>(bytes.below(bytes.below(4) == 0 ? 9 : 1));
  limits.threads = 1 + static_cast<std::int32_t>(bytes.below(2));
  limits.has_budget = bytes.below(4) == 0;
  limits.budget_bytes = bytes.take<std::uint32_t>();
  const char* const targets[] = {nullptr, nullptr, nullptr, "scalar", "none such"};
  limits.target = targets[bytes.below(5)];
  const Sized<cutloss_limits> limited(limits, draw_size<cutloss_limits>(bytes));

  cutloss_plan* plan = nullptr;
  if (failed(cutloss_make_plan(problem.get(), limited.get(), &plan))) {
    require(plan == nullptr, "a plan beside an error");
    return 0;
  }
  require(plan != nullptr && *cutloss_plan_json(plan) == '{', "no plan without an error");
  // What the library knows of it: the defaults beyond the caller's struct.
  cutloss_problem known;
  cutloss_problem_init(&known);
  std::memcpy(&known, &drawn, std::min(problem_size, sizeof known));
  if (can_run(known)) run_plan(plan, known, bytes);
  cutloss_plan_free(plan);
  return 0;
}
