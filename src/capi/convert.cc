#include "src/capi/convert.h"

#include <exception>
#include <new>

namespace cutloss::capi {
namespace {

// Of a fixed size, so that a failure for want of memory can still be told.
thread_local char last_error[2048];

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

void keep_error(const char* message) {
  std::strncpy(last_error, message, sizeof last_error - 1);  // the last byte stays 0
}

Status to_dtype(const char* field, std::int32_t value, DType& to) { return to_enum(field, value, 5, to); }

Status to_optional_dtype(const char* field, std::int32_t given, std::int32_t value, std::optional<DType>& to) {
  if (!given) return Status();
  DType dtype = DType::f32;
  CUTLOSS_TRY(to_dtype(field, value, dtype));
  to = dtype;
  return Status();
}

std::optional<float> unless_zero(float value) { return value == 0 ? std::nullopt : std::optional(value); }

Status enums(const cutloss_problem& from, Problem& to) {
  CUTLOSS_TRY(to_dtype("e_dtype", from.e_dtype, to.e_dtype));
  CUTLOSS_TRY(to_dtype("c_dtype", from.c_dtype, to.c_dtype));
  CUTLOSS_TRY(to_dtype("label_dtype", from.label_dtype, to.label_dtype));
  CUTLOSS_TRY(to_enum("head_layout", from.head_layout, 2, to.head_layout));
  CUTLOSS_TRY(to_enum("reduction", from.reduction, 3, to.reduction));
  CUTLOSS_TRY(to_enum("bad_labels", from.bad_labels, 2, to.bad_labels));
  CUTLOSS_TRY(to_enum("filter", from.filter, 4, to.filter));
  CUTLOSS_TRY(to_optional_dtype("bias_dtype", from.has_bias, from.bias_dtype, to.bias_dtype));
  CUTLOSS_TRY(to_optional_dtype("d_e_dtype", from.has_d_e_dtype, from.d_e_dtype, to.d_e_dtype));
  return to_optional_dtype("d_c_dtype", from.has_d_c_dtype, from.d_c_dtype, to.d_c_dtype);
}

void objective(const cutloss_problem& from, Problem& to) {
  to.ignore_index = from.ignore_index;
  to.logit_scale = from.logit_scale;
  to.softcap = unless_zero(from.softcap);
  to.token_weights = from.token_weights != 0;
  to.class_weights = from.class_weights != 0;
  to.label_smoothing = from.label_smoothing;
  to.z_loss = from.z_loss;
  to.soft_targets = from.soft_targets;
  to.shift = from.shift;
  to.sequence = from.sequence;
  to.lse_cotangent = from.lse_cotangent != 0;
  to.metrics = {from.entropy != 0, from.argmax != 0, from.rank != 0, from.top_k, from.mean_logits != 0};
  to.tolerance = unless_zero(from.tolerance);
  to.epsilon = unless_zero(from.epsilon);
  to.vocab_order = from.vocab_order != 0;
}

void wants(const cutloss_problem& from, Problem& to) {
  to.want_d_e = from.want_d_e != 0;
  to.want_d_c = from.want_d_c != 0;
  to.want_d_bias = from.want_d_bias != 0;
  to.accumulate_d_e = from.accumulate_d_e != 0;
  to.accumulate_d_c = from.accumulate_d_c != 0;
  to.accumulate_d_bias = from.accumulate_d_bias != 0;
  to.compensated = from.compensated != 0;
}

}  // namespace

cutloss_status failed(StatusCode code, const char* message) noexcept {
  keep_error(message);
  return code_of(code);
}

cutloss_status failed_by_exception() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return failed(StatusCode::out_of_memory, "out of memory");
  } catch (const std::exception& e) {
    keep_error(e.what());
  } catch (...) {
    keep_error("unknown exception");
  }
  return CUTLOSS_INTERNAL;
}

const char* last_error_text() { return last_error; }

void problem_defaults(cutloss_problem* to) {
  zeros(to);
  to->label_dtype = CUTLOSS_I64;
  to->label_stride = 1;
  to->ignore_index = -100;
  to->logit_scale = 1;
}

Status to_problem(const cutloss_problem* problem, Problem& to) {
  cutloss_problem from;
  CUTLOSS_TRY(read("problem", problem, problem_defaults, from));
  to.tokens = from.tokens;
  to.hidden = from.hidden;
  to.vocab = from.vocab;
  if (from.has_e_strides) to.e_strides = Strides{from.e_strides[0], from.e_strides[1]};
  if (from.has_c_strides) to.c_strides = Strides{from.c_strides[0], from.c_strides[1]};
  to.label_stride = from.label_stride;
  CUTLOSS_TRY(enums(from, to));
  objective(from, to);
  wants(from, to);
  return Status();
}

Status to_inputs(const cutloss_inputs* inputs, Inputs& to) {
  cutloss_inputs from;
  CUTLOSS_TRY(read("inputs", inputs, zeros<cutloss_inputs>, from));
  to.e = from.e;
  to.c = from.c;
  to.labels = from.labels;
  to.cotangent = from.cotangent;
  to.bias = from.bias;
  to.token_weights = from.token_weights;
  to.class_weights = from.class_weights;
  to.lse_cotangent = from.lse_cotangent;
  to.soft_ids = from.soft_ids;
  to.soft_probabilities = from.soft_probabilities;
  to.vocab_order = from.vocab_order;
  if (from.has_denominator) to.denominator = from.denominator;
  to.seed = from.seed;
  return Status();
}

Status to_outputs(const cutloss_outputs* outputs, Outputs& to, cutloss_filter_report*& report) {
  cutloss_outputs from;
  CUTLOSS_TRY(read("outputs", outputs, zeros<cutloss_outputs>, from));
  to.loss = from.loss;
  to.nll = from.nll;
  to.lse = from.lse;
  to.d_e = from.d_e;
  to.d_c = from.d_c;
  to.valid_count = from.valid_count;
  to.d_bias = from.d_bias;
  to.entropy = from.entropy;
  to.argmax = from.argmax;
  to.correct = from.correct;
  to.rank = from.rank;
  to.top_k_ids = from.top_k_ids;
  to.top_k_logprobs = from.top_k_logprobs;
  to.mean_logits = from.mean_logits;
  report = from.filter_report;
  if (report == nullptr) return Status();
  cutloss_filter_report checked;
  return read("filter_report", static_cast<const cutloss_filter_report*>(report), zeros<cutloss_filter_report>,
              checked);
}

void write_report(const FilterReport& from, cutloss_filter_report* to) {
  cutloss_filter_report all;
  zeros(&all);
  all.rows = from.rows;
  all.rows_redone = from.rows_redone;
  all.kept_entries = from.kept_entries;
  all.epsilon = from.epsilon;
  all.dropped_mass_mean = from.dropped_mass_mean;
  all.dropped_mass_max = from.dropped_mass_max;
  all.error_bound = from.error_bound;
  all.size = std::min(to->size, sizeof all);
  std::memcpy(to, &all, all.size);
}

}  // namespace cutloss::capi
