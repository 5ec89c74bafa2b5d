#include "src/cli/bench_sample.h"

#include <algorithm>
#include <cmath>

#include "src/cli/data.h"

namespace cutloss::cli {
namespace {

// Vocabulary rows made double at a time: 64 x 2304 doubles are 1.1 MiB.
constexpr std::int64_t kBlock = 64;

// Four sums, since one would wait for each addition.
double dot(const double* x, const double* y, std::int64_t n) {
  double sum[4] = {};
  std::int64_t k = 0;
  for (; k + 4 <= n; k += 4) {
    for (int lane = 0; lane < 4; ++lane) sum[lane] += x[k + lane] * y[k + lane];
  }
  for (; k < n; ++k) sum[0] += x[k] * y[k];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

double relative_error(const double* want, const double* got, std::int64_t n) {
  double error = 0, norm = 0;
  for (std::int64_t k = 0; k < n; ++k) {
    error += (want[k] - got[k]) * (want[k] - got[k]);
    norm += want[k] * want[k];
  }
  // Weights below 2^-126 are flushed: of gradients that small (a softcap far below the logits) no digit is promised.
  return std::sqrt(error) / (std::sqrt(norm) + 0x1p-100);
}

class Sample {
 public:
  Sample(const Problem& problem, const BenchArrays& arrays, int threads)
      : p_(problem), a_(arrays), n_(p_.tokens), v_(p_.vocab), d_(p_.hidden), executor_(make_thread_executor(threads)) {
    if (p_.reduction == Reduction::mean) scale_ = 1.0 / static_cast<double>(n_);
  }

  SampledErrors errors() {
    SampledErrors worst;
    token_rows(worst);
    if (p_.want_d_c) vocabulary_rows(worst);
    return worst;
  }

 private:
  static void worsen(double& worst, double error) {
    if (!(error <= worst)) worst = error;  // lets NaN through
  }

  std::int64_t head_index(std::int64_t j, std::int64_t k) const {
    return p_.head_layout == HeadLayout::vd ? j * d_ + k : k * v_ + j;
  }

  std::vector<double> hidden_row(std::int64_t i) const {
    std::vector<double> row(static_cast<std::size_t>(d_));
    for (std::int64_t k = 0; k < d_; ++k) row[static_cast<std::size_t>(k)] = load(p_.e_dtype, a_.e.data(), i * d_ + k);
    return row;
  }

  // Head rows [begin, end) as doubles, [end - begin][D], read along memory in both layouts.
  void head_rows(std::int64_t begin, std::int64_t end, double* out) const {
    const auto copy = [&](std::int64_t j, std::int64_t k) {
      out[(j - begin) * d_ + k] = load(p_.c_dtype, a_.c.data(), head_index(j, k));
    };
    if (p_.head_layout == HeadLayout::vd) {
      for (std::int64_t j = begin; j < end; ++j) {
        for (std::int64_t k = 0; k < d_; ++k) copy(j, k);
      }
    } else {
      for (std::int64_t k = 0; k < d_; ++k) {
        for (std::int64_t j = begin; j < end; ++j) copy(j, k);
      }
    }
  }

  // A logit, and its derivative by the product.
  std::pair<double, double> logit(double product) const {
    if (!p_.softcap) return {product, 1.0};
    const double cap = static_cast<double>(*p_.softcap), t = std::tanh(product / cap);
    return {cap * t, 1 / (std::cosh(product / cap) * std::cosh(product / cap))};
  }

  // nll and dE of rows spread over the batch: one pass over the head for the logits, one for the gradients.
  void token_rows(SampledErrors& worst) {
    const std::int64_t rows = std::min(n_, kSampledRows), blocks = (v_ + kBlock - 1) / kBlock;
    std::vector<std::vector<double>> e, z(static_cast<std::size_t>(rows)), slope(z.size());
    std::vector<double> lse;
    for (std::int64_t r = 0; r < rows; ++r) e.push_back(hidden_row(r * n_ / rows));
    for (auto& row : z) row.resize(static_cast<std::size_t>(v_));
    for (auto& row : slope) row.resize(static_cast<std::size_t>(v_));

    const std::size_t workers = static_cast<std::size_t>(executor_->concurrency());
    std::vector<std::vector<double>> head(workers, std::vector<double>(static_cast<std::size_t>(kBlock * d_)));
    executor_->parallel_for(blocks, [&](std::int64_t block, int worker) {
      const std::int64_t begin = block * kBlock, end = std::min(v_, begin + kBlock);
      double* const c = head[static_cast<std::size_t>(worker)].data();
      head_rows(begin, end, c);
      for (std::size_t r = 0; r < e.size(); ++r) {
        for (std::int64_t j = begin; j < end; ++j) {
          const std::size_t at = static_cast<std::size_t>(j);
          std::tie(z[r][at], slope[r][at]) = logit(dot(e[r].data(), c + (j - begin) * d_, d_));
        }
      }
    });
    for (std::size_t r = 0; r < e.size(); ++r) {
      const std::size_t i = r * static_cast<std::size_t>(n_) / e.size();
      const double max = *std::max_element(z[r].begin(), z[r].end());
      double sum = 0;
      for (const double value : z[r]) sum += std::exp(value - max);
      lse.push_back(max + std::log(sum));
      const double nll = lse[r] - z[r][static_cast<std::size_t>(a_.labels[i])];
      worsen(worst.nll, std::abs(nll - static_cast<double>(a_.nll[i])));
    }
    if (!p_.want_d_e) return;

    // Each worker adds up its own blocks.
    std::vector<std::vector<double>> d_e(workers, std::vector<double>(static_cast<std::size_t>(rows * d_)));
    executor_->parallel_for(blocks, [&](std::int64_t block, int worker) {
      const std::int64_t begin = block * kBlock, end = std::min(v_, begin + kBlock);
      double* const c = head[static_cast<std::size_t>(worker)].data();
      head_rows(begin, end, c);
      for (std::size_t r = 0; r < e.size(); ++r) {
        const std::int64_t label = a_.labels[r * static_cast<std::size_t>(n_) / e.size()];
        double* const out = d_e[static_cast<std::size_t>(worker)].data() + static_cast<std::int64_t>(r) * d_;
        for (std::int64_t j = begin; j < end; ++j) {
          const std::size_t at = static_cast<std::size_t>(j);
          const double weight = (std::exp(z[r][at] - lse[r]) - (j == label)) * slope[r][at] * scale_;
          for (std::int64_t k = 0; k < d_; ++k) out[k] += weight * c[(j - begin) * d_ + k];
        }
      }
    });
    const DType dtype = p_.d_e_dtype.value_or(p_.e_dtype);
    std::vector<double> got(static_cast<std::size_t>(d_));
    for (std::int64_t r = 0; r < rows; ++r) {
      double* const want = d_e[0].data() + r * d_;
      for (std::size_t other = 1; other < workers; ++other) {
        for (std::int64_t k = 0; k < d_; ++k) want[k] += d_e[other][static_cast<std::size_t>(r * d_ + k)];
      }
      for (std::int64_t k = 0; k < d_; ++k) {
        got[static_cast<std::size_t>(k)] = load(dtype, a_.d_e.data(), r * n_ / rows * d_ + k);
      }
      worsen(worst.d_e, relative_error(want, got.data(), d_));
    }
  }

  // dC of rows spread over the vocabulary, every other one a label; the rows' lse is taken from the result.
  void vocabulary_rows(SampledErrors& worst) {
    const std::int64_t rows = std::min(v_, kSampledRows);
    std::vector<double> errors(static_cast<std::size_t>(rows));
    executor_->parallel_for(rows, [&](std::int64_t r, int) {
      const std::int64_t j = r % 2 == 0 ? a_.labels[static_cast<std::size_t>(r * n_ / rows)] : r * v_ / rows;
      std::vector<double> c(static_cast<std::size_t>(d_)), want(c.size()), got(c.size());
      head_rows(j, j + 1, c.data());
      for (std::int64_t i = 0; i < n_; ++i) {
        const std::size_t at = static_cast<std::size_t>(i);
        const std::vector<double> e = hidden_row(i);
        const auto [z, slope] = logit(dot(e.data(), c.data(), d_));
        // p - 1 of the label from its nll: exp(z - lse) - 1 with an lse in f32 has no digit where the row is confident.
        const double gradient = j == a_.labels[at] ? std::expm1(-static_cast<double>(a_.nll[at]))
                                                   : std::exp(z - static_cast<double>(a_.lse[at]));
        const double weight = gradient * slope * scale_;
        for (std::size_t k = 0; k < c.size(); ++k) want[k] += weight * e[k];
      }
      const DType dtype = p_.d_c_dtype.value_or(p_.c_dtype);
      for (std::int64_t k = 0; k < d_; ++k) {
        got[static_cast<std::size_t>(k)] = load(dtype, a_.d_c.data(), head_index(j, k));
      }
      errors[static_cast<std::size_t>(r)] = relative_error(want.data(), got.data(), d_);
    });
    for (const double error : errors) worsen(worst.d_c, error);
  }

  const Problem& p_;
  const BenchArrays& a_;
  const std::int64_t n_, v_, d_;
  double scale_ = 1;
  std::unique_ptr<Executor> executor_;
};

}  // namespace

SampledErrors sampled_errors(const Problem& problem, const BenchArrays& arrays, int threads) {
  return Sample(problem, arrays, threads).errors();
}

}  // namespace cutloss::cli
