// The errors of dE and dC, each by tasks that own their rows.
#include <algorithm>
#include <cmath>

#include "src/analysis/entries.h"
#include "src/analysis/owner_sums.h"
#include "src/analysis/passes.h"
#include "src/analysis/vectors.h"
#include "src/plan/arith.h"

namespace cutloss::analysis {
namespace {

// The vocabulary in its order, cut into tiles and blocks.
struct Cut {
  Cut(const Tiles& all, const Ids& order_, const Options& options)
      : tiles(all),
        order(order_),
        width(options.tile_vocab),
        count(ceil_div(all.vocab(), options.tile_vocab)),
        per_block(tail_tiles(options)),
        blocks(ceil_div(count, per_block)) {}

  const std::int64_t* ids(std::int64_t tile) const { return order.data() + tile * width; }
  std::int64_t rows(std::int64_t tile) const { return std::min(width, tiles.vocab() - tile * width); }
  std::int64_t block_rows(std::int64_t block) const {
    const std::int64_t begin = block * per_block * width;
    return std::min(per_block * width, tiles.vocab() - begin);
  }

  const Tiles& tiles;
  const Ids& order;
  std::int64_t width, count, per_block, blocks;
};

// The mean row of each block of the table, and how long and how far from it rows are.
struct Head {
  std::vector<double> centers;  // [block][D]
  double largest = 0, radius = 0;
};

Head summarize(const Cut& cut) {
  const std::int64_t d = cut.tiles.hidden();
  Head head;
  head.centers.assign(static_cast<std::size_t>(cut.blocks * d), 0.0);
  std::vector<float> row(static_cast<std::size_t>(d));
  std::vector<double> off(static_cast<std::size_t>(d));
  double largest2 = 0, radius2 = 0;
  for (std::int64_t block = 0; block < cut.blocks; ++block) {
    const std::int64_t begin = block * cut.per_block * cut.width, end = begin + cut.block_rows(block);
    double* const center = head.centers.data() + block * d;
    for (std::int64_t at = begin; at < end; ++at) {
      cut.tiles.widen(cut.order.data() + at, 1, row.data());
      add_scaled(1.0 / static_cast<double>(end - begin), row.data(), d, center);
    }
    for (std::int64_t at = begin; at < end; ++at) {
      cut.tiles.widen(cut.order.data() + at, 1, row.data());
      for (std::size_t k = 0; k < off.size(); ++k) off[k] = row[k];
      largest2 = std::max(largest2, dot(off.data(), off.data(), d));
      add_scaled(-1.0, center, d, off.data());
      radius2 = std::max(radius2, dot(off.data(), off.data(), d));
    }
  }
  const double scale = std::abs(cut.tiles.problem().logit_scale);
  head.largest = scale * std::sqrt(largest2);
  head.radius = scale * std::sqrt(radius2);
  return head;
}

// A tile of tokens: its rows of dE.
class TokenTask {
 public:
  TokenTask(const Cut& cut, const Head& head, const Levels& levels, const Options& options, std::int64_t tile)
      : cut_(cut),
        head_(head),
        levels_(levels),
        options_(options),
        tile_(tile),
        count_(cut.tiles.tokens_of(tile)),
        slots_(static_cast<std::size_t>(levels.count()) + 1),
        sums_(count_, cut.tiles.hidden(), levels, true, options.sections.variants),
        scratch_(cut.tiles, std::min(cut.width, cut.tiles.vocab())),
        mass_(static_cast<std::size_t>(count_) * slots_, 0.0),
        tail_mass_(mass_),
        table_(static_cast<std::size_t>(cut.width * cut.tiles.hidden())) {}

  // kept: [method][level], entries, added to.
  void run(ErrorTable& errors, std::vector<double>& kept, double* exact) {
    for (std::int64_t v = 0; v < cut_.count; ++v) {
      add_tile(v, kept);
      if ((v + 1) % cut_.per_block == 0 || v + 1 == cut_.count) flush_tail(v / cut_.per_block);
    }
    const std::int64_t d = cut_.tiles.hidden();
    for (std::int64_t i = 0; i < count_; ++i) {
      sums_.finish(i, nullptr, {mass_.data() + static_cast<std::size_t>(i) * slots_, head_.largest, head_.radius},
                   errors);
      if (exact != nullptr) std::copy_n(sums_.exact(i), d, exact + (cut_.tiles.first_token(tile_) + i) * d);
    }
  }

