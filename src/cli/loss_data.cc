#include "src/cli/loss_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "src/cli/cli.h"
#include "src/cli/data.h"

namespace cutloss::cli {
namespace {

Status bad(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

Status read_file(const char* option, const std::string& path, NpyArray& to) {
  if (path.empty()) return Status();
  Result<NpyArray> array = read_npy(path);
  if (!array.ok()) return Status(array.status().code(), fmt::format("{}: {}", option, array.status().message()));
  to = std::move(array.value());
  return Status();
}

Status check_shape(const char* option, const NpyArray& array, const std::vector<std::int64_t>& want,
                   std::string_view meaning) {
  if (array.shape == want) return Status();
  NpyArray wanted;
  wanted.shape = want;
  return bad(fmt::format("{} must be {} = {}, got shape {}", option, meaning, wanted.shape_text(), array.shape_text()));
}

enum class Truth { refused, taken };  // truth values make sense as a mask only

Status read_floats(const char* option, const std::string& path, const std::vector<std::int64_t>& shape,
                   std::string_view meaning, std::vector<float>& to, Truth truth = Truth::refused) {
  if (path.empty()) return Status();
  NpyArray array;
  if (Status s = read_file(option, path, array); !s.ok()) return s;
  if (Status s = check_shape(option, array, shape, meaning); !s.ok()) return s;
  if (array.type == NpyType::boolean && truth == Truth::refused) {
    return bad(fmt::format("{} is bool; real numbers are wanted", option));
  }
  to = to_floats(array);
  return Status();
}

Status float_type(const char* option, const NpyArray& array, DType& to) {
  switch (array.type) {
    case NpyType::f32: to = DType::f32; return Status();
    case NpyType::bf16: to = DType::bf16; return Status();
    case NpyType::f16: to = DType::f16; return Status();
    default: return bad(fmt::format("{} is {}; it must be float32, bfloat16 or float16", option, name(array.type)));
  }
}

Status read_matrices(const LossFiles& files, Problem& p, LossInputs& to) {
  if (Status s = read_file("--e", files.e, to.e); !s.ok()) return s;
  if (Status s = read_file("--c", files.c, to.c); !s.ok()) return s;
  const NpyArray &e = to.e, &c = to.c;
  if (e.shape.size() != 2) return bad(fmt::format("--e must be [N, D], got shape {}", e.shape_text()));
  if (c.shape.size() != 2) {
    return bad(fmt::format("--c must be [V, D], or [D, V] with --head-layout dv, got shape {}", c.shape_text()));
  }
  const bool vd = p.head_layout == HeadLayout::vd;
  const std::int64_t hidden = c.shape[vd ? 1 : 0];
  if (e.shape[1] != hidden) {
    const bool swapped = e.shape[1] == c.shape[vd ? 0 : 1];
    return bad(fmt::format("--e {} and --c {} disagree on D with --head-layout {}{}", e.shape_text(), c.shape_text(),
                           name(p.head_layout), swapped ? (vd ? "; is it dv?" : "; is it vd?") : ""));
  }
  if (Status s = float_type("--e", e, p.e_dtype); !s.ok()) return s;
  if (Status s = float_type("--c", c, p.c_dtype); !s.ok()) return s;
  p.tokens = e.shape[0];
  p.hidden = e.shape[1];
  p.vocab = c.shape[vd ? 0 : 1];
  p.e_strides = Strides{e.strides[0], e.strides[1]};
  p.c_strides = Strides{c.strides[0], c.strides[1]};
  return Status();
}

Status read_labels(const LossFiles& files, Problem& p, LossInputs& to) {
  if (files.labels.empty()) return Status();
  NpyArray labels;
  if (Status s = read_file("--labels", files.labels, labels); !s.ok()) return s;
  if (labels.shape.size() != 1) return bad(fmt::format("--labels must be [N], got shape {}", labels.shape_text()));
  if (labels.shape[0] != p.tokens) {
    return bad(fmt::format("--e {} and --labels {} disagree on N", to.e.shape_text(), labels.shape_text()));
  }
  Result<std::vector<std::int64_t>> ids = to_ids(labels, "labels");
  if (!ids.ok()) return ids.status();
  to.labels = std::move(ids.value());
  return Status();
}

Status read_soft_targets(const LossFiles& files, Problem& p, LossInputs& to) {
  if (files.soft_ids.empty() != files.soft_probabilities.empty()) {
    return bad("--soft-ids and --soft-probabilities go together; one is missing");
  }
  if (files.soft_ids.empty()) return Status();
  NpyArray ids;
  if (Status s = read_file("--soft-ids", files.soft_ids, ids); !s.ok()) return s;
  if (ids.shape.size() != 2 || ids.shape[0] != p.tokens || ids.shape[1] < 1) {
    return bad(
        fmt::format("--soft-ids must be [N, K] with N = {} and K >= 1, got shape {}", p.tokens, ids.shape_text()));
  }
  Result<std::vector<std::int64_t>> values = to_ids(ids, "soft_ids");
  if (!values.ok()) return values.status();
  to.soft_ids = std::move(values.value());
  p.soft_targets = ids.shape[1];
  return read_floats("--soft-probabilities", files.soft_probabilities, ids.shape, "of the shape of --soft-ids",
                     to.soft_probabilities);
}

Status read_weights(const LossFiles& files, Problem& p, LossInputs& to) {
  if (Status s = read_file("--bias", files.bias, to.bias); !s.ok()) return s;
  if (!files.bias.empty()) {
    if (Status s = check_shape("--bias", to.bias, {p.vocab}, "[V]"); !s.ok()) return s;
    p.bias_dtype = DType::f32;
    if (Status s = float_type("--bias", to.bias, *p.bias_dtype); !s.ok()) return s;
  }
  p.token_weights = !files.token_weights.empty();
  p.class_weights = !files.class_weights.empty();
  if (Status s = read_floats("--token-weights", files.token_weights, {p.tokens}, "[N]", to.token_weights, Truth::taken);
      !s.ok()) {
    return s;
  }
  return read_floats("--class-weights", files.class_weights, {p.vocab}, "[V]", to.class_weights, Truth::taken);
}

std::optional<float> as_number(const std::string& text) {
  float value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Status read_cotangents(const LossFiles& files, Problem& p, LossInputs& to) {
  if (const std::optional<float> number = as_number(files.cotangent)) {
    to.cotangent.assign(p.reduction == Reduction::none ? static_cast<std::size_t>(p.tokens) : 1, *number);
  } else {
    const std::vector<std::int64_t> shape =
        p.reduction == Reduction::none ? std::vector{p.tokens} : std::vector<std::int64_t>{};
    const std::string_view meaning = p.reduction == Reduction::none ? "[N]" : "a number (with this reduction)";
    if (Status s = read_floats("--cotangent", files.cotangent, shape, meaning, to.cotangent); !s.ok()) return s;
  }
  p.lse_cotangent = !files.lse_cotangent.empty();
  return read_floats("--lse-cotangent", files.lse_cotangent, {p.tokens}, "[N]", to.lse_cotangent);
}

Status read_order(const LossFiles& files, Problem& p, LossInputs& to) {
  if (files.vocab_order.empty()) return Status();
  p.vocab_order = true;
  if (files.learns_order()) return Status();
  NpyArray order;
  if (Status s = read_file("--vocab-order", files.vocab_order, order); !s.ok()) return s;
  if (Status s = check_shape("--vocab-order", order, {p.vocab}, "[V]"); !s.ok()) return s;
  Result<std::vector<std::int64_t>> ids = to_ids(order, "vocab_order");
  if (!ids.ok()) return ids.status();
  to.vocab_order = std::move(ids.value());
  return Status();
}

// A gradient to add to decides the dtype of the one that is written.
Status read_gradient(const char* option, const std::string& path, const std::vector<std::int64_t>& shape,
                     bool& accumulate, std::optional<DType>& dtype, NpyArray& to) {
  if (path.empty()) return Status();
  if (Status s = read_file(option, path, to); !s.ok()) return s;
  if (Status s = check_shape(option, to, shape, "like what it is the gradient of"); !s.ok()) return s;
  for (std::size_t axis = 0, inner = 1; axis < shape.size(); ++axis, inner = 1) {
    for (std::size_t k = axis + 1; k < shape.size(); ++k) inner *= static_cast<std::size_t>(shape[k]);
    if (to.size() > 0 && shape[axis] > 1 && to.strides[axis] != static_cast<std::int64_t>(inner)) {
      return bad(fmt::format("{} is in Fortran order; save it again in C order", option));
    }
  }
  accumulate = true;
  dtype = DType::f32;
  return float_type(option, to, *dtype);
}

Status read_gradients(const LossFiles& files, Problem& p, LossInputs& to) {
  if (Status s = read_gradient("--accumulate-d-e", files.accumulate_d_e, to.e.shape, p.accumulate_d_e, p.d_e_dtype,
                               to.accumulate_d_e);
      !s.ok()) {
    return s;
  }
  if (Status s = read_gradient("--accumulate-d-c", files.accumulate_d_c, to.c.shape, p.accumulate_d_c, p.d_c_dtype,
                               to.accumulate_d_c);
      !s.ok()) {
    return s;
  }
  std::optional<DType> d_bias;
  if (Status s = read_gradient("--accumulate-d-bias", files.accumulate_d_bias, {p.vocab}, p.accumulate_d_bias, d_bias,
                               to.accumulate_d_bias);
      !s.ok()) {
    return s;
  }
  if (d_bias && p.bias_dtype && d_bias != p.bias_dtype) {
    return bad(fmt::format("--accumulate-d-bias is {} and --bias {}; they must be the same", name(*d_bias),
                           name(*p.bias_dtype)));
  }
  return Status();
}

// Where a file is or would be created, whatever the spelling: through links, too, that lead to nothing yet.
std::filesystem::path place_of(const std::string& path) {
  std::error_code error;
  std::filesystem::path at = std::filesystem::absolute(path, error);
  for (int links = 0; links < 40 && std::filesystem::is_symlink(at, error); ++links) {
    at = at.parent_path() / std::filesystem::read_symlink(at, error);
  }
  return std::filesystem::weakly_canonical(at, error);
}

// Hard links included.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return place_of(a) == place_of(b) || std::filesystem::equivalent(a, b, error);
}

template <typename T>
const T* or_null(const std::vector<T>& values) {
  return values.empty() ? nullptr : values.data();
}

}  // namespace

const std::vector<LossFiles::Named>& LossFiles::read() {
  static const std::vector<Named> list = {
      {"--e", &LossFiles::e, "Hidden states E [N, D]"},
      {"--c", &LossFiles::c, "Head's table C, [V, D] or [D, V]"},
      {"--labels", &LossFiles::labels, "Labels [N], any integers"},
      {"--bias", &LossFiles::bias, "Added to the logits [V]; -inf masks an id (not with --softcap)"},
      {"--token-weights", &LossFiles::token_weights, "Of each row's loss [N]"},
      {"--class-weights", &LossFiles::class_weights, "Of each id's loss [V]"},
      {"--soft-ids", &LossFiles::soft_ids, "Soft targets in place of labels: ids [N, K]"},
      {"--soft-probabilities", &LossFiles::soft_probabilities, "and their probabilities [N, K]"},
      {"--lse-cotangent", &LossFiles::lse_cotangent, "Upstream gradient of the log-sum-exp [N]"},
      {"--accumulate-d-e", &LossFiles::accumulate_d_e, "Add the gradient of E to this"},
      {"--accumulate-d-c", &LossFiles::accumulate_d_c, "Add the gradient of C to this"},
      {"--accumulate-d-bias", &LossFiles::accumulate_d_bias, "Add the gradient of the bias to this"},
  };
  return list;
}

const std::vector<LossFiles::Named>& LossFiles::written() {
  static const std::vector<Named> list = {
      {"--out-d-e,--d-e", &LossFiles::d_e, "Gradient of E"},
      {"--out-d-c,--d-c", &LossFiles::d_c, "Gradient of C"},
      {"--out-d-bias,--d-bias", &LossFiles::d_bias, "Gradient of the bias"},
      {"--out-nll,--nll", &LossFiles::nll, "Each token's nll [N]"},
      {"--out-lse,--lse", &LossFiles::lse, "Each token's log-sum-exp [N]"},
      {"--out-entropy", &LossFiles::entropy, "Entropy of each softmax [N]"},
      {"--out-argmax", &LossFiles::argmax, "Id of each largest logit [N]"},
      {"--out-correct", &LossFiles::correct, "Whether it is the label [N]"},
      {"--out-rank", &LossFiles::rank, "Number of logits above the label's [N]"},
      {"--out-top-k-ids", &LossFiles::top_k_ids, "Ids of the k largest logits [N, k]"},
      {"--out-top-k-logprobs", &LossFiles::top_k_logprobs, "Their log-probabilities [N, k]"},
      {"--out-mean-logits", &LossFiles::mean_logits, "Each id's mean logit [V]"},
      {"--out-vocab-order", &LossFiles::out_vocab_order, "The order of --vocab-order learned [V]"},
  };
  return list;
}

Status LossFiles::check_clash() const {
  struct File {
    std::string_view option;
    const std::string* path;
  };
  std::vector<File> files;
  for (const Named& file : read()) files.push_back({file.option, &(this->*file.path)});
  if (!learns_order()) files.push_back({"--vocab-order", &vocab_order});
  if (!as_number(cotangent)) files.push_back({"--cotangent", &cotangent});
  const std::size_t inputs = files.size();
  for (const Named& file : written()) {
    const std::string_view option = file.option;
    files.push_back({option.substr(option.find(',') + 1), &(this->*file.path)});
  }
  for (std::size_t b = inputs; b < files.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (files[a].path->empty() || files[b].path->empty()) continue;
      if (same_file(*files[a].path, *files[b].path)) {
        return bad(fmt::format("{} and {} name the same file, {}", files[a].option, files[b].option, *files[b].path));
      }
    }
  }
  return Status();
}

Status read_inputs(const LossFiles& files, Problem& p, LossInputs& to) {
  p.label_dtype = DType::i64;
  for (const auto read :
       {read_matrices, read_labels, read_soft_targets, read_weights, read_cotangents, read_order, read_gradients}) {
    if (Status s = read(files, p, to); !s.ok()) return s;
  }
  to.inputs.e = to.e.data;
  to.inputs.c = to.c.data;
  to.inputs.labels = files.labels.empty() ? nullptr : to.labels.data();
  to.inputs.cotangent = or_null(to.cotangent);
  to.inputs.bias = to.bias.data;
  to.inputs.token_weights = or_null(to.token_weights);
  to.inputs.class_weights = or_null(to.class_weights);
  to.inputs.lse_cotangent = or_null(to.lse_cotangent);
  to.inputs.soft_ids = or_null(to.soft_ids);
  to.inputs.soft_probabilities = or_null(to.soft_probabilities);
  to.inputs.vocab_order = or_null(to.vocab_order);
  return Status();
}

LossResults::LossResults(const Problem& p, const LossInputs& in) : problem(p), inputs(in) {
  const auto n = static_cast<std::size_t>(p.tokens);
  const auto k = static_cast<std::size_t>(p.metrics.top_k);
  loss.resize(p.reduction == Reduction::none ? n : 1);
  nll.resize(n);
  lse.resize(n);
  if (p.metrics.entropy) entropy.resize(n);
  if (p.metrics.argmax) argmax.resize(n), correct.resize(n);
  if (p.metrics.rank) rank.resize(n);
  top_k_ids.resize(n * k);
  top_k_logprobs.resize(n * k);
  if (p.metrics.mean_logits) mean_logits.resize(static_cast<std::size_t>(p.vocab));
  if (p.want_d_e) d_e = array_of(p.d_e_dtype.value_or(p.e_dtype), p.tokens * p.hidden);
  if (p.want_d_c) d_c = array_of(p.d_c_dtype.value_or(p.c_dtype), p.vocab * p.hidden);
  if (p.want_d_bias) d_bias = array_of(*p.bias_dtype, p.vocab);
}

void LossResults::restart() {
  const auto begin_with = [](const NpyArray& from, std::vector<std::byte>& to) {
    if (from.data != nullptr && !to.empty()) std::memcpy(to.data(), from.data, to.size());
  };
  begin_with(inputs.accumulate_d_e, d_e);
  begin_with(inputs.accumulate_d_c, d_c);
  begin_with(inputs.accumulate_d_bias, d_bias);
}

Outputs LossResults::outputs() {
  Outputs out;
  out.loss = loss.data();
  out.nll = nll.data();
  out.lse = lse.data();
  if (problem.want_d_e) out.d_e = d_e.data();
  if (problem.want_d_c) out.d_c = d_c.data();
  if (problem.want_d_bias) out.d_bias = d_bias.data();
  out.valid_count = &valid;
  if (problem.metrics.entropy) out.entropy = entropy.data();
  if (problem.metrics.argmax) out.argmax = argmax.data(), out.correct = correct.data();
  if (problem.metrics.rank) out.rank = rank.data();
  if (problem.metrics.top_k > 0) out.top_k_ids = top_k_ids.data(), out.top_k_logprobs = top_k_logprobs.data();
  if (problem.metrics.mean_logits) out.mean_logits = mean_logits.data();
  out.filter_report = &report;
  return out;
}

Status LossResults::write(const LossFiles& files) const {
  const Problem& p = problem;
  const std::int64_t n = p.tokens, v = p.vocab, k = p.metrics.top_k;
  const struct {
    const std::string& path;
    DType dtype;
    std::vector<std::int64_t> shape;
    const void* data;
  } list[] = {{files.d_e, p.d_e_dtype.value_or(p.e_dtype), {n, p.hidden}, d_e.data()},
              {files.d_c, p.d_c_dtype.value_or(p.c_dtype), inputs.c.shape, d_c.data()},
              {files.d_bias, p.bias_dtype.value_or(DType::f32), {v}, d_bias.data()},
              {files.nll, DType::f32, {n}, nll.data()},
              {files.lse, DType::f32, {n}, lse.data()},
              {files.entropy, DType::f32, {n}, entropy.data()},
              {files.argmax, DType::i64, {n}, argmax.data()},
              {files.rank, DType::i64, {n}, rank.data()},
              {files.top_k_ids, DType::i64, {n, k}, top_k_ids.data()},
              {files.top_k_logprobs, DType::f32, {n, k}, top_k_logprobs.data()},
              {files.mean_logits, DType::f32, {v}, mean_logits.data()},
              {files.out_vocab_order, DType::i64, {v}, inputs.vocab_order.data()}};
  for (const auto& file : list) {
    if (file.path.empty()) continue;
    if (Status s = write_npy(file.path, file.dtype, file.shape, file.data); !s.ok()) return s;
  }
  return files.correct.empty() ? Status() : write_npy(files.correct, {n}, correct.data());
}

}  // namespace cutloss::cli
