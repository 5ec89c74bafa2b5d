#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "src/analysis/levels.h"
#include "src/analysis/passes.h"
#include "src/analysis/rank_curve.h"
#include "src/plan/arith.h"

namespace cutloss::analysis {
namespace {

constexpr std::int64_t kRows = 256;  // ids of a tile of logits here; any number would do
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kMapRows = 256, kMapColumns = 1024;

// What one tile of tokens comes to. Counts are by level, so that a sum over the levels up to j counts what reaches
// epsilon j.
struct Part {
  std::vector<std::vector<std::int64_t>> entries;        // [temperature][level]
  std::vector<std::vector<std::int64_t>> tiles, forced;  // [order x temperature][level]
  std::vector<double> probability, cumulative;           // [rank], summed over tokens
  std::vector<double> kept, mass;                        // [level], summed over tokens
  std::vector<std::int64_t> most;                        // [level], largest of a token
  std::vector<double> most_mass;                         // [level]
};

class Shares {
 public:
  Shares(const Tiles& tiles, const std::vector<NamedOrder>& orders, const Options& options)
      : tiles_(tiles),
        orders_(orders),
        options_(options),
        levels_(options.exponents),
        steps_(tiles.temperatures().size()),
        ranks_(rank_grid(tiles.vocab())),
        vocab_tiles_(ceil_div(tiles.vocab(), options.tile_vocab)),
        parts_(static_cast<std::size_t>(tiles.token_tiles())),
        id_largest_(steps_, std::vector<float>(static_cast<std::size_t>(tiles.vocab()), kNone)),
        tile_largest_(steps_ * orders.size(), std::vector<float>(static_cast<std::size_t>(vocab_tiles_), kNone)) {
    if (!options.sections.map) return;
    for (const NamedOrder& order : orders) {
      if (order.order != Order::natural && order.order != options.error_order) continue;
      TileMap map{order.order, std::min(tiles.token_tiles(), kMapRows), std::min(vocab_tiles_, kMapColumns), {}};
      map.log2.assign(static_cast<std::size_t>(map.rows * map.columns), kNone);
      maps_.push_back(std::move(map));
    }
  }

  void run(Report& report) {
    tiles_.parallel("shares", tiles_.token_tiles(), [&](std::int64_t tile) { run_tile(tile); });
    write(report);
  }

 private:
  std::size_t level_count() const { return static_cast<std::size_t>(levels_.count()) + 1; }

  void run_tile(std::int64_t tile) {
    Part& part = parts_[static_cast<std::size_t>(tile)];
    const auto vocab = static_cast<std::size_t>(tiles_.vocab());
    const std::int64_t count = tiles_.tokens_of(tile);
    part.entries.assign(steps_, std::vector<std::int64_t>(level_count(), 0));
    std::vector<std::vector<float>> largest(steps_, std::vector<float>(vocab, kNone)), largest_p = largest;
    std::vector<RankCurve> curves(options_.sections.mass ? static_cast<std::size_t>(count) : 0);
    std::vector<std::int64_t> kept(static_cast<std::size_t>(count) * level_count(), 0);
    std::vector<double> mass(kept.size(), 0.0);
    Tiles::Scratch scratch(tiles_, std::min(kRows, tiles_.vocab()));
    Ids ids(static_cast<std::size_t>(kRows));
    for (std::int64_t row = 0; row < tiles_.vocab(); row += kRows) {
      const std::int64_t rows = std::min(kRows, tiles_.vocab() - row);
      std::iota(ids.begin(), ids.end(), row);
      tiles_.pack(ids.data(), rows, scratch);
      tiles_.logits(tile, rows, scratch);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t token = tiles_.first_token(tile) + i;
        const std::int64_t label = tiles_.label(token) - row;
        const double* z = scratch.z.data() + i * rows;
        for (std::size_t t = 0; t < steps_; ++t) {
          const Softmax& softmax = tiles_.softmax(t, token);
          for (std::int64_t v = 0; v < rows; ++v) {
            const double log2 = log2_p(softmax, z[v], tiles_.temperatures()[t]);
            const double g = v == label ? softmax.log2_rest : log2;
            const auto at = static_cast<std::size_t>(row + v);
            largest_p[t][at] = std::max(largest_p[t][at], static_cast<float>(log2));
            largest[t][at] = std::max(largest[t][at], static_cast<float>(g));
            ++part.entries[t][static_cast<std::size_t>(levels_.of(static_cast<float>(g)))];
          }
        }
        if (options_.sections.mass) add_mass(token, label, z, rows, i, curves, kept, mass);
      }
    }
    if (options_.sections.mass) finish_mass(count, curves, kept, mass, part);
    find_tiles(tile, largest, largest_p, part);
    const std::lock_guard lock(mutex_);
    for (std::size_t t = 0; t < steps_; ++t) {
      for (std::size_t v = 0; v < vocab; ++v) id_largest_[t][v] = std::max(id_largest_[t][v], largest[t][v]);
    }
  }

