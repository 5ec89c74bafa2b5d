#include "src/analysis/owner_sums.h"

#include <algorithm>
#include <cmath>

#include "src/analysis/vectors.h"

namespace cutloss::analysis {

void ErrorSum::add(const double* error, const double* exact, std::int64_t hidden, double exact2, bool got_nothing,
                   double bound, bool rms) {
  const double owner2 = cutloss::analysis::dot(error, error, hidden);
  error2 += owner2;
  dot += cutloss::analysis::dot(error, exact, hidden);
  if (exact2 > 0) worst = std::max(worst, std::sqrt(owner2 / exact2));
  if (got_nothing) {
    nothing += 1;
    nothing2 += exact2;
  }
  if (rms) {
    bound2 += bound * bound;
  } else if (bound > 0) {
    of_bound = std::max(of_bound, std::sqrt(owner2) / bound);
  }
  for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += error[d];
}

ErrorTable::ErrorTable(int levels, std::int64_t hidden, bool with_sum)
    : methods(static_cast<std::size_t>(kMethods * levels)),
      variants(kVariants),
      exact_sum(with_sum ? static_cast<std::size_t>(hidden) : 0, 0.0) {
  for (auto* list : {&methods, &variants}) {
    for (ErrorSum& sum : *list) sum.sum.assign(exact_sum.size(), 0.0);
  }
}

void ErrorTable::merge(const ErrorTable& other) {
  const auto join = [](std::vector<ErrorSum>& to, const std::vector<ErrorSum>& from) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i].error2 += from[i].error2, to[i].dot += from[i].dot;
      to[i].nothing += from[i].nothing, to[i].nothing2 += from[i].nothing2, to[i].bound2 += from[i].bound2;
      to[i].worst = std::max(to[i].worst, from[i].worst);
      to[i].of_bound = std::max(to[i].of_bound, from[i].of_bound);
      for (std::size_t d = 0; d < to[i].sum.size(); ++d) to[i].sum[d] += from[i].sum[d];
    }
  };
  join(methods, other.methods);
  join(variants, other.variants);
  exact2 += other.exact2;
  owners += other.owners;
  for (std::size_t d = 0; d < exact_sum.size(); ++d) exact_sum[d] += other.exact_sum[d];
}

GradientError ErrorTable::result(const ErrorSum& sum, bool rms_bound) const {
  GradientError error;
  const auto ratio = [](double a, double b) { return b > 0 ? std::sqrt(a / b) : 0.0; };
  error.relative = ratio(sum.error2, exact2);
  const double made2 = exact2 + 2 * sum.dot + sum.error2;
  error.cosine = made2 > 0 && exact2 > 0 ? (exact2 + sum.dot) / std::sqrt(made2 * exact2) : 0.0;
  error.worst_row = sum.worst;
  const auto size = static_cast<std::int64_t>(exact_sum.size());
  if (size > 0) {
    error.bias = ratio(dot(sum.sum.data(), sum.sum.data(), size), dot(exact_sum.data(), exact_sum.data(), size));
  }
  error.nothing = owners > 0 ? sum.nothing / owners : 0.0;
  error.nothing_norm = exact2 > 0 ? sum.nothing2 / exact2 : 0.0;
  error.of_bound = rms_bound ? ratio(sum.error2, sum.bound2) : sum.of_bound;
  return error;
}

OwnerSums::OwnerSums(std::int64_t owners, std::int64_t hidden, const Levels& levels, bool with_tail, bool with_variants)
    : hidden_(hidden), levels_(levels) {
  const int slots = levels.count() + 1;
  exact_ = slots;  // slots of entries come first
  tile_ = exact_ + 1;
  sampled_ = tile_ + slots;
  tail_ = sampled_ + levels.count();
  parts_ = tail_ + (with_tail ? slots : 0);
  sums_.assign(static_cast<std::size_t>(owners * parts_ * hidden), 0.0);
  local_.assign(static_cast<std::size_t>((slots + 1) * hidden), 0.0);
  scratch_.assign(static_cast<std::size_t>(4 * hidden), 0.0);
  first_slot_.assign(static_cast<std::size_t>(owners), slots);
  first_tile_ = first_slot_;
  sampled_levels_.assign(static_cast<std::size_t>(owners), 0);
  if (with_variants) variants_.assign(static_cast<std::size_t>(owners), VariantSums(hidden));
}

