#include "src/analysis/tiles.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>

#include "src/analysis/levels.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss::analysis {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

void FreeAligned::operator()(float* p) const { operator delete(p, std::align_val_t(64)); }

Floats make_floats(std::int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(round_up(count, 16)) * sizeof(float);
  return Floats(static_cast<float*>(operator new(bytes, std::align_val_t(64))));
}

Tiles::Scratch::Scratch(const Tiles& tiles, std::int64_t rows) {
  const std::int64_t per_group = tiles.kernels_->rows;
  const std::int64_t groups = ceil_div(rows, per_group);
  const std::int64_t padded = round_up(tiles.hidden(), per_group);
  head = make_floats(groups * static_cast<std::int64_t>(cpu::head_stride(padded, tiles.kernels_->rows)));
  logits = make_floats(groups * per_group * tiles.kernels_->panel);
  z.resize(static_cast<std::size_t>(tiles.tile_tokens_ * rows));
}

Result<Tiles> Tiles::make(const Problem& problem, const Inputs& inputs, const Machine& machine,
                          const Options& options) {
  Tiles t;
  Problem plain;  // what an analysis looks at
  plain.tokens = problem.tokens, plain.hidden = problem.hidden, plain.vocab = problem.vocab;
  plain.e_dtype = problem.e_dtype, plain.c_dtype = problem.c_dtype, plain.head_layout = problem.head_layout;
  plain.e_strides = problem.e_strides, plain.c_strides = problem.c_strides;
  plain.label_dtype = DType::i64, plain.ignore_index = problem.ignore_index;
  plain.logit_scale = problem.logit_scale, plain.softcap = problem.softcap;
  if (Status s = validate(plain); !s.ok()) return s;
  t.problem_ = plain;
  t.kernels_ = cpu::find_kernels(machine.target);
  if (t.kernels_ == nullptr) {
    return Status(StatusCode::unavailable, "target '" + machine.target + "' is not available here; see 'cutloss info'");
  }
  const int threads = options.threads > 0 ? options.threads : machine.threads;
  t.executor_ = make_thread_executor(threads);
  if (t.executor_ == nullptr) throw std::bad_alloc();
  t.table_ = inputs.c;
  // A tile taller than the tokens there are is as good as one of just their number, and takes less memory.
  t.tile_tokens_ = std::min(options.tile_tokens, std::max<std::int64_t>(1, problem.tokens));
  t.temperatures_ = {1.0};
  if (options.sections.temperature) {
    for (const double value : options.temperatures) {
      if (value != 1.0) t.temperatures_.push_back(value);
    }
  }
  t.progress_ = options.progress;
  if (Status s = t.take_rows(inputs, options); !s.ok()) return s;
  t.pack_tokens(inputs);
  if (Status s = t.find_softmax(); !s.ok()) return s;
  return t;
}

Status Tiles::take_rows(const Inputs& inputs, const Options& options) {
  const auto* labels = static_cast<const std::int64_t*>(inputs.labels);
  std::vector<std::int64_t> valid;
  for (std::int64_t i = 0; i < problem_.tokens; ++i) {
    if (labels[i] == problem_.ignore_index) continue;
    if (labels[i] < 0 || labels[i] >= problem_.vocab) {
      return invalid("labels[", i, "] is ", labels[i], ", outside [0, ", problem_.vocab, ") and not ignore_index (",
                     problem_.ignore_index, ")");
    }
    valid.push_back(i);
  }
  if (valid.empty())
    return invalid("no token counts: labels holds nothing but ignore_index (", problem_.ignore_index, ")");
  valid_ = static_cast<std::int64_t>(valid.size());
  const std::int64_t take = options.sample_tokens > 0 ? std::min(options.sample_tokens, valid_) : valid_;
  const std::int64_t runs = ceil_div(take, tile_tokens_);
  for (std::int64_t run = 0; run < runs; ++run) {
    // Neighbours share their context, and a tile's fate with it: a sample is made of whole tiles.
    const std::int64_t length = std::min(tile_tokens_, take - run * tile_tokens_);
    const std::int64_t first = runs == 1 ? 0 : (valid_ - take) * run / (runs - 1) + run * tile_tokens_;
    for (std::int64_t i = first; i < first + length; ++i) rows_.push_back(valid[static_cast<std::size_t>(i)]);
  }
  for (const std::int64_t row : rows_) labels_.push_back(labels[row]);
  return Status();
}

