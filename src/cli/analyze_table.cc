#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/cli/analyze.h"

namespace cutloss::cli {
namespace {

using analysis::Report;
using Rows = std::vector<std::vector<std::string>>;

std::string percent(double share) { return fmt::format("{:.3g}%", 100 * share); }
std::string number(double value) { return fmt::format("{:.2e}", value); }
std::string power(int exponent) { return fmt::format("2^-{}", exponent); }

void title(std::string_view text) { fmt::print("\n{}\n", text); }

void print_facts_of(const Report& r, const analysis::Options& o) {
  std::string tokens = fmt::format("{} of {}", r.tokens, r.tokens_given);
  if (r.tokens < r.tokens_valid) tokens += fmt::format(": a sample of the {} that count", r.tokens_valid);
  print_facts({{"tokens", tokens},
               {"vocabulary, hidden", fmt::format("{}, {}", r.vocab, r.hidden)},
               {"mean nll", fmt::format("{:.6g}", r.nll)},
               {"tiles", fmt::format("{} tokens x {} ids", o.tile_tokens, o.tile_vocab)},
               {"machine", fmt::format("{}, {} threads", r.target, r.threads)}});
}

void print_mass(const Report& r, const analysis::Options& o) {
  if (r.ranks.empty()) return;
  title("Softmax mass by rank, mean over tokens");
  Rows ranks = {{"rank", "probability", "mass up to it"}};
  std::int64_t next = 1;
  for (const auto& point : r.ranks) {
    if (point.rank < next && point.rank != r.vocab) continue;
    ranks.push_back({fmt::format("{}", point.rank), number(point.probability), percent(point.cumulative)});
    next = point.rank * 4;
  }
  print_table(ranks);
  title("Entries of a token by epsilon");
  Rows below = {{"epsilon", "kept", "most", "mass below", "most"}};
  for (std::size_t j = 0; j < r.below.size(); ++j) {
    const auto& b = r.below[j];
    below.push_back({power(o.exponents[j]), fmt::format("{:.1f}", b.kept_mean), fmt::format("{}", b.kept_max),
                     percent(b.mass_mean), percent(b.mass_max)});
  }
  print_table(below);
}

void print_shares(const Report& r, const analysis::Options& o) {
  for (const auto& t : r.temperatures) {
    title(fmt::format("Share with |G| >= epsilon at temperature {:g}: entries and rows of the table, tiles by order",
                      t.temperature));
    Rows rows = {{"epsilon", "entries", "rows"}};
    for (std::size_t j = 0; j < t.entries.size(); ++j) {
      rows.push_back({power(o.exponents[j]), percent(t.entries[j]), percent(t.rows[j])});
    }
    for (const auto& order : r.orders) {
      if (order.temperature != t.temperature) continue;
      rows[0].emplace_back(name(order.order));
      rows[0].emplace_back("(label alone)");
      for (std::size_t j = 0; j < order.tiles.size(); ++j) {
        rows[j + 1].push_back(percent(order.tiles[j]));
        rows[j + 1].push_back(percent(order.forced[j]));
      }
    }
    print_table(rows);
  }
}

void print_gradient(const Report& r, const analysis::Options& o, bool of_table) {
  title(of_table ? "Errors of dC against float64" : "Errors of dE against float64");
  Rows rows = {{"filter", "epsilon", "worked on", "relative", "cosine", "worst row"}};
  rows[0].insert(rows[0].end(), of_table ? std::initializer_list<std::string>{"rows with nothing"}
                                         : std::initializer_list<std::string>{"bias of the sum", "of its bound"});
  for (const auto& method : r.errors) {
    const auto& list = of_table ? method.d_c : method.d_e;
    for (std::size_t j = 0; j < list.size(); ++j) {
      const auto& e = list[j];
      rows.push_back({std::string(name(method.method)), power(o.exponents[j]),
                      method.kept.empty() ? "-" : percent(method.kept[j]), number(e.relative),
                      fmt::format("{:.6f}", e.cosine), number(e.worst_row)});
      if (of_table) {
        rows.back().push_back(percent(e.nothing));
      } else {
        rows.back().push_back(number(e.bias));
        rows.back().push_back(e.of_bound > 0 ? fmt::format("{:.3f}", e.of_bound) : "-");
      }
    }
  }
  print_table(rows);
}

void print_variants(const Report& r, const analysis::Options& o) {
  if (r.variants.empty()) return;
  title(fmt::format("Sums as in Cut Cross-Entropy's variants, emulated: tile filter at {}", power(o.variant_exponent)));
  Rows rows = {{"sums", "tiles", "dE relative", "dE bias", "dC relative"}};
  for (const auto& v : r.variants) {
    rows.push_back({std::string(name(v.sums)), v.filtered ? "filtered" : "all",
                    o.sections.d_e ? number(v.d_e.relative) : "-", o.sections.d_e ? number(v.d_e.bias) : "-",
                    o.sections.d_c ? number(v.d_c.relative) : "-"});
  }
  print_table(rows);
  fmt::print("filter on both: filtered, filtered; on E alone (FullC): dC of all; on C alone (FullE): dE of all\n");
}

void print_tolerances(const Report& r, bool with_d_c) {
  if (r.tolerances.empty()) return;
  title("The library's filters by tolerance, against float64");
  Rows rows = {
      {"filter", "tolerance", "epsilon", "worked on", "redone rows", "dE relative", "worst row", "bias of the sum"}};
  if (with_d_c) rows[0].insert(rows[0].end(), {"dC relative", "dC rows with nothing"});
  for (const auto& t : r.tolerances) {
    rows.push_back({std::string(name(t.filter)), fmt::format("{:g}", t.tolerance), number(t.report.epsilon),
                    percent(t.kept), fmt::format("{}", t.report.rows_redone), number(t.d_e.relative),
                    number(t.d_e.worst_row), number(t.d_e.bias)});
    if (with_d_c) rows.back().insert(rows.back().end(), {number(t.d_c.relative), percent(t.d_c.nothing)});
  }
  print_table(rows);
}

}  // namespace

void print_analysis(const Report& r, const analysis::Options& o) {
  print_facts_of(r, o);
  print_mass(r, o);
  print_shares(r, o);
  if (o.sections.d_e && !r.errors.empty()) print_gradient(r, o, false);
  if (o.sections.d_c && !r.errors.empty()) print_gradient(r, o, true);
  print_variants(r, o);
  print_tolerances(r, o.sections.d_c);
}

}  // namespace cutloss::cli
