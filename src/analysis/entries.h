// The entries of G in one tile.
#ifndef CUTLOSS_SRC_ANALYSIS_ENTRIES_H_
#define CUTLOSS_SRC_ANALYSIS_ENTRIES_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/analysis/levels.h"
#include "src/analysis/tiles.h"

namespace cutloss::analysis {

struct Entries {
  std::vector<double> p, factor;   // [token][id]: p; logit_scale * softcap's slope * G, of which rows are sums
  std::vector<double> slope;       // logit_scale * softcap's slope
  std::vector<std::uint8_t> slot;  // level of p; 0 for a label, whatever it is
  float largest = 0;               // log2 of the largest |G|
  int level = 0;                   // of the same

  // Of scratch.z, the logits of a tile of tokens against ids[0, rows).
  void fill(const Tiles& tiles, std::int64_t token_tile, const std::int64_t* ids, std::int64_t rows,
            const Tiles::Scratch& scratch, const Levels& levels) {
    const std::int64_t count = tiles.tokens_of(token_tile);
    for (auto* list : {&p, &factor, &slope}) list->resize(static_cast<std::size_t>(count * rows));
    slot.resize(p.size());
    largest = -std::numeric_limits<float>::infinity();
    const double scale = tiles.problem().logit_scale;
    const double inverse_cap = tiles.problem().softcap ? 1.0 / *tiles.problem().softcap : 0.0;
    std::size_t at = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t token = tiles.first_token(token_tile) + i;
      const Softmax& softmax = tiles.softmax(0, token);
      const std::int64_t label = tiles.label(token);
      for (std::int64_t v = 0; v < rows; ++v, ++at) {
        const double z = scratch.z[at];
        const bool is_label = ids[v] == label;
        const double log2 = is_label ? softmax.log2_rest : log2_p(softmax, z, 1.0);
        const double magnitude = std::exp2(log2);
        slope[at] = scale * (1.0 - z * inverse_cap * (z * inverse_cap));
        p[at] = is_label ? 0.0 : magnitude;  // a label is never dropped
        factor[at] = slope[at] * (is_label ? -magnitude : magnitude);
        slot[at] = is_label ? 0 : static_cast<std::uint8_t>(levels.of(static_cast<float>(log2)));
        largest = std::max(largest, static_cast<float>(log2));
      }
    }
    level = levels.of(largest);
  }
};

// Calls visit(level, weight) for every epsilon under which the unbiased filter keeps an entry of its slot by chance.
template <typename Visit>
void sample(const Levels& levels, int slot, double p, double random, const Visit& visit) {
  for (int level = slot; level-- > 0;) {  // one number decides for all epsilons: below p / epsilon
    const double epsilon = levels.epsilon(level);
    if (random * epsilon >= p) return;
    visit(level, epsilon);
  }
}

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_ENTRIES_H_