void Tiles::pack_tokens(const Inputs& inputs) {
  const std::int64_t lanes = kernels_->panel;
  panels_ = ceil_div(tile_tokens_, lanes);
  e_ = make_floats(tokens() * hidden());
  packed_ = make_floats(token_tiles() * panels_ * lanes * hidden());
  std::fill_n(packed_.get(), token_tiles() * panels_ * lanes * hidden(), 0.0f);
  const Strides stride = e_strides(problem_);
  for (std::int64_t i = 0; i < tokens(); ++i) {
    const std::int64_t offset = caller_row(i) * stride.axis0 * static_cast<std::int64_t>(size_of(problem_.e_dtype));
    float* const row = e_.get() + i * hidden();
    kernels_->widen_row(static_cast<const char*>(inputs.e) + offset, problem_.e_dtype, stride.axis1, hidden(), row);
    const std::int64_t tile = i / tile_tokens_, at = i % tile_tokens_;
    float* const lane = packed_.get() + (tile * panels_ + at / lanes) * lanes * hidden() + at % lanes;
    for (std::int64_t d = 0; d < hidden(); ++d) lane[d * lanes] = row[d];
  }
}

void Tiles::pack(const std::int64_t* ids, std::int64_t rows, Scratch& scratch) const {
  const HeadStrides stride = c_strides(problem_);
  kernels_->pack_head(table_, problem_.c_dtype, stride.v, stride.d, ids, 0, rows, hidden(),
                      round_up(hidden(), static_cast<std::int64_t>(kernels_->rows)), scratch.head.get());
}

void Tiles::widen(const std::int64_t* ids, std::int64_t rows, float* out) const {
  const HeadStrides stride = c_strides(problem_);
  for (std::int64_t v = 0; v < rows; ++v) {
    const std::int64_t offset = ids[v] * stride.v * static_cast<std::int64_t>(size_of(problem_.c_dtype));
    kernels_->widen_row(static_cast<const char*>(table_) + offset, problem_.c_dtype, stride.d, hidden(),
                        out + v * hidden());
  }
}

void Tiles::logits(std::int64_t token_tile, std::int64_t rows, Scratch& scratch) const {
  const std::int64_t lanes = kernels_->panel;
  const std::int64_t count = tokens_of(token_tile);
  const std::size_t stride =
      cpu::head_stride(round_up(hidden(), static_cast<std::int64_t>(kernels_->rows)), kernels_->rows);
  const double scale = problem_.logit_scale;
  for (std::int64_t panel = 0; panel * lanes < count; ++panel) {
    const float* const tokens = packed_.get() + (token_tile * panels_ + panel) * lanes * hidden();
    kernels_->logits(scratch.head.get(), stride, ceil_div(rows, static_cast<std::int64_t>(kernels_->rows)), tokens,
                     hidden(), scratch.logits.get());
    for (std::int64_t lane = 0; lane < std::min(lanes, count - panel * lanes); ++lane) {
      double* const z = scratch.z.data() + (panel * lanes + lane) * rows;
      for (std::int64_t v = 0; v < rows; ++v) z[v] = scale * static_cast<double>(scratch.logits[v * lanes + lane]);
      if (!problem_.softcap) continue;
      const double cap = *problem_.softcap;
      for (std::int64_t v = 0; v < rows; ++v) z[v] = cap * std::tanh(z[v] / cap);
    }
  }
}

void Tiles::parallel(std::string_view stage, std::int64_t tasks, const std::function<void(std::int64_t)>& body) const {
  std::int64_t done = 0;
  std::atomic<bool> no_memory = false;  // an exception that left a thread would end the process
  if (progress_) progress_(stage, 0);
  executor_->parallel_for(tasks, [&](std::int64_t task, int) {
    if (no_memory) return;
    try {
      body(task);
      if (!progress_) return;
      const std::lock_guard lock(*progress_mutex_);
      progress_(stage, static_cast<double>(++done) / static_cast<double>(tasks));
    } catch (const std::bad_alloc&) {
      no_memory = true;
    }
  });
  if (no_memory) throw std::bad_alloc();
}

