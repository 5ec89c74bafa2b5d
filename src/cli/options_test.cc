#include <gtest/gtest.h>

#include "src/cli/check_case.h"
#include "src/cli/cli.h"
#include "src/cli/options.h"

namespace cutloss::cli {
namespace {

std::optional<std::uint64_t> bytes(const std::string& text) {
  CLI::App app;
  std::optional<std::uint64_t> value;
  add_bytes_option(app, "--budget", value, "");
  try {
    app.parse(std::vector<std::string>{text, "--budget"});  // CLI11 takes them last to first
  } catch (const CLI::ParseError&) {
    return std::nullopt;
  }
  return value;
}

TEST(Options, Bytes) {
  EXPECT_EQ(bytes("0"), 0u);
  EXPECT_EQ(bytes("123"), 123u);
  EXPECT_EQ(bytes("123B"), 123u);
  EXPECT_EQ(bytes("64MiB"), 64u << 20);
  EXPECT_EQ(bytes("64 mib"), 64u << 20);
  EXPECT_EQ(bytes("64M"), 64u << 20);
  EXPECT_EQ(bytes("1.5kb"), 1500u);
  EXPECT_EQ(bytes("2GB"), 2'000'000'000u);
  EXPECT_EQ(bytes("9e18"), 9'000'000'000'000'000'000u);
  for (const char* text : {"", "-1", "MiB", "1x", "1 MiBs", "nan", "inf", "1e30", "10e18", "0x10", "10 20"}) {
    EXPECT_FALSE(bytes(text)) << text;
  }
}

TEST(Options, Suggestions) {
  const std::vector<std::string> names = {"info", "plan", "check", "bench", "loss", "demo"};
  EXPECT_EQ(suggestions("chekc", names), std::vector<std::string>{"check"});
  EXPECT_EQ(suggestions("ben", names), std::vector<std::string>{"bench"});
  EXPECT_TRUE(suggestions("serialize", names).empty());
}

// A repro line is worth nothing if the seed and shape do not give the same case again.
TEST(CheckCase, SeedAndShapeFixEverything) {
  const std::string target = available_targets().at(0);
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const CheckCase first = make_case({}, seed, target);
    CheckOptions fixed;
    fixed.n = first.problem.tokens;
    fixed.v = first.problem.vocab;
    fixed.d = first.problem.hidden;
    fixed.mode = name(first.modes().back());
    const CheckCase again = make_case(fixed, seed, "another target");
    ASSERT_EQ(first.text(), again.text());
    ASSERT_EQ(first.e_memory, again.e_memory);
    ASSERT_EQ(first.c_memory, again.c_memory);
    ASSERT_EQ(first.label_memory, again.label_memory);
    ASSERT_EQ(first.cotangents, again.cotangents);
    ASSERT_TRUE(validate(first.problem).ok()) << validate(first.problem).message();
  }
}

}  // namespace
}  // namespace cutloss::cli
