#include "src/cli/check_terms.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace cutloss::cli {
namespace {

std::vector<float> draw_weights(Random& random, std::int64_t count, double zeros) {
  std::vector<float> weights(static_cast<std::size_t>(count));
  for (float& weight : weights) weight = random.chance(zeros) ? 0.0f : std::abs(random.normal());
  return weights;
}

template <typename T>
const T* or_null(const std::vector<T>& values) {
  return values.empty() ? nullptr : values.data();
}

}  // namespace

DType draw_dtype(Random& random) { return random.pick(std::vector{DType::f32, DType::f32, DType::bf16, DType::f16}); }

void draw_terms(Random& random, Problem& p) {
  if (random.chance(0.5)) return;
  if (random.chance(0.5)) p.bias_dtype = draw_dtype(random);
  if (random.chance(0.3)) p.logit_scale = random.pick(std::vector{0.7f, -1.3f, 0.0f});
  p.token_weights = random.chance(0.3);
  p.lse_cotangent = random.chance(0.3);
  if (random.chance(0.3)) p.z_loss = 0.01f;
  if (random.chance(0.25)) {
    p.soft_targets = random.between(1, 5);
    p.bad_labels = BadLabels::error;
  } else {
    p.class_weights = random.chance(0.3);
    if (random.chance(0.3)) p.label_smoothing = random.pick(std::vector{0.1f, 0.5f, 1.0f});
  }
  if (random.chance(0.3)) {
    if (p.tokens % 3 == 0 && random.chance(0.5)) p.sequence = p.tokens / 3;
    p.shift = random.between(0, std::min<std::int64_t>(3, p.sequence > 0 ? p.sequence : p.tokens));
  }
  p.vocab_order = random.chance(0.2);
  p.metrics = {random.chance(0.4), random.chance(0.4), random.chance(0.4),
               random.chance(0.4) ? random.between(1, 8) : 0, random.chance(0.4)};
  p.want_d_bias = p.want_d_c && p.bias_dtype && random.chance(0.7);
  p.accumulate_d_e = p.want_d_e && random.chance(0.3);
  p.accumulate_d_c = p.want_d_c && random.chance(0.3);
  p.accumulate_d_bias = p.want_d_bias && random.chance(0.3);
  p.compensated = random.chance(0.2);
}

// The same numbers are drawn whatever the mode, so that a repro line with one makes the case that was found without.
void draw_filter(Random& random, const std::string& mode, Problem& p) {
  const bool filtered = random.chance(0.3);
  const Filter kind = random.pick(std::vector{Filter::certified, Filter::unbiased, Filter::tile});
  const bool by_tolerance = random.chance(0.3);
  // Half of them drop nothing that f32 has: the filter's own paths, within the bounds of the exact modes.
  const float level = random.pick(std::vector{0x1p-126f, 0x1p-126f, 1e-2f, 1e-5f});
  if (mode == "sparse" && !p.want_d_e && !p.want_d_c) p.want_d_e = true;
  if (!p.want_d_e && !p.want_d_c) return;
  if (mode == "sparse") {
    p.filter = kind == Filter::tile ? Filter::certified : kind;
  } else if (filtered && (kind != Filter::tile || p.want_d_c) &&
             (mode == "all" || (mode == "recompute" && kind == Filter::tile))) {
    p.filter = kind;
  } else {
    return;
  }
  if (p.filter != Filter::tile && p.softcap) p.label_smoothing = 0;  // together they leave nothing to filter
  (p.filter != Filter::tile && by_tolerance ? p.tolerance : p.epsilon) = by_tolerance ? 1e-2f : level;
}

