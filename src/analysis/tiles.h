// Tiles of logits, and the softmax of every token.
#ifndef CUTLOSS_SRC_ANALYSIS_TILES_H_
#define CUTLOSS_SRC_ANALYSIS_TILES_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/analysis/analysis.h"
#include "src/cpu/kernels.h"

namespace cutloss::analysis {

struct FreeAligned {
  void operator()(float* p) const;
};
using Floats = std::unique_ptr<float[], FreeAligned>;  // 64-byte aligned, as the kernels take them
Floats make_floats(std::int64_t count);                // throws std::bad_alloc

// A token's softmax at one temperature.
struct Softmax {
  double lse = 0;        // of z / temperature
  double log2_rest = 0;  // log2(1 - p_label), with all its digits where p_label is nearly 1
};

// log2 p of a logit under it.
inline double log2_p(const Softmax& softmax, double z, double temperature) {
  constexpr double kLog2E = 1.4426950408889634;
  return (z / temperature - softmax.lse) * kLog2E;
}

// The tokens that count (or a sample of them), packed for the kernels, and what is known of them.
class Tiles {
 public:
  static Result<Tiles> make(const Problem& problem, const Inputs& inputs, const Machine& machine,
                            const Options& options);

  std::int64_t tokens() const { return static_cast<std::int64_t>(labels_.size()); }
  std::int64_t token_tiles() const { return (tokens() + tile_tokens_ - 1) / tile_tokens_; }
  std::int64_t first_token(std::int64_t tile) const { return tile * tile_tokens_; }
  std::int64_t tokens_of(std::int64_t tile) const { return std::min(tile_tokens_, tokens() - first_token(tile)); }
  std::int64_t vocab() const { return problem_.vocab; }
  std::int64_t hidden() const { return problem_.hidden; }
  std::int64_t valid() const { return valid_; }
  std::int64_t label(std::int64_t token) const { return labels_[static_cast<std::size_t>(token)]; }
  const std::vector<std::int64_t>& labels() const { return labels_; }
  std::int64_t caller_row(std::int64_t token) const { return rows_[static_cast<std::size_t>(token)]; }
  const float* hidden_row(std::int64_t token) const { return e_.get() + token * problem_.hidden; }
  const float* hidden_rows() const { return e_.get(); }
  const Problem& problem() const { return problem_; }
  const void* table() const { return table_; }
  const std::vector<double>& temperatures() const { return temperatures_; }
  const Softmax& softmax(std::size_t temperature, std::int64_t token) const {
    return softmax_[temperature][static_cast<std::size_t>(token)];
  }
  double nll(std::int64_t token) const { return nll_[static_cast<std::size_t>(token)]; }
  std::string_view target() const { return kernels_->name; }
  Executor& executor() const { return *executor_; }

  // Buffers of one task, for up to `rows` ids at a time.
  class Scratch {
   public:
    Scratch(const Tiles& tiles, std::int64_t rows);
    Floats head, logits;
    std::vector<double> z;  // [token of the tile][id]
  };
  // The ids' rows of the table for `logits`, and as plain f32 rows.
  void pack(const std::int64_t* ids, std::int64_t rows, Scratch& scratch) const;
  void widen(const std::int64_t* ids, std::int64_t rows, float* out) const;
  // z of a tile of tokens against the packed ids -> scratch.z, token t at [t * rows].
  void logits(std::int64_t token_tile, std::int64_t rows, Scratch& scratch) const;

  // Runs body(task) for all tasks, telling the progress of `stage`. Throws the std::bad_alloc of any of them.
  void parallel(std::string_view stage, std::int64_t tasks, const std::function<void(std::int64_t)>& body) const;

 private:
  Tiles() = default;
  Status take_rows(const Inputs& inputs, const Options& options);
  void pack_tokens(const Inputs& inputs);
  Status find_softmax();
  void softmax_of_tile(std::int64_t tile);

  Problem problem_;
  const cpu::Kernels* kernels_ = nullptr;
  std::shared_ptr<Executor> executor_;
  const void* table_ = nullptr;
  std::int64_t tile_tokens_ = 0, valid_ = 0, panels_ = 0;  // panels of a tile
  std::vector<std::int64_t> rows_, labels_;
  Floats e_, packed_;
  std::vector<double> temperatures_, nll_;
  std::vector<std::vector<Softmax>> softmax_;  // [temperature][token]
  std::function<void(std::string_view, double)> progress_;
  std::shared_ptr<std::mutex> progress_mutex_ = std::make_shared<std::mutex>();
};

// Ids in the order that is asked for.
Result<std::vector<std::int64_t>> make_order(const Tiles& tiles, Order order, const Options& options);

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_TILES_H_