 private:
  void add_tile(std::int64_t v, std::vector<double>& kept) {
    const std::int64_t rows = cut_.rows(v), d = cut_.tiles.hidden();
    cut_.tiles.pack(cut_.ids(v), rows, scratch_);
    cut_.tiles.widen(cut_.ids(v), rows, table_.data());
    cut_.tiles.logits(tile_, rows, scratch_);
    entries_.fill(cut_.tiles, tile_, cut_.ids(v), rows, scratch_, levels_);
    const bool variant = entries_.largest >= static_cast<float>(-options_.variant_exponent);
    const auto levels = static_cast<std::size_t>(levels_.count());
    const auto count = [&](Method method, int level, double entries) {
      kept[static_cast<std::size_t>(method) * (levels + 1) + static_cast<std::size_t>(level)] += entries;
    };
    count(Method::tile, entries_.level, static_cast<double>(rows * count_));
    for (std::int64_t i = 0; i < count_; ++i) {
      const auto at = static_cast<std::size_t>(i * rows);
      sums_.add_tile(i, &entries_.factor[at], &entries_.slot[at], rows, table_.data(), entries_.level, variant);
      const std::int64_t row = cut_.tiles.caller_row(cut_.tiles.first_token(tile_) + i);
      for (std::int64_t k = 0; k < rows; ++k) {
        const std::size_t entry = at + static_cast<std::size_t>(k);
        const int slot = entries_.slot[entry];
        count(Method::drop, slot, 1);
        if (slot == 0) continue;
        mass_[static_cast<std::size_t>(i) * slots_ + static_cast<std::size_t>(slot)] += entries_.p[entry];
        tail_mass_[static_cast<std::size_t>(i) * slots_ + static_cast<std::size_t>(slot)] += entries_.factor[entry];
        sample(levels_, slot, entries_.p[entry], uniform(options_.seed, row, cut_.ids(v)[k]),
               [&](int level, double weight) {
                 sums_.add_sampled(i, level, weight * entries_.slope[entry], table_.data() + k * d);
                 count(Method::unbiased, level, 1);
               });
      }
    }
  }

  void flush_tail(std::int64_t block) {
    const std::int64_t d = cut_.tiles.hidden();
    for (std::int64_t i = 0; i < count_; ++i) {
      for (std::size_t slot = 1; slot < slots_; ++slot) {
        double& mass = tail_mass_[static_cast<std::size_t>(i) * slots_ + slot];
        if (mass != 0) add_scaled(mass, head_.centers.data() + block * d, d, sums_.tail(i, static_cast<int>(slot)));
        mass = 0;
      }
    }
  }

  const Cut& cut_;
  const Head& head_;
  const Levels& levels_;
  const Options& options_;
  std::int64_t tile_, count_;
  std::size_t slots_;
  OwnerSums sums_;
  Tiles::Scratch scratch_;
  Entries entries_;
  std::vector<double> mass_, tail_mass_;  // [token][slot], of the whole row and of the block at hand
  std::vector<float> table_;
};

// A block of the vocabulary: its rows of dC.
class VocabTask {
 public:
  VocabTask(const Cut& cut, const Levels& levels, const Options& options, std::int64_t block)
      : cut_(cut),
        levels_(levels),
        options_(options),
        block_(block),
        slots_(levels.count() + 1),
        scratch_(cut.tiles, std::min(cut.width, cut.tiles.vocab())),
        tail_(static_cast<std::size_t>(slots_ * cut.tiles.hidden()), 0.0) {}

  void run(ErrorTable& errors, float* exact) {
    const std::int64_t first = block_ * cut_.per_block;
    const std::int64_t end = std::min(first + cut_.per_block, cut_.count);
    find_tail(first, end);
    for (std::int64_t v = first; v < end; ++v) run_tile(v, errors, exact);
  }

