// An analysis whose allocations fail one by one, and what it holds: nothing that grows with tokens x vocabulary.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/analysis/analysis.h"
#include "tests/trust/failing_new.h"

namespace cutloss {
namespace {

using testing::armed;
using testing::fail_each;
using testing::live_bytes;
using testing::machine;
using testing::most_bytes;
using testing::Outcome;
using testing::outcome_of;

// Every number of a report that comes of another pass.
std::vector<double> numbers_of(const analysis::Report& r) {
  std::vector<double> all = {r.nll, r.ranks.back().cumulative, static_cast<double>(r.maps[0].log2[0])};
  for (const auto& below : r.below) all.push_back(below.mass_mean);
  for (const auto& order : r.orders) all.insert(all.end(), order.tiles.begin(), order.tiles.end());
  for (const auto& errors : r.errors) {
    for (const auto& e : errors.d_e) all.push_back(e.relative);
    for (const auto& e : errors.d_c) all.push_back(e.relative);
  }
  for (const auto& v : r.variants) all.insert(all.end(), {v.d_e.relative, v.d_c.relative});
  for (const auto& t : r.tolerances) all.insert(all.end(), {t.kept, t.d_e.relative, t.d_c.relative});
  return all;
}

TEST(Allocation, AnalyzeEndsTheProcessOrReportsHalfOfWhatItFound) {
  const Machine m = machine();
  Problem p;
  p.tokens = 7, p.vocab = 30, p.hidden = 5;
  std::vector<float> e(7 * 5), c(30 * 5);
  for (std::size_t i = 0; i < e.size(); ++i) e[i] = static_cast<float>(i * 7 % 13) / 6 - 1;
  for (std::size_t i = 0; i < c.size(); ++i) c[i] = static_cast<float>(i * 5 % 17) / 4 - 2;
  std::vector<std::int64_t> labels = {3, 9, 29, 0, 1, 17, 8};
  const Inputs in{e.data(), c.data(), labels.data()};
  analysis::Options o;
  o.tile_tokens = 4, o.tile_vocab = 16;
  o.exponents = {3, 6};
  o.temperatures = {0.5};
  o.tolerances = {0.05f};
  for (const int threads : {1, 2}) {
    o.threads = threads;
    const std::vector<double> want = numbers_of(analysis::analyze(p, in, m, o).value());
    EXPECT_GT(fail_each([&] {
                const Result<analysis::Report> got = analysis::analyze(p, in, m, o);
                armed = false;
                return got.ok() && numbers_of(got.value()) != want ? Outcome::wrong : outcome_of(got.status());
              }),
              100);
  }
  labels[2] = 30;
  const std::string refusal = analysis::analyze(p, in, m, o).status().message();
  EXPECT_GT(fail_each([&] {
              const Result<analysis::Report> got = analysis::analyze(p, in, m, o);
              armed = false;
              const bool half =
                  got.status().code() == StatusCode::invalid_argument && got.status().message() != refusal;
              return half ? Outcome::wrong : outcome_of(got.status(), StatusCode::invalid_argument);
            }),
            0);
}

// The most that an analysis holds at a time, of a problem of this size and with these sections.
std::int64_t held_bytes(std::int64_t tokens, std::int64_t vocab, const analysis::Sections& sections) {
  Problem p;
  p.tokens = tokens, p.vocab = vocab, p.hidden = 3;
  std::vector<float> e(static_cast<std::size_t>(tokens * 3), 0.5f), c(static_cast<std::size_t>(vocab * 3), -0.25f);
  const std::vector<std::int64_t> labels(static_cast<std::size_t>(tokens), 7);
  analysis::Options o;
  o.tile_tokens = 16, o.tile_vocab = 32;
  o.exponents = {4, 8};
  o.temperatures = {1, 0.5};
  o.threads = 1;
  o.sections = sections;
  const std::int64_t before = live_bytes;
  most_bytes = before;
  const Result<analysis::Report> got = analysis::analyze(p, {e.data(), c.data(), labels.data()}, machine(), o);
  EXPECT_TRUE(got.ok()) << got.status().message();
  return most_bytes - before;
}

// What is held is a + b N + c V in each pass: of twice the tokens and ids no more than twice as much. Sections apart,
// so that no pass hides behind a larger one. What the library's own filters take (tolerance) is the plan's to say.
TEST(Allocation, AnalysisHoldsWhatGrowsWithTokensTimesVocabulary) {
  constexpr std::int64_t kTokens = 256, kVocab = 4096;
  using analysis::Sections;
  for (bool Sections::*const section :
       {&Sections::mass, &Sections::shares, &Sections::map, &Sections::d_e, &Sections::d_c}) {
    Sections sections{false, false, false, false, false, false, false, false};
    sections.*section = true;
    sections.temperature = sections.shares;
    sections.variants = sections.d_e || sections.d_c;
    const std::int64_t once = held_bytes(kTokens, kVocab, sections);
    const std::int64_t twice = held_bytes(2 * kTokens, 2 * kVocab, sections);
    EXPECT_LE(twice, 2 * once);
    // The test would see one byte for each of 4 entries: 4 x that against 2 x that and the constant part.
    EXPECT_LT(once, kTokens * kVocab / 2) << "too large a constant to see anything";
  }
}

}  // namespace
}  // namespace cutloss