void OwnerSums::add_tile(std::int64_t owner, const double* factors, const std::uint8_t* slots, std::int64_t count,
                         const float* others, int tile_slot, bool variant_keeps) {
  // A tile's entries are added up on their own first: its sum is needed too, and stays in L1.
  std::uint64_t touched = 0;
  for (std::int64_t u = 0; u < count; ++u) {
    add_scaled(factors[u], others + u * hidden_, hidden_, local_.data() + slots[u] * hidden_);
    touched |= std::uint64_t{1} << slots[u];
  }
  const int slot_count = levels_.count() + 1;
  double* const whole = local_.data() + slot_count * hidden_;
  std::fill_n(whole, hidden_, 0.0);
  for (int slot = 0; slot < slot_count; ++slot) {
    if ((touched >> slot & 1) == 0) continue;
    double* const part = local_.data() + slot * hidden_;
    add_scaled(1.0, part, hidden_, whole);
    add_scaled(1.0, part, hidden_, at(owner, slot));
    std::fill_n(part, hidden_, 0.0);
    first_slot_[static_cast<std::size_t>(owner)] = std::min(first_slot_[static_cast<std::size_t>(owner)], slot);
  }
  first_tile_[static_cast<std::size_t>(owner)] = std::min(first_tile_[static_cast<std::size_t>(owner)], tile_slot);
  add_scaled(1.0, whole, hidden_, at(owner, exact_));
  add_scaled(1.0, whole, hidden_, at(owner, tile_ + tile_slot));
  if (!variants_.empty()) variants_[static_cast<std::size_t>(owner)].add_tile(whole, variant_keeps);
}

void OwnerSums::add_sampled(std::int64_t owner, int level, double factor, const float* other) {
  add_scaled(factor, other, hidden_, at(owner, sampled_ + level));
  sampled_levels_[static_cast<std::size_t>(owner)] |= std::uint64_t{1} << level;
}

void OwnerSums::finish(std::int64_t owner, const double* shared_tail, const Bounds& bounds, ErrorTable& table) {
  const double* const exact = at(owner, exact_);
  const double exact2 = dot(exact, exact, hidden_);
  const auto index = static_cast<std::size_t>(owner);
  table.exact2 += exact2;
  table.owners += 1;
  for (std::size_t d = 0; d < table.exact_sum.size(); ++d) table.exact_sum[d] += exact[d];

  double *const dropped = scratch_.data(), *const tail = dropped + hidden_, *const tiles = tail + hidden_,
                *const error = tiles + hidden_;
  std::fill_n(scratch_.data(), 4 * hidden_, 0.0);
  double mass = 0, tail2 = 0;
  for (int level = levels_.count(); level-- > 0;) {
    const int slot = level + 1;
    add_scaled(-1.0, at(owner, slot), hidden_, dropped);
    add_scaled(-1.0, at(owner, tile_ + slot), hidden_, tiles);
    const double* const stands_in = shared_tail != nullptr ? shared_tail + slot * hidden_ : at(owner, tail_ + slot);
    add_scaled(1.0, stands_in, hidden_, tail);
    tail2 += dot(stands_in, stands_in, hidden_);
    if (bounds.mass != nullptr) mass += bounds.mass[slot];
    const bool none = first_slot_[index] > level;
    const auto sum = [&](Method method) -> ErrorSum& {
      return table.methods[static_cast<std::size_t>(static_cast<int>(method) * levels_.count() + level)];
    };
    sum(Method::drop).add(dropped, exact, hidden_, exact2, none, mass * bounds.largest, false);
    sum(Method::tile).add(tiles, exact, hidden_, exact2, first_tile_[index] > level, 0, false);
    std::copy_n(dropped, hidden_, error);
    add_scaled(1.0, tail, hidden_, error);
    sum(Method::tail).add(error, exact, hidden_, exact2, none && tail2 == 0, mass * bounds.radius, false);
    std::copy_n(dropped, hidden_, error);
    add_scaled(1.0, at(owner, sampled_ + level), hidden_, error);
    sum(Method::unbiased)
        .add(error, exact, hidden_, exact2, none && (sampled_levels_[index] >> level & 1) == 0,
             std::sqrt(levels_.epsilon(level) * mass) * bounds.largest, true);
  }
  for (int variant = 0; variant < kVariants && !variants_.empty(); ++variant) {
    variants_[index].error(variant, exact, error);
    table.variants[static_cast<std::size_t>(variant)].add(error, exact, hidden_, exact2, false, 0, false);
  }
}

}  // namespace cutloss::analysis
