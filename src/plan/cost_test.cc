#include "src/plan/cost.h"

#include <gtest/gtest.h>

#include <cmath>

#include "src/cpu/bandwidth.h"
#include "src/cpu/kernels.h"
#include "src/cpu/test_problem.h"
#include "src/plan/speeds.h"

namespace cutloss {
namespace {

// Small enough to be worked out by hand: 1u is 128 FLOP, the table 64 bytes, E 32, the logits 128.
Problem small(bool d_e, bool d_c) {
  Problem p;
  p.tokens = 4;
  p.vocab = 8;
  p.hidden = 2;
  p.want_d_e = d_e;
  p.want_d_c = d_c;
  return p;
}

Speeds roofline(double cache_bytes = 0) { return {"", "", false, 1, 1000, 2000, 100, cache_bytes}; }

// Blocks and chunks of two tokens, tasks of four vocabulary rows.
Schedule in_twos(Mode mode) { return {mode, mode == Mode::chunk ? 2 : 4, 2, 1, 4, 2}; }

TEST(Cost, StreamReadsTheTableOnceABlock) {
  const Cost cost = predict(small(true, false), in_twos(Mode::stream), roofline());
  EXPECT_EQ(cost.flops(), 256);
  EXPECT_EQ(cost.bytes(), 2 * 64 + 32 + 32);
  EXPECT_DOUBLE_EQ(cost.seconds(), 1.92 + 0.128);  // the first product waits for memory, the second does not
  EXPECT_TRUE(cost.memory_bound());
  EXPECT_EQ(predict(small(true, false), in_twos(Mode::stream), roofline(64)).bytes(), 64 + 32 + 32);
}

TEST(Cost, ChunkMovesItsLogitsAndAddsToDcOnceAChunk) {
  const Cost cost = predict(small(true, true), in_twos(Mode::chunk), roofline());
  EXPECT_EQ(cost.flops(), 3 * 128);
  EXPECT_EQ(cost.bytes(), (128 + 32 + 32) + 128 /* written */ + 2 * 128 /* dz in place */ + 2 * 2 * 64 /* dC */);
  // 64 bytes hold a chunk's logits, the table, and what is added to of dC.
  EXPECT_EQ(predict(small(true, true), in_twos(Mode::chunk), roofline(128)).bytes(), (64 + 32 + 32) + 128);
}

TEST(Cost, RecomputeFormsTheLogitsTwice) {
  const Cost cost = predict(small(true, true), in_twos(Mode::recompute), roofline());
  EXPECT_EQ(cost.flops(), 4 * 128);
  EXPECT_EQ(cost.bytes(), (128 + 32 + 32) + (64 + 2 * 32) + 64);
  EXPECT_EQ(predict(small(false, true), in_twos(Mode::recompute), roofline()).flops(), 3 * 128);
}

TEST(Cost, DenseLossMovesEveryLogitThroughMemory) {
  const Cost cost = predict_dense(small(true, true), roofline());
  EXPECT_EQ(cost.flops(), 3 * 128);
  EXPECT_EQ(cost.bytes(), (128 + 64 + 32) + 2 * 128 + 2 * 128 + (128 + 64 + 32) + (128 + 32 + 64));
  EXPECT_EQ(predict_dense(small(false, false), roofline()).bytes(), (128 + 64 + 32) + 2 * 128);
}

TEST(Cost, SparseWorksOnWhatIsKept) {
  Problem p = small(true, true);
  p.filter = Filter::unbiased;
  const Cost cost = predict(p, in_twos(Mode::sparse), roofline(), {0.25, 0});  // 8 entries
  EXPECT_EQ(cost.flops(), 128 + 2 * (8 * 2 * 2));
  EXPECT_EQ(cost.bytes(), 64 + (128 + 32 + 32) + 8 * 2 * 4 + 8 * 2 * 4 + 64);
  p.want_d_c = false;
  EXPECT_EQ(predict(p, in_twos(Mode::sparse), roofline(), {0.25, 0}).flops(), 128 + 8 * 2 * 2);
}

TEST(Cost, RowsThatAreRedoneCostTheExactMode) {
  Problem p = small(true, false);
  p.filter = Filter::certified;
  p.tolerance = 1e-3f;
  const double none = predict_on(p, Mode::sparse, roofline(), {0.25, 0}).flops();
  // Half of the entries, and two rows at 2u.
  EXPECT_EQ(predict_on(p, Mode::sparse, roofline(), {0.25, 0.5}).flops(), none - 4 * 2 * 2 + 128);
  EXPECT_EQ(predict_on(p, Mode::sparse, roofline(), {0.25, 1}).flops(), 128 + 256);
  // Without a tolerance only flat rows are redone, and those are found early.
  p.tolerance.reset();
  p.epsilon = 1e-3f;
  EXPECT_NEAR(predict_on(p, Mode::sparse, roofline(), {0.25, 1}).flops(), 128 + 0.97 * 128, 1e-9);
  p.want_d_c = true;
  EXPECT_NEAR(predict_on(p, Mode::sparse, roofline(), {0.25, 1}).flops(), 0.03 * 128 + 3 * 128, 1e-9);
}

TEST(Cost, TileFilterFormsTheLogitsForEachGradientAndSkipsItsShare) {
  Problem p = small(true, true);
  p.filter = Filter::tile;
  const auto flops = [&](double share) { return predict(p, in_twos(Mode::recompute), roofline(), {share, 0}).flops(); };
  EXPECT_EQ(flops(1), 5 * 128);
  EXPECT_EQ(flops(1), units_of(p, Mode::recompute) * 128);
  EXPECT_EQ(flops(0.5), 4 * 128);
  EXPECT_EQ(flops(0), 3 * 128);
}

// A CPU reads a line before it is written, and packs the table: both cost time, and the line traffic.
TEST(Cost, KernelsPayForLinesAndPacking) {
  Speeds cpu = roofline();
  cpu.kernels = true;
  const Cost cost = predict(small(true, false), in_twos(Mode::stream), cpu);
  EXPECT_EQ(cost.flops(), 256);
  EXPECT_EQ(cost.bytes(), 2 * 64 + 32 + 2 * 32);
  ASSERT_EQ(cost.stages()[0].name, "packing");
  EXPECT_DOUBLE_EQ(cost.list[0].compute_seconds, 2 * 16 * 2.0 / 1000);  // 2 blocks of 16 elements, a cycle each
  EXPECT_DOUBLE_EQ(cost.list[0].memory_seconds, 1.28);
  EXPECT_GT(cost.list[1].compute_seconds, 128.0 / 1000);
  Schedule on_one = in_twos(Mode::stream);
  cpu.threads = 2;  // the same peak for two threads, of which one works
  EXPECT_DOUBLE_EQ(predict(small(true, false), on_one, cpu).seconds(), 2 * cost.seconds());
}

TEST(Cost, SixteenBitInputsHalveTrafficAndTakeTheirPeak) {
  Problem p = small(false, false);
  p.e_dtype = p.c_dtype = DType::bf16;
  const Cost cost = predict(p, in_twos(Mode::loss), roofline());
  EXPECT_EQ(cost.bytes(), 2 * 32 + 16);
  EXPECT_DOUBLE_EQ(cost.list[0].compute_seconds, 128.0 / 2000);
  p.e_dtype = DType::f32;
  EXPECT_DOUBLE_EQ(predict(p, in_twos(Mode::loss), roofline()).list[0].compute_seconds, 128.0 / 1000);
}

std::vector<Speeds> machines() {
  std::vector<Speeds> all;
  for (const std::string& name : machine_names()) all.push_back(*known_machine(name));
  return all;
}

double seconds(Problem p, const Speeds& speeds, const Kept& kept = {0.01, 0.01}) {
  if (p.filter != Filter::none) p.epsilon = 1e-4f;
  if (!speeds.kernels) return predict_on(p, legal_modes(p).back(), speeds, kept).seconds();
  Machine machine = testing::machine_for(available_targets().front(), speeds.threads);
  return predict(make_plan(p, {legal_modes(p).back(), {}, 0}, machine).value(), speeds, kept).seconds();
}

TEST(Cost, GrowsWithTheProblemAndFallsWithTheMachine) {
  std::vector<Speeds> all = machines();
  all.push_back({"cpu", "", true, 2, 180e9, 180e9, 25e9, 32 << 20});
  for (const Speeds& speeds : all) {
    for (const auto& [d_e, d_c] : {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
      for (const Filter filter : {Filter::none, Filter::certified, Filter::unbiased, Filter::tile}) {
        Problem p;
        p.tokens = 1024;
        p.vocab = 32768;
        p.hidden = 512;
        p.want_d_e = d_e;
        p.want_d_c = d_c;
        p.filter = d_e || d_c ? filter : Filter::none;
        const double base = seconds(p, speeds);
        ASSERT_GT(base, 0);
        for (std::int64_t Problem::*size : {&Problem::tokens, &Problem::vocab, &Problem::hidden}) {
          Problem larger = p;
          larger.*size *= 2;
          const double more = seconds(larger, speeds);
          EXPECT_GT(more, 1.2 * base) << speeds.name;  // far from a fixed cost ...
          EXPECT_LT(more, 2.6 * base) << speeds.name;  // ... and from a square
        }
        if (p.filter != Filter::none) {
          EXPECT_GT(seconds(p, speeds, {0.5, 0}), seconds(p, speeds, {0.1, 0}));
        }
        for (double Speeds::*speed : {&Speeds::f32_flops, &Speeds::bandwidth}) {
          Speeds faster = speeds;
          faster.*speed *= 4;
          EXPECT_LE(seconds(p, faster), base);
        }
        Speeds twice = speeds;
        twice.f32_flops *= 2;
        twice.bandwidth *= 2;
        EXPECT_NEAR(seconds(p, twice), base / 2, 1e-9 * base) << "the unit is seconds";
      }
    }
  }
}

// The paper's Table 1: Gemma 2 2B, 8192 tokens, bf16, on an A100. What was measured cannot beat the roofline.
TEST(Cost, RooflinesStayBelowPublishedTimes) {
  Problem p;
  p.tokens = 8192;
  p.vocab = 256000;
  p.hidden = 2304;
  p.e_dtype = p.c_dtype = DType::bf16;
  const Speeds a100 = *known_machine("a100");
  const double loss = predict_on(p, Mode::loss, a100).seconds();
  EXPECT_NEAR(loss, 2.0 * 8192 * 256000 * 2304 / 312e12, 1e-12);
  EXPECT_NEAR(loss, 30.97e-3, 0.01e-3);
  EXPECT_LT(loss, 46e-3);
  p.want_d_e = p.want_d_c = true;
  const double unfiltered = predict_on(p, Mode::recompute, a100).seconds();
  EXPECT_GT(unfiltered, 4 * 30.97e-3);
  EXPECT_LT(unfiltered, (46 + 314) * 1e-3);
}

// "100 ms = 46 + k 268, k = 20 %; 115 ms: 26 %; at 49 % 177 ms": a published reading of those timings.
TEST(Cost, KeptShareIsInferredFromTimings) {
  EXPECT_NEAR(inferred_share(46, 314, 100).value(), 54.0 / 268, 1e-12);
  EXPECT_NEAR(inferred_share(46, 314, 100).value(), 0.20, 0.005);
  EXPECT_NEAR(inferred_share(46, 314, 115).value(), 0.26, 0.005);
  EXPECT_NEAR(filtered_time(46, 314, 0.49), 177, 0.5);
  EXPECT_NEAR(filtered_time(46, 314, inferred_share(46, 314, 115).value()), 115, 1e-12);
  for (const auto& times : {std::array{0.0, 314.0, 100.0},
                            {314.0, 46.0, 100.0},
                            {46.0, 314.0, 45.0},
                            {46.0, 314.0, 315.0},
                            {46.0, HUGE_VAL, 100.0},
                            {46.0, 314.0, std::nan("")}}) {
    EXPECT_EQ(inferred_share(times[0], times[1], times[2]).status().code(), StatusCode::invalid_argument);
  }
}

// The planner has no other opinion of what is faster, and by how much.
TEST(Cost, IsWhatThePlannerRanksBy) {
  Problem p;
  p.tokens = 4096;
  p.vocab = 50000;
  p.hidden = 256;
  p.want_d_e = p.want_d_c = true;
  const Machine machine = testing::machine_for(available_targets().front());
  const Speeds core = nominal_core(cpu::find_kernels(machine.target)->panel, static_cast<double>(machine.l3_bytes));
  const Plan chunk = make_plan(p, {}, machine).value();
  const Plan recompute = make_plan(p, {Mode::recompute, {}, 0}, machine).value();
  ASSERT_EQ(chunk.mode, Mode::chunk);
  ASSERT_EQ(chunk.rejected.size(), 1u);
  const double ratio = predict(recompute, core).seconds() / predict(chunk, core).seconds();
  EXPECT_GT(ratio, 1.1);
  const std::string& reason = chunk.rejected[0].reason;
  EXPECT_NEAR(std::stod(reason.substr(reason.find(", ") + 2)), ratio, 0.005) << reason;
}

TEST(Bandwidth, IsInBytesPerSecond) {
  const Result<double> bandwidth = cpu::measure_bandwidth(1 << 20, 1);
  ASSERT_TRUE(bandwidth.ok());
  EXPECT_GT(bandwidth.value(), 1e8);
  EXPECT_LT(bandwidth.value(), 1e13);
}

TEST(MachineFile, IsRead) {
  const Result<Speeds> speeds = parse_machine(
      "# a box\nname = my box\n\nbandwidth=1e11 # two sticks\r\n  f32_flops = 2.5e12\ncache_bytes = 33554432", "x");
  ASSERT_TRUE(speeds.ok()) << speeds.status().message();
  EXPECT_EQ(speeds->name, "my box");
  EXPECT_EQ(speeds->bandwidth, 1e11);
  EXPECT_EQ(speeds->f32_flops, 2.5e12);
  EXPECT_EQ(speeds->bf16_flops, 2.5e12);
  EXPECT_FALSE(speeds->kernels);
  EXPECT_TRUE(parse_machine("threads=8\nbandwidth=1\nf32_flops=1\ncache_bytes=1", "x")->kernels);
}

TEST(MachineFile, MistakesAreNamedWithTheirLine) {
  const auto refused = [](const std::string& text, const std::string& words) {
    const Status status = parse_machine(text, "box.txt").status();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  };
  refused("", "f32_flops is missing");
  refused("f32_flops=1\ncache_bytes=1", "bandwidth is missing");
  refused("f32_flops=1\nspeed=1", "box.txt, line 2: \"speed\" is no key; there are: f32_flops");
  refused("f32_flops", "box.txt, line 1: \"f32_flops\" is no \"key = value\"");
  for (const char* value : {"", "0", "-1", "nan", "inf", "1e22", "1 2", "fast", "0x10"}) {
    refused(std::string("bandwidth=") + value, "it must be a number in (0, 1e21]");
  }
  for (const char* value : {"0", "1.5", "1025", "nan"}) refused(std::string("threads=") + value, "from 1 to 1024");
}

}  // namespace
}  // namespace cutloss
