#include <cmath>
#include <nlohmann/json.hpp>

#include "src/cli/analyze.h"

namespace cutloss::cli {
namespace {

using analysis::GradientError;
using analysis::Report;

Json error_json(const GradientError& e, bool of_table) {
  Json out = {{"relative", e.relative}, {"cosine", e.cosine}, {"worst_row", e.worst_row}};
  if (of_table) {
    out["rows_with_nothing"] = e.nothing;
    out["norm2_in_them"] = e.nothing_norm;
  } else {
    out["bias"] = e.bias;
    out["of_bound"] = e.of_bound;
  }
  return out;
}

Json errors_json(const std::vector<GradientError>& list, bool of_table) {
  Json out = Json::array();
  for (const GradientError& e : list) out.push_back(error_json(e, of_table));
  return out;
}

Json mass_json(const Report& r) {
  Json out;
  for (const auto& point : r.ranks) {
    out["rank"].push_back(point.rank);
    out["probability"].push_back(point.probability);
    out["cumulative"].push_back(point.cumulative);
  }
  for (const auto& below : r.below) {
    out["kept_mean"].push_back(below.kept_mean);
    out["kept_max"].push_back(below.kept_max);
    out["mass_below_mean"].push_back(below.mass_mean);
    out["mass_below_max"].push_back(below.mass_max);
  }
  return out;
}

Json map_json(const analysis::TileMap& map) {
  Json rows = Json::array();
  for (std::int64_t i = 0; i < map.rows; ++i) {
    Json row = Json::array();
    for (std::int64_t k = 0; k < map.columns; ++k) {
      const double value = map.log2[static_cast<std::size_t>(i * map.columns + k)];
      row.push_back(std::isfinite(value) ? Json(std::round(value * 10) / 10) : Json(nullptr));  // a picture's accuracy
    }
    rows.push_back(std::move(row));
  }
  return {{"order", name(map.order)}, {"log2_largest", std::move(rows)}};
}

Json tolerance_json(const analysis::TolerancePoint& t, bool with_d_c) {
  Json out = {{"filter", name(t.filter)},
              {"tolerance", t.tolerance},
              {"epsilon", t.report.epsilon},
              {"kept", t.kept},
              {"rows_redone", t.report.rows_redone},
              {"mass_below_mean", t.report.dropped_mass_mean},
              {"mass_below_max", t.report.dropped_mass_max},
              {"error_bound", t.report.error_bound},
              {"d_e", error_json(t.d_e, false)}};
  if (with_d_c) out["d_c"] = error_json(t.d_c, true);
  return out;
}

Json settings_json(const Report& r, const analysis::Options& o, const Problem& p) {
  Json out = {{"n", r.tokens},
              {"n_valid", r.tokens_valid},
              {"n_given", r.tokens_given},
              {"v", r.vocab},
              {"d", r.hidden},
              {"e_dtype", name(p.e_dtype)},
              {"c_dtype", name(p.c_dtype)},
              {"logit_scale", p.logit_scale},
              {"softcap", p.softcap ? Json(*p.softcap) : Json(nullptr)},
              {"ignore_index", p.ignore_index},
              {"tile_tokens", o.tile_tokens},
              {"tile_vocab", o.tile_vocab},
              {"exponents", o.exponents},
              {"error_order", name(o.error_order)},
              {"seed", o.seed},
              {"target", r.target},
              {"threads", r.threads}};
  return out;
}

}  // namespace

Json analysis_json(const Report& r, const analysis::Options& options, const Problem& problem) {
  Json out = {{"settings", settings_json(r, options, problem)}, {"nll", r.nll}};
  if (!r.ranks.empty()) out["mass"] = mass_json(r);
  for (const auto& t : r.temperatures) {
    out["entries"].push_back({{"temperature", t.temperature}, {"share", t.entries}, {"rows", t.rows}});
  }
  for (const auto& o : r.orders) {
    out["tiles"].push_back({{"order", name(o.order)},
                            {"temperature", o.temperature},
                            {"share", o.tiles},
                            {"forced_by_label", o.forced},
                            {"rows", o.rows}});
  }
  for (const auto& e : r.errors) {
    out["errors"].push_back({{"method", name(e.method)},
                             {"kept", e.kept},
                             {"d_e", errors_json(e.d_e, false)},
                             {"d_c", errors_json(e.d_c, true)}});
  }
  for (const auto& v : r.variants) {
    Json item = {{"sums", name(v.sums)}, {"filtered", v.filtered}, {"exponent", options.variant_exponent}};
    if (options.sections.d_e) item["d_e"] = error_json(v.d_e, false);
    if (options.sections.d_c) item["d_c"] = error_json(v.d_c, true);
    out["variants"].push_back(std::move(item));
  }
  for (const auto& t : r.tolerances) out["tolerances"].push_back(tolerance_json(t, options.sections.d_c));
  for (const auto& map : r.maps) out["maps"].push_back(map_json(map));
  return out;
}

}  // namespace cutloss::cli
