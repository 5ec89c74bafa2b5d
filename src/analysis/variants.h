// The sums of Cut Cross-Entropy's variants, emulated: its kernels add each tile's part of a row, formed in f32, to the
// gradient in memory.
//   bf16   the gradient is bf16: every addition of a tile is rounded to it (the paper's CCE)
//   kahan  the same with a bf16 compensation beside it (CCE-Kahan)
//   full   one float64 sum, rounded to bf16 at the end: no sum can do better in a bf16 gradient
// each with tiles of every |G| < epsilon left out, or with all of them (FullE, FullC: all for that gradient alone).
// On a GPU tiles come in any order; here in the vocabulary's (dE) or the tokens' (dC).
#ifndef CUTLOSS_SRC_ANALYSIS_VARIANTS_H_
#define CUTLOSS_SRC_ANALYSIS_VARIANTS_H_

#include <cstdint>
#include <vector>

#include "src/analysis/analysis.h"
#include "src/cpu/element.h"

namespace cutloss::analysis {

constexpr int kVariants = 6;  // Sums x {filtered, all}

inline float round_to_bf16(float x) {
  cpu::Bf16 rounded;
  cpu::FromFloat(x, rounded);
  return cpu::ToFloat(rounded);
}

// Of one row of a gradient.
class VariantSums {
 public:
  explicit VariantSums(std::int64_t hidden) : full_(static_cast<std::size_t>(hidden), 0.0) {
    for (auto* sums : {&bf16_[0], &bf16_[1], &kahan_[0], &kahan_[1], &lost_[0], &lost_[1]})
      sums->assign(full_.size(), 0.0f);
  }

  void add_tile(const double* part, bool kept) {
    for (int all = kept ? 0 : 1; all < 2; ++all) {
      for (std::size_t i = 0; i < bf16_[all].size(); ++i) {
        const auto term = static_cast<float>(part[i]);
        bf16_[all][i] = round_to_bf16(bf16_[all][i] + term);
        const float corrected = term - lost_[all][i];
        const float sum = round_to_bf16(kahan_[all][i] + corrected);
        lost_[all][i] = round_to_bf16((sum - kahan_[all][i]) - corrected);
        kahan_[all][i] = sum;
      }
    }
    if (!kept) return;
    for (std::size_t i = 0; i < full_.size(); ++i) full_[i] += part[i];
  }

  // error = what the variant (sums x all) makes of the row, less `exact`.
  void error(int variant, const double* exact, double* out) const {
    const int all = variant % 2;
    for (std::size_t i = 0; i < full_.size(); ++i) {
      double value = 0;
      switch (static_cast<Sums>(variant / 2)) {
        case Sums::bf16: value = bf16_[all][i]; break;
        case Sums::kahan: value = kahan_[all][i]; break;
        case Sums::full: value = round_to_bf16(static_cast<float>(all != 0 ? exact[i] : full_[i])); break;
      }
      out[i] = value - exact[i];
    }
  }

 private:
  std::vector<float> bf16_[2], kahan_[2], lost_[2];  // filtered, all
  std::vector<double> full_;
};

}  // namespace cutloss::analysis

#endif  // CUTLOSS_SRC_ANALYSIS_VARIANTS_H_
