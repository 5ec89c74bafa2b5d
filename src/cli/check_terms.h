// What a problem of `cutloss check` has beyond E, C and labels: bias, weights, soft targets, orders, metrics, and
// gradients that are added to.
#ifndef CUTLOSS_SRC_CLI_CHECK_TERMS_H_
#define CUTLOSS_SRC_CLI_CHECK_TERMS_H_

#include <string>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cli/data.h"

namespace cutloss::cli {

// Arrays by the names of Inputs; empty for what the problem does not have.
struct CheckTerms {
  std::vector<std::byte> bias;
  std::vector<float> token_weights, class_weights, lse_cotangent, soft_probabilities;
  std::vector<std::int32_t> soft_ids32;
  std::vector<std::int64_t> soft_ids, vocab_order;
  std::optional<double> denominator;

  void put_into(const Problem& problem, Inputs& inputs) const;
};

DType draw_dtype(Random& random);

// Fields of the problem. Half of the problems have none: these find what is wrong without them.
void draw_terms(Random& random, Problem& problem);
// A filter for some, as far as the mode that was asked for ("all": any) has one.
void draw_filter(Random& random, const std::string& mode, Problem& problem);

CheckTerms fill_terms(Random& random, const Problem& problem);

// Rows that must not be looked at: their hidden states may be NaN.
std::vector<bool> unread_rows(const Problem& problem, const std::vector<std::int64_t>& labels, const CheckTerms& terms);

// In words, for a failure; "" without any.
std::string terms_text(const Problem& problem);

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_CHECK_TERMS_H_