  void add_mass(std::int64_t token, std::int64_t label, const double* z, std::int64_t rows, std::int64_t i,
                std::vector<RankCurve>& curves, std::vector<std::int64_t>& kept, std::vector<double>& mass) const {
    const Softmax& softmax = tiles_.softmax(0, token);
    const std::size_t base = static_cast<std::size_t>(i) * level_count();
    for (std::int64_t v = 0; v < rows; ++v) {
      const double log2 = log2_p(softmax, z[v], 1.0);
      curves[static_cast<std::size_t>(i)].add(log2);
      const std::size_t level = base + static_cast<std::size_t>(levels_.of(static_cast<float>(log2)));
      ++kept[level];
      if (v != label) mass[level] += std::exp2(log2);
    }
  }

  void finish_mass(std::int64_t count, std::vector<RankCurve>& curves, const std::vector<std::int64_t>& kept,
                   const std::vector<double>& mass, Part& part) const {
    part.probability.assign(ranks_.size(), 0.0);
    part.cumulative.assign(ranks_.size(), 0.0);
    part.kept.assign(level_count(), 0.0), part.mass.assign(level_count(), 0.0);
    part.most.assign(level_count(), 0), part.most_mass.assign(level_count(), 0.0);
    for (std::int64_t i = 0; i < count; ++i) {
      curves[static_cast<std::size_t>(i)].finish(ranks_, part.probability, part.cumulative);
      const std::size_t base = static_cast<std::size_t>(i) * level_count();
      std::int64_t above = 0;
      for (std::size_t j = 0; j + 1 < level_count(); ++j) {
        above += kept[base + j];
        part.kept[j] += static_cast<double>(above);
        part.most[j] = std::max(part.most[j], above);
      }
      double below = 0;
      for (std::size_t j = level_count() - 1; j-- > 0;) {
        below += mass[base + j + 1];
        part.mass[j] += below;
        part.most_mass[j] = std::max(part.most_mass[j], below);
      }
    }
  }

  // The largest |G| and p of each tile, in every order.
  void find_tiles(std::int64_t token_tile, const std::vector<std::vector<float>>& largest,
                  const std::vector<std::vector<float>>& largest_p, Part& part) {
    part.tiles.assign(orders_.size() * steps_, std::vector<std::int64_t>(level_count(), 0));
    part.forced = part.tiles;
    std::vector<float> g(static_cast<std::size_t>(vocab_tiles_));
    for (std::size_t o = 0; o < orders_.size(); ++o) {
      for (std::size_t t = 0; t < steps_; ++t) {
        for (std::int64_t tile = 0; tile < vocab_tiles_; ++tile) {
          float largest_g = kNone, p = kNone;
          const std::int64_t end = std::min((tile + 1) * options_.tile_vocab, tiles_.vocab());
          for (std::int64_t at = tile * options_.tile_vocab; at < end; ++at) {
            const auto id = static_cast<std::size_t>(orders_[o].ids[static_cast<std::size_t>(at)]);
            largest_g = std::max(largest_g, largest[t][id]);
            p = std::max(p, largest_p[t][id]);
          }
          g[static_cast<std::size_t>(tile)] = largest_g;
          const auto level = static_cast<std::size_t>(levels_.of(largest_g));
          ++part.tiles[o * steps_ + t][level];
          // From the level that |G| reaches up to the one that p reaches, a label alone keeps the tile.
          for (auto j = level; j < static_cast<std::size_t>(levels_.of(p)); ++j) ++part.forced[o * steps_ + t][j];
        }
        merge_tiles(token_tile, o, t, g);
      }
    }
  }

  void merge_tiles(std::int64_t token_tile, std::size_t o, std::size_t t, const std::vector<float>& g) {
    const std::lock_guard lock(mutex_);
    std::vector<float>& most = tile_largest_[o * steps_ + t];
    for (std::size_t i = 0; i < g.size(); ++i) most[i] = std::max(most[i], g[i]);
    if (t != 0) return;
    for (TileMap& map : maps_) {
      if (map.order != orders_[o].order) continue;
      const std::int64_t row = token_tile * map.rows / tiles_.token_tiles();
      for (std::int64_t i = 0; i < vocab_tiles_; ++i) {
        float& cell = map.log2[static_cast<std::size_t>(row * map.columns + i * map.columns / vocab_tiles_)];
        cell = std::max(cell, g[static_cast<std::size_t>(i)]);
      }
    }
  }