CheckTerms fill_terms(Random& random, const Problem& p) {
  CheckTerms terms;
  if (p.bias_dtype) {
    terms.bias = array_of(*p.bias_dtype, p.vocab);
    const bool mask = random.chance(0.3);
    for (std::int64_t v = 0; v < p.vocab; ++v) {
      const float value = mask && random.chance(0.2) ? -std::numeric_limits<float>::infinity() : 2 * random.normal();
      store(*p.bias_dtype, terms.bias.data(), v, value);
    }
  }
  if (p.token_weights) terms.token_weights = draw_weights(random, p.tokens, 0.2);
  if (p.class_weights) terms.class_weights = draw_weights(random, p.vocab, 0.2);
  if (p.lse_cotangent) {
    for (std::int64_t i = 0; i < p.tokens; ++i) terms.lse_cotangent.push_back(random.normal());
  }
  for (std::int64_t at = 0; at < p.tokens * p.soft_targets; ++at) {
    terms.soft_ids.push_back(random.chance(0.2) ? p.ignore_index : random.below(p.vocab));
    const float share = std::abs(random.normal()) / static_cast<float>(p.soft_targets);
    terms.soft_probabilities.push_back(random.chance(0.1) ? 0.0f : share);
  }
  terms.soft_ids32.assign(terms.soft_ids.begin(), terms.soft_ids.end());
  if (p.vocab_order) {
    terms.vocab_order.resize(static_cast<std::size_t>(p.vocab));
    std::iota(terms.vocab_order.begin(), terms.vocab_order.end(), 0);
    for (std::int64_t v = p.vocab; --v > 0;) {
      std::swap(terms.vocab_order[static_cast<std::size_t>(v)],
                terms.vocab_order[static_cast<std::size_t>(random.below(v + 1))]);
    }
  }
  if (p.reduction == Reduction::mean && random.chance(0.2)) terms.denominator = random.pick(std::vector{7.5, 0.0, 1e6});
  return terms;
}

void CheckTerms::put_into(const Problem& p, Inputs& in) const {
  in.bias = or_null(bias);
  in.token_weights = or_null(token_weights);
  in.class_weights = or_null(class_weights);
  in.lse_cotangent = or_null(lse_cotangent);
  in.vocab_order = or_null(vocab_order);
  in.denominator = denominator;
  if (p.soft_targets == 0) return;
  in.labels = nullptr;
  in.soft_ids = p.label_dtype == DType::i32 ? static_cast<const void*>(soft_ids32.data()) : soft_ids.data();
  in.soft_probabilities = soft_probabilities.data();
}

std::vector<bool> unread_rows(const Problem& p, const std::vector<std::int64_t>& labels, const CheckTerms& terms) {
  std::vector<bool> unread;
  const std::int64_t length = p.sequence > 0 ? p.sequence : p.tokens;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const bool shifted_out = i % length + p.shift >= length;
    const bool weightless = p.token_weights && terms.token_weights[static_cast<std::size_t>(i)] == 0;
    unread.push_back(shifted_out || weightless ||
                     (p.soft_targets == 0 && labels[static_cast<std::size_t>(i + p.shift)] == p.ignore_index));
  }
  return unread;
}

std::string terms_text(const Problem& p) {
  std::string out;
  if (p.bias_dtype) out += fmt::format(" bias={}{}", name(*p.bias_dtype), p.want_d_bias ? " dbias" : "");
  if (p.logit_scale != 1) out += fmt::format(" logit_scale={:g}", p.logit_scale);
  if (p.token_weights) out += " token_weights";
  if (p.class_weights) out += " class_weights";
  if (p.label_smoothing != 0) out += fmt::format(" label_smoothing={:g}", p.label_smoothing);
  if (p.z_loss != 0) out += fmt::format(" z_loss={:g}", p.z_loss);
  if (p.soft_targets > 0) out += fmt::format(" soft_targets={}", p.soft_targets);
  if (p.shift > 0) out += fmt::format(" shift={} of {}", p.shift, p.sequence);
  if (p.lse_cotangent) out += " lse_cotangent";
  if (p.vocab_order) out += " vocab_order";
  const Metrics& m = p.metrics;
  if (m.entropy) out += " entropy";
  if (m.argmax) out += " argmax";
  if (m.rank) out += " rank";
  if (m.top_k > 0) out += fmt::format(" top_k={}", m.top_k);
  if (m.mean_logits) out += " mean_logits";
  if (p.accumulate_d_e) out += " accumulate_d_e";
  if (p.accumulate_d_c) out += " accumulate_d_c";
  if (p.accumulate_d_bias) out += " accumulate_d_bias";
  if (p.compensated) out += " compensated";
  if (p.filter != Filter::none) out += fmt::format(" filter={}", name(p.filter));
  if (p.tolerance) out += fmt::format(" tolerance={:g}", *p.tolerance);
  if (p.epsilon) out += fmt::format(" epsilon={:g}", *p.epsilon);
  return out;
}

}  // namespace cutloss::cli