 private:
  // What the block's ids lose of each token, shared evenly among them.
  void find_tail(std::int64_t first, std::int64_t end) {
    const Tiles& tiles = cut_.tiles;
    std::vector<double> mass(static_cast<std::size_t>(tiles.tokens() * slots_), 0.0);
    for (std::int64_t v = first; v < end; ++v) {
      const std::int64_t rows = cut_.rows(v);
      tiles.pack(cut_.ids(v), rows, scratch_);
      for (std::int64_t t = 0; t < tiles.token_tiles(); ++t) {
        tiles.logits(t, rows, scratch_);
        entries_.fill(tiles, t, cut_.ids(v), rows, scratch_, levels_);
        double* const at = mass.data() + tiles.first_token(t) * slots_;
        for (std::int64_t k = 0; k < tiles.tokens_of(t) * rows; ++k) {
          at[k / rows * slots_ + entries_.slot[static_cast<std::size_t>(k)]] +=
              entries_.factor[static_cast<std::size_t>(k)];
        }
      }
    }
    const double share = 1.0 / static_cast<double>(cut_.block_rows(block_));
    for (std::int64_t i = 0; i < tiles.tokens(); ++i) {
      for (std::int64_t slot = 1; slot < slots_; ++slot) {
        const double lost = mass[static_cast<std::size_t>(i * slots_ + slot)];
        if (lost == 0) continue;
        add_scaled(lost * share, tiles.hidden_row(i), tiles.hidden(), tail_.data() + slot * tiles.hidden());
      }
    }
  }

  void run_tile(std::int64_t v, ErrorTable& errors, float* exact) {
    const Tiles& tiles = cut_.tiles;
    const std::int64_t rows = cut_.rows(v), d = tiles.hidden();
    OwnerSums sums(rows, d, levels_, false, options_.sections.variants);
    tiles.pack(cut_.ids(v), rows, scratch_);
    for (std::int64_t t = 0; t < tiles.token_tiles(); ++t) {
      const std::int64_t count = tiles.tokens_of(t);
      tiles.logits(t, rows, scratch_);
      entries_.fill(tiles, t, cut_.ids(v), rows, scratch_, levels_);
      const bool variant = entries_.largest >= static_cast<float>(-options_.variant_exponent);
      factors_.resize(static_cast<std::size_t>(count));
      column_.resize(factors_.size());
      const float* const tokens = tiles.hidden_row(tiles.first_token(t));
      for (std::int64_t k = 0; k < rows; ++k) {
        for (std::int64_t i = 0; i < count; ++i) {
          const auto entry = static_cast<std::size_t>(i * rows + k);
          factors_[static_cast<std::size_t>(i)] = entries_.factor[entry];
          column_[static_cast<std::size_t>(i)] = entries_.slot[entry];
          if (entries_.slot[entry] == 0) continue;
          const std::int64_t row = tiles.caller_row(tiles.first_token(t) + i);
          sample(levels_, entries_.slot[entry], entries_.p[entry], uniform(options_.seed, row, cut_.ids(v)[k]),
                 [&](int level, double weight) {
                   sums.add_sampled(k, level, weight * entries_.slope[entry], tokens + i * d);
                 });
        }
        sums.add_tile(k, factors_.data(), column_.data(), count, tokens, entries_.level, variant);
      }
    }
    for (std::int64_t k = 0; k < rows; ++k) {
      sums.finish(k, tail_.data(), {}, errors);
      if (exact != nullptr) std::copy_n(sums.exact(k), d, exact + cut_.ids(v)[k] * d);
    }
  }

