#include "problem.hpp"

#include <utility>

#include "names.hpp"

namespace cutloss::python {
namespace {

auto dtype_of(const char* what) {
  return [what](std::string_view text) { return dtype_from(what, text); };
}

void read_strides(Fields& fields, const char* name, std::optional<Strides>& to) {
  std::optional<std::pair<std::int64_t, std::int64_t>> pair;
  fields.read(name, pair);
  if (pair) to = Strides{pair->first, pair->second};
}

void read_arrays(Fields& fields, Problem& p) {
  fields.read("tokens", p.tokens);
  fields.read("hidden", p.hidden);
  fields.read("vocab", p.vocab);
  fields.read("e_dtype", p.e_dtype, dtype_of("e"));
  fields.read("c_dtype", p.c_dtype, dtype_of("c"));
  fields.read("label_dtype", p.label_dtype, dtype_of("labels"));
  fields.read("head_layout", p.head_layout, head_layout_from);
  read_strides(fields, "e_strides", p.e_strides);
  read_strides(fields, "c_strides", p.c_strides);
  fields.read("label_stride", p.label_stride);
}

void read_objective(Fields& fields, Problem& p) {
  fields.read("reduction", p.reduction, reduction_from);
  fields.read("ignore_index", p.ignore_index);
  bool nan = false;
  fields.read("nan_for_bad_labels", nan);
  p.bad_labels = nan ? BadLabels::nan : BadLabels::error;
  fields.read_optional("bias_dtype", p.bias_dtype, dtype_of("bias"));
  fields.read("logit_scale", p.logit_scale);
  fields.read("softcap", p.softcap);
  fields.read("token_weights", p.token_weights);
  fields.read("class_weights", p.class_weights);
  fields.read("label_smoothing", p.label_smoothing);
  fields.read("z_loss", p.z_loss);
  fields.read("soft_targets", p.soft_targets);
  fields.read("shift", p.shift);
  fields.read("sequence", p.sequence);
  fields.read("lse_cotangent", p.lse_cotangent);
  fields.read("entropy", p.metrics.entropy);
  fields.read("argmax", p.metrics.argmax);
  fields.read("rank", p.metrics.rank);
  fields.read("top_k", p.metrics.top_k);
  fields.read("mean_logits", p.metrics.mean_logits);
}

void read_filter(Fields& fields, Problem& p) {
  std::optional<Filter> filter;
  fields.read_optional("filter", filter, filter_from);
  p.filter = filter.value_or(Filter::none);
  fields.read("tolerance", p.tolerance);
  fields.read("epsilon", p.epsilon);
  fields.read("vocab_order", p.vocab_order);
}

void read_wants(Fields& fields, Problem& p) {
  fields.read("want_d_e", p.want_d_e);
  fields.read("want_d_c", p.want_d_c);
  fields.read("want_d_bias", p.want_d_bias);
  fields.read_optional("d_e_dtype", p.d_e_dtype, dtype_of("d_e"));
  fields.read_optional("d_c_dtype", p.d_c_dtype, dtype_of("d_c"));
  fields.read("accumulate_d_e", p.accumulate_d_e);
  fields.read("accumulate_d_c", p.accumulate_d_c);
  fields.read("accumulate_d_bias", p.accumulate_d_bias);
  fields.read("compensated", p.compensated);
}

}  // namespace

Problem read_problem(Fields& fields) {
  Problem problem;
  read_arrays(fields, problem);
  read_objective(fields, problem);
  read_filter(fields, problem);
  read_wants(fields, problem);
  return problem;
}

Limits read_limits(Fields& fields) {
  Limits limits;
  fields.read("mode", limits.mode, mode_from);
  fields.read("budget", limits.budget_bytes);
  std::int64_t threads = 0;
  fields.read("threads", threads);
  if (const Status s = validate_threads(threads); !s.ok()) raise(s);
  limits.threads = static_cast<int>(threads);
  return limits;
}

Inputs read_inputs(Fields& fields) {
  Inputs in;
  fields.address("e", in.e);
  fields.address("c", in.c);
  fields.address("labels", in.labels);
  fields.address("cotangent", in.cotangent);
  fields.address("bias", in.bias);
  fields.address("token_weights", in.token_weights);
  fields.address("class_weights", in.class_weights);
  fields.address("lse_cotangent", in.lse_cotangent);
  fields.address("soft_ids", in.soft_ids);
  fields.address("soft_probabilities", in.soft_probabilities);
  fields.address("vocab_order", in.vocab_order);
  fields.read("denominator", in.denominator);
  fields.read("seed", in.seed);
  return in;
}

Outputs read_outputs(Fields& fields) {
  Outputs out;
  fields.address("loss", out.loss);
  fields.address("nll", out.nll);
  fields.address("lse", out.lse);
  fields.address("d_e", out.d_e);
  fields.address("d_c", out.d_c);
  fields.address("d_bias", out.d_bias);
  fields.address("entropy", out.entropy);
  fields.address("argmax", out.argmax);
  fields.address("correct", out.correct);
  fields.address("rank", out.rank);
  fields.address("top_k_ids", out.top_k_ids);
  fields.address("top_k_logprobs", out.top_k_logprobs);
  fields.address("mean_logits", out.mean_logits);
  return out;
}

}  // namespace cutloss::python