// The label is kept out of the running sum: 1 - p_label is then a sum, not a difference.
void Tiles::softmax_of_tile(std::int64_t tile) {
  constexpr std::int64_t kRows = 256;
  Scratch scratch(*this, std::min(kRows, vocab()));
  const std::int64_t first = first_token(tile), count = tokens_of(tile);
  const std::size_t steps = temperatures_.size();
  std::vector<double> max(static_cast<std::size_t>(count), -kInfinity), label_z(max.size());
  std::vector<double> sums(max.size() * steps, 0.0);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(kRows));
  for (std::int64_t row = 0; row < vocab(); row += kRows) {
    const std::int64_t rows = std::min(kRows, vocab() - row);
    std::iota(ids.begin(), ids.end(), row);
    pack(ids.data(), rows, scratch);
    logits(tile, rows, scratch);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      double* const z = scratch.z.data() + i * rows;
      if (const std::int64_t y = label(first + i) - row; y >= 0 && y < rows) {
        label_z[at] = z[y];
        z[y] = -kInfinity;
      }
      double largest = max[at];
      for (std::int64_t v = 0; v < rows; ++v) {
        if (!(z[v] <= largest)) largest = z[v];  // a NaN must reach the sum
      }
      if (largest == -kInfinity) continue;
      for (std::size_t t = 0; t < steps; ++t) {
        double sum = 0;
        for (std::int64_t v = 0; v < rows; ++v) sum += std::exp((z[v] - largest) / temperatures_[t]);
        double& total = sums[at * steps + t];
        total = (total == 0 ? 0 : total * std::exp((max[at] - largest) / temperatures_[t])) + sum;
      }
      max[at] = largest;
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const double largest = std::max(max[at], label_z[at]);
    for (std::size_t t = 0; t < steps; ++t) {
      const double rest =
          max[at] == -kInfinity ? 0.0 : sums[at * steps + t] * std::exp((max[at] - largest) / temperatures_[t]);
      const double label = std::exp((label_z[at] - largest) / temperatures_[t]);
      softmax_[t][static_cast<std::size_t>(first + i)] = {largest / temperatures_[t] + std::log(rest + label),
                                                          std::log2(rest / (rest + label))};
      if (t == 0) nll_[static_cast<std::size_t>(first + i)] = std::log1p(rest / label);
    }
  }
}

Status Tiles::find_softmax() {
  softmax_.assign(temperatures_.size(), std::vector<Softmax>(labels_.size()));
  nll_.resize(labels_.size());
  parallel("softmax", token_tiles(), [&](std::int64_t tile) { softmax_of_tile(tile); });
  for (std::int64_t i = 0; i < tokens(); ++i) {
    if (std::isfinite(softmax(0, i).lse)) continue;
    return invalid("the logits of row ", caller_row(i), " are not finite: look for NaN or infinity in hidden[",
                   caller_row(i), "] or in the table");
  }
  return Status();
}

// ------------------------------------------------------------------------------------------------------------ orders

std::string_view name(Order order) {
  switch (order) {
    case Order::natural: return "natural";
    case Order::sorted: return "sorted";
    case Order::frequency: return "frequency";
    case Order::random: return "random";
    case Order::given: return "given";
  }
  return "";
}

namespace {

// By falling mean of the logits before softcap: the logits of the mean hidden state.
std::vector<double> mean_logits(const Tiles& tiles) {
  const std::int64_t n = tiles.tokens(), d = tiles.hidden();
  std::vector<double> mean(static_cast<std::size_t>(d), 0.0), out(static_cast<std::size_t>(tiles.vocab()));
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t k = 0; k < d; ++k) mean[static_cast<std::size_t>(k)] += tiles.hidden_row(i)[k];
  }
  const double scale = tiles.problem().logit_scale / static_cast<double>(n);
  std::vector<float> row(static_cast<std::size_t>(d));
  for (std::int64_t v = 0; v < tiles.vocab(); ++v) {
    tiles.widen(&v, 1, row.data());
    double sum = 0;
    for (std::int64_t k = 0; k < d; ++k) sum += mean[static_cast<std::size_t>(k)] * row[static_cast<std::size_t>(k)];
    out[static_cast<std::size_t>(v)] = scale * sum;
  }
  return out;
}

void sort_falling(const std::vector<double>& key, std::vector<std::int64_t>& ids) {
  std::stable_sort(ids.begin(), ids.end(), [&](std::int64_t a, std::int64_t b) {
    return key[static_cast<std::size_t>(a)] > key[static_cast<std::size_t>(b)];
  });
}

Status check_permutation(const std::vector<std::int64_t>& order, std::int64_t vocab) {
  if (static_cast<std::int64_t>(order.size()) != vocab) {
    return invalid("order has ", order.size(), " ids; it must be a permutation of all ", vocab);
  }
  std::vector<std::int64_t> position(order.size());
  return invert_order("order", order, position);
}

}  // namespace

Result<std::vector<std::int64_t>> make_order(const Tiles& tiles, Order order, const Options& options) {
  if (order == Order::given) {
    if (Status s = check_permutation(options.given_order, tiles.vocab()); !s.ok()) return s;
    return options.given_order;
  }
  std::vector<std::int64_t> ids(static_cast<std::size_t>(tiles.vocab()));
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  if (order == Order::sorted) sort_falling(mean_logits(tiles), ids);
  if (order == Order::frequency) {
    std::vector<double> counts = options.counts;
    if (counts.empty()) {
      counts.assign(ids.size(), 0.0);
      for (const std::int64_t label : tiles.labels()) ++counts[static_cast<std::size_t>(label)];
    } else if (counts.size() != ids.size()) {
      return invalid("counts has ", counts.size(), " values; it must have one for each of the ", ids.size(), " ids");
    }
    sort_falling(counts, ids);
  }
  if (order == Order::random) {
    for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[mix(options.seed ^ mix(i)) % i]);
  }
  return ids;
}

}  // namespace cutloss::analysis