  const Cut& cut_;
  const Levels& levels_;
  const Options& options_;
  std::int64_t block_, slots_;
  Tiles::Scratch scratch_;
  Entries entries_;
  std::vector<double> tail_;  // [slot][D]
  std::vector<double> factors_;
  std::vector<std::uint8_t> column_;
};

void store(const ErrorTable& table, int levels, GradientError VariantErrors::*of_variant,
           std::vector<GradientError> MethodErrors::*of_method, bool variants, Report& report) {
  for (MethodErrors& errors : report.errors) {
    for (int level = 0; level < levels; ++level) {
      const auto index = static_cast<std::size_t>(static_cast<int>(errors.method) * levels + level);
      (errors.*of_method).push_back(table.result(table.methods[index], errors.method == Method::unbiased));
    }
  }
  if (!variants) return;
  for (VariantErrors& errors : report.variants) {
    const int index = 2 * static_cast<int>(errors.sums) + (errors.filtered ? 0 : 1);
    errors.*of_variant = table.result(table.variants[static_cast<std::size_t>(index)], false);
  }
}

// The lists that both gradients fill.
void prepare(const Options& options, Report& report) {
  if (!report.errors.empty()) return;
  for (int m = 0; m < kMethods; ++m) report.errors.push_back({static_cast<Method>(m), {}, {}, {}});
  if (!options.sections.variants) return;
  for (const Sums sums : {Sums::bf16, Sums::kahan, Sums::full}) {
    for (const bool filtered : {true, false}) report.variants.push_back({sums, filtered, {}, {}});
  }
}

ErrorTable joined(const std::vector<ErrorTable>& parts) {
  ErrorTable all = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i) all.merge(parts[i]);
  return all;
}

// Entries by the level at which they are first kept -> shares by epsilon.
std::vector<double> kept_share(const std::vector<double>& kept, Method method, int levels, double entries) {
  const auto stride = static_cast<std::size_t>(levels) + 1;
  const auto begin = [&](Method of) { return kept.data() + static_cast<std::size_t>(of) * stride; };
  const double* const counts = begin(method == Method::tile ? Method::tile : Method::drop);
  std::vector<double> shares;
  double sum = 0;
  for (int level = 0; level < levels; ++level) {
    sum += counts[level];
    const double by_chance = method == Method::unbiased ? begin(Method::unbiased)[level] : 0.0;
    shares.push_back((sum + by_chance) / entries);
  }
  return shares;
}

}  // namespace

std::string_view name(Method method) {
  switch (method) {
    case Method::drop: return "drop";
    case Method::tail: return "tail";
    case Method::unbiased: return "unbiased";
    case Method::tile: return "tile";
  }
  return "";
}

std::string_view name(Sums sums) {
  switch (sums) {
    case Sums::bf16: return "bf16";
    case Sums::kahan: return "kahan";
    case Sums::full: return "full";
  }
  return "";
}

void measure_d_e(const Tiles& tiles, const Ids& order, const Options& options, Report& report, double* exact_d_e) {
  const Levels levels(options.exponents);
  const Cut cut(tiles, order, options);
  const Head head = summarize(cut);
  const auto count = static_cast<std::size_t>(tiles.token_tiles());
  const std::size_t kinds = kMethods * (static_cast<std::size_t>(levels.count()) + 1);
  std::vector<ErrorTable> parts(count, ErrorTable(levels.count(), tiles.hidden(), true));
  std::vector<std::vector<double>> kept(count, std::vector<double>(kinds, 0.0));
  tiles.parallel("errors of dE", tiles.token_tiles(), [&](std::int64_t tile) {
    const auto at = static_cast<std::size_t>(tile);
    TokenTask(cut, head, levels, options, tile).run(parts[at], kept[at], exact_d_e);
  });
  if (!options.sections.d_e) return;
  prepare(options, report);
  store(joined(parts), levels.count(), &VariantErrors::d_e, &MethodErrors::d_e, options.sections.variants, report);
  for (std::size_t i = 1; i < count; ++i) {
    for (std::size_t k = 0; k < kinds; ++k) kept[0][k] += kept[i][k];
  }
  const double entries = static_cast<double>(tiles.tokens()) * static_cast<double>(tiles.vocab());
  for (MethodErrors& errors : report.errors) {
    errors.kept = kept_share(kept[0], errors.method, levels.count(), entries);
  }
}

void measure_d_c(const Tiles& tiles, const Ids& order, const Options& options, Report& report, float* exact_d_c) {
  const Levels levels(options.exponents);
  const Cut cut(tiles, order, options);
  std::vector<ErrorTable> parts(static_cast<std::size_t>(cut.blocks),
                                ErrorTable(levels.count(), tiles.hidden(), false));
  tiles.parallel("errors of dC", cut.blocks, [&](std::int64_t block) {
    VocabTask(cut, levels, options, block).run(parts[static_cast<std::size_t>(block)], exact_d_c);
  });
  prepare(options, report);
  store(joined(parts), levels.count(), &VariantErrors::d_c, &MethodErrors::d_c, options.sections.variants, report);
}

}  // namespace cutloss::analysis
