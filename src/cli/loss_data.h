// The arrays of `cutloss loss`: what it reads, what it writes, and the buffers of one call.
#ifndef CUTLOSS_SRC_CLI_LOSS_DATA_H_
#define CUTLOSS_SRC_CLI_LOSS_DATA_H_

#include <string>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cli/npy.h"

namespace cutloss::cli {

// Paths, empty for what is not given; cotangent may be a number, vocab_order "learned".
struct LossFiles {
  std::string e, c, labels, bias, token_weights, class_weights, soft_ids, soft_probabilities, cotangent, lse_cotangent,
      vocab_order, accumulate_d_e, accumulate_d_c, accumulate_d_bias;
  std::string d_e, d_c, d_bias, nll, lse, entropy, argmax, correct, rank, top_k_ids, top_k_logprobs, mean_logits,
      out_vocab_order;

  struct Named {
    const char* option;
    std::string LossFiles::*path;
    const char* help;
  };
  static const std::vector<Named>& read();     // options that name a file to read
  static const std::vector<Named>& written();  // to write
  bool learns_order() const { return vocab_order == "learned"; }
  Status check_clash() const;  // no output may overwrite an input or another output
};

struct LossInputs {
  NpyArray e, c, bias;
  std::vector<std::int64_t> labels, soft_ids, vocab_order;
  std::vector<float> token_weights, class_weights, soft_probabilities, cotangent, lse_cotangent;
  NpyArray accumulate_d_e, accumulate_d_c, accumulate_d_bias;
  Inputs inputs;
};

// Reads the files and says in the problem what there is: shapes, dtypes, strides, which inputs.
Status read_inputs(const LossFiles& files, Problem& problem, LossInputs& to);

struct LossResults {
  // With the gradients that are to be added to, which each run begins with.
  LossResults(const Problem& problem, const LossInputs& inputs);
  Outputs outputs();
  void restart();
  Status write(const LossFiles& files) const;

  const Problem& problem;
  const LossInputs& inputs;
  std::vector<float> loss, nll, lse, entropy, top_k_logprobs, mean_logits;
  std::vector<std::int64_t> argmax, rank, top_k_ids;
  std::vector<std::uint8_t> correct;
  std::vector<std::byte> d_e, d_c, d_bias;
  std::int64_t valid = 0;
  FilterReport report;
};

}  // namespace cutloss::cli

#endif  // CUTLOSS_SRC_CLI_LOSS_DATA_H_
