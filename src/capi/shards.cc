// cutloss_combine_shards: a row's softmax from the parts of its vocabulary.
#include <cmath>
#include <iterator>
#include <limits>

#include "cutloss/cutloss.h"
#include "src/capi/convert.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss::capi {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// log(1 + exp(x)), for any x.
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

// log(exp(a) + exp(b))
double log_add(double a, double b) { return a == b ? a + std::log(2.0) : std::fmax(a, b) + softplus(-std::abs(a - b)); }

struct Row {
  double rest = -kInf;    // log of the sum over all ids but the label
  double target = -kInf;  // the label's logit; -inf: none
};

// Of every row before any is written.
Status check_row(std::int64_t shards, std::int64_t rows, std::int64_t row, const float* sum,
                 const float* target_logit) {
  std::int64_t holder = -1;
  for (std::int64_t s = 0; s < shards; ++s) {
    const std::int64_t at = s * rows + row;
    if (sum[at] < 0) {
      return invalid("sum[", s, ", ", row, "] is ", sum[at], "; a sum of exponentials is 0 or more");
    }
    if (target_logit[at] == -kInf) continue;
    if (holder >= 0) {
      return invalid("target_logit of row ", row, " is given by shard ", holder, " and by shard ", s,
                     "; one shard holds the label, the others have -inf");
    }
    holder = s;
  }
  return Status();
}

void add_shard(double max, double sum, double target, Row& to) {
  if (std::isnan(max) || std::isnan(sum) || max == kInf) {
    to.rest = NAN;
  } else if (sum != 0 && max != -kInf && !std::isnan(to.rest)) {
    to.rest = log_add(to.rest, max + std::log(sum));
  }
  if (target != -kInf) to.target = target;
}

// An infinite logit must not look like certainty.
bool broken(const Row& row) { return std::isnan(row.rest) || std::isnan(row.target) || row.target == kInf; }

double nll_of(const Row& row) {
  if (broken(row)) return NAN;
  return row.target == -kInf ? kInf : softplus(row.rest - row.target);
}

double lse_of(const Row& row) {
  if (broken(row)) return NAN;
  return row.target == -kInf ? row.rest : row.target + softplus(row.rest - row.target);
}

Status combine(std::int64_t shards, std::int64_t rows, const float* max, const float* sum, const float* target_logit,
               float* lse, float* nll) {
  constexpr std::int64_t kMost = std::int64_t{1} << 46;
  if (shards < 1) return invalid("shards is ", shards, "; it must be 1 or more");
  if (rows < 0) return invalid("rows is ", rows, "; it must be 0 or more");
  if (shards > kMost || rows > kMost / shards) {
    return invalid("shards x rows is ", shards, " x ", rows, ", more than 2^46 values");
  }
  if (rows == 0) return Status();
  if (max == nullptr) return invalid("max is null");
  if (sum == nullptr) return invalid("sum is null");
  if (target_logit == nullptr) return invalid("target_logit is null");
  const auto of_row = static_cast<std::size_t>(rows), of_shard = static_cast<std::size_t>(shards) * of_row;
  const struct {
    const char* argument;
    const float* data;
    std::size_t count;
    bool written;
  } arrays[] = {{"max", max, of_shard, false},
                {"sum", sum, of_shard, false},
                {"target_logit", target_logit, of_shard, false},
                {"lse", lse, lse == nullptr ? 0 : of_row, true},
                {"nll", nll, nll == nullptr ? 0 : of_row, true}};
  Range ranges[std::size(arrays)];
  for (std::size_t i = 0; i < std::size(arrays); ++i) {
    CUTLOSS_TRY(check_alignment(arrays[i].argument, arrays[i].data, sizeof(float)));
    ranges[i] = written_range(arrays[i].argument, arrays[i].data, arrays[i].count * sizeof(float));
    ranges[i].written = arrays[i].written;
  }
  CUTLOSS_TRY(check_overlap(ranges));
  for (std::int64_t i = 0; i < rows; ++i) CUTLOSS_TRY(check_row(shards, rows, i, sum, target_logit));
  for (std::int64_t i = 0; i < rows; ++i) {
    Row row;
    for (std::int64_t s = 0; s < shards; ++s) {
      const std::int64_t at = s * rows + i;
      add_shard(max[at], sum[at], target_logit[at], row);
    }
    if (lse != nullptr) lse[i] = static_cast<float>(lse_of(row));
    if (nll != nullptr) nll[i] = static_cast<float>(nll_of(row));
  }
  return Status();
}

}  // namespace
}  // namespace cutloss::capi

cutloss_status cutloss_combine_shards(int64_t shards, int64_t rows, const float* max, const float* sum,
                                      const float* target_logit, float* lse, float* nll) {
  return cutloss::capi::guarded([&] { return cutloss::capi::combine(shards, rows, max, sum, target_logit, lse, nll); });
}
