#include <algorithm>

#include "cutloss/cutloss.hpp"
#include "src/cpu/float_env.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

class JsonObject {
 public:
  template <typename T>
  void number(const char* key, const T& value) {
    body_ += text(body_.empty() ? "" : ", ", "\"", key, "\": ", value);
  }
  void string(const char* key, std::string_view value) {
    number(key, text("\"", value, "\""));  // names and reasons are ours: nothing in them needs escaping
  }
  std::string str() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};

std::uint64_t elements(std::int64_t rows, std::int64_t columns, DType dtype) {
  return static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(columns) * size_of(dtype);
}

}  // namespace

std::uint64_t gradient_bytes(const Problem& p) {
  return (p.want_d_e ? elements(p.tokens, p.hidden, d_e_dtype(p)) : 0) +
         (p.want_d_c ? elements(p.vocab, p.hidden, d_c_dtype(p)) : 0) +
         (p.want_d_bias ? elements(p.vocab, 1, p.bias_dtype.value_or(DType::f32)) : 0);
}

std::string Plan::json() const {
  const cpu::KernelFloatEnv float_env;  // the decimal digits of `units` follow the rounding mode
  const Problem& p = problem;
  const std::uint64_t inputs = elements(p.tokens, p.hidden, p.e_dtype) + elements(p.vocab, p.hidden, p.c_dtype) +
                               elements(p.tokens, std::max<std::int64_t>(p.soft_targets, 1), p.label_dtype);
  const std::uint64_t gradients = gradient_bytes(p);
  std::string reasons;
  for (const Rejection& r : rejected) {
    JsonObject item;
    item.string("mode", name(r.mode));
    item.string("reason", r.reason);
    reasons += (reasons.empty() ? "" : ", ") + item.str();
  }

  JsonObject json;
  json.string("mode", name(mode));
  json.string("target", target);
  json.number("threads", threads);
  json.number("tokens", p.tokens);
  json.number("hidden", p.hidden);
  json.number("vocab", p.vocab);
  json.number("token_block", token_block);
  json.number("vocab_tile", vocab_tile);
  json.number("vocab_slices", vocab_slices);
  json.number("chunk_tokens", chunk_tokens);
  json.number("head_tokens", head_tokens);
  json.number("head_tiles", head_tiles);
  if (mode == Mode::sparse) {
    json.string("exact_mode", name(exact->mode));
    json.number("epsilon", epsilon);
    json.number("group_tokens", group_tokens);
    json.number("panel_entries", panel_entries);
  }
  json.number("tuned", tuned ? "true" : "false");
  json.number("units", units);
  json.number("flops", static_cast<std::uint64_t>(std::min(flops, 1.8e19)));
  json.number("workspace_bytes", workspace_bytes);
  json.number("input_bytes", inputs);
  json.number("gradient_bytes", gradients);
  json.number("predicted_peak_bytes", inputs + gradients + workspace_bytes);
  json.number("rejected", "[" + reasons + "]");
  return json.str();
}

}  // namespace cutloss