  // Shares of `total` up to each level.
  std::vector<double> running(const std::vector<std::int64_t>& counts, double total) const {
    std::vector<double> shares;
    std::int64_t sum = 0;
    for (int j = 0; j < levels_.count(); ++j) {
      shares.push_back(static_cast<double>(sum += counts[static_cast<std::size_t>(j)]) / total);
    }
    return shares;
  }

  // Of ids, how many have a largest value of each level; `weigh`: of the tiles', each counting its ids.
  std::vector<std::int64_t> by_level(const std::vector<float>& largest, bool of_tiles) const {
    std::vector<std::int64_t> counts(level_count(), 0);
    for (std::size_t i = 0; i < largest.size(); ++i) {
      const auto begin = static_cast<std::int64_t>(i) * options_.tile_vocab;
      counts[static_cast<std::size_t>(levels_.of(largest[i]))] +=
          of_tiles ? std::min(options_.tile_vocab, tiles_.vocab() - begin) : 1;
    }
    return counts;
  }

  void write(Report& report) const {
    const auto vocab = static_cast<double>(tiles_.vocab()), tokens = static_cast<double>(tiles_.tokens());
    const double all_tiles = static_cast<double>(tiles_.token_tiles()) * static_cast<double>(vocab_tiles_);
    const auto sum = [&](auto member, std::size_t index) {
      std::vector<std::int64_t> total(level_count(), 0);
      for (const Part& part : parts_) {
        for (std::size_t j = 0; j < level_count(); ++j) total[j] += (part.*member)[index][j];
      }
      return total;
    };
    if (options_.sections.shares) {
      for (std::size_t t = 0; t < steps_; ++t) {
        report.temperatures.push_back({tiles_.temperatures()[t], running(sum(&Part::entries, t), tokens * vocab),
                                       running(by_level(id_largest_[t], false), vocab)});
      }
      for (std::size_t o = 0; o < orders_.size(); ++o) {
        for (std::size_t t = 0; t < steps_; ++t) {
          OrderShares shares{orders_[o].order, tiles_.temperatures()[t], {}, {}, {}};
          shares.tiles = running(sum(&Part::tiles, o * steps_ + t), all_tiles);
          for (const std::int64_t count : sum(&Part::forced, o * steps_ + t)) {
            shares.forced.push_back(static_cast<double>(count) / all_tiles);
          }
          shares.forced.pop_back();
          shares.rows = running(by_level(tile_largest_[o * steps_ + t], true), vocab);
          report.orders.push_back(std::move(shares));
        }
      }
    }
    report.maps = maps_;
    if (options_.sections.mass) write_mass(report);
  }

  void write_mass(Report& report) const {
    const auto tokens = static_cast<double>(tiles_.tokens());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      RankPoint point{ranks_[r], 0, 0};
      for (const Part& part : parts_) {
        point.probability += part.probability[r] / tokens;
        point.cumulative += part.cumulative[r] / tokens;
      }
      report.ranks.push_back(point);
    }
    for (std::size_t j = 0; j + 1 < level_count(); ++j) {
      Below below;
      for (const Part& part : parts_) {
        below.kept_mean += part.kept[j] / tokens;
        below.mass_mean += part.mass[j] / tokens;
        below.kept_max = std::max(below.kept_max, part.most[j]);
        below.mass_max = std::max(below.mass_max, part.most_mass[j]);
      }
      report.below.push_back(below);
    }
  }

  const Tiles& tiles_;
  const std::vector<NamedOrder>& orders_;
  const Options& options_;
  Levels levels_;
  std::size_t steps_;
  std::vector<std::int64_t> ranks_;
  std::int64_t vocab_tiles_;
  std::vector<Part> parts_;
  std::mutex mutex_;
  std::vector<std::vector<float>> id_largest_, tile_largest_;  // over all tokens, by temperature (and order)
  std::vector<TileMap> maps_;
};

}  // namespace

void measure_shares(const Tiles& tiles, const std::vector<NamedOrder>& orders, const Options& options, Report& report) {
  Shares(tiles, orders, options).run(report);
}

}  // namespace cutloss::analysis
