#include <gtest/gtest.h>

#include <limits>
#include <optional>

#include "src/cpu/kernels.h"
#include "src/cpu/test_problem.h"
#include "src/plan/workspace.h"

namespace cutloss {
namespace {

Machine machine(int threads = 2) { return testing::machine_for(available_targets().front(), threads); }

Problem problem(std::int64_t n, std::int64_t v, std::int64_t d, bool d_e, bool d_c, DType dtype = DType::f32) {
  Problem p;
  p.tokens = n;
  p.vocab = v;
  p.hidden = d;
  p.want_d_e = d_e;
  p.want_d_c = d_c;
  p.e_dtype = p.c_dtype = dtype;
  return p;
}

Result<Plan> plan_with(const Problem& p, std::optional<std::uint64_t> budget, Mode mode = Mode::automatic) {
  Limits limits;
  limits.budget_bytes = budget;
  limits.mode = mode;
  return make_plan(p, limits, machine());
}

TEST(Plan, TakesTheCheapestModeOfEachRequest) {
  EXPECT_EQ(plan_with(problem(512, 4096, 64, false, false), {})->mode, Mode::loss);
  EXPECT_EQ(plan_with(problem(512, 4096, 64, true, false), {})->mode, Mode::stream);
  EXPECT_EQ(plan_with(problem(512, 4096, 64, true, true), {})->mode, Mode::chunk);
  EXPECT_EQ(plan_with(problem(512, 4096, 64, false, true), {})->mode, Mode::chunk);
}

TEST(Plan, CountsUnitsByTheProductsThatAreMade) {
  EXPECT_EQ(plan_with(problem(9, 9, 9, false, false), {})->units, 1);
  EXPECT_EQ(plan_with(problem(9, 9, 9, true, false), {})->units, 2);
  EXPECT_EQ(plan_with(problem(9, 9, 9, true, true), {}, Mode::chunk)->units, 3);
  EXPECT_EQ(plan_with(problem(9, 9, 9, false, true), {}, Mode::chunk)->units, 2);
  EXPECT_EQ(plan_with(problem(9, 9, 9, true, true), {}, Mode::recompute)->units, 4);
  EXPECT_EQ(plan_with(problem(9, 9, 9, false, true), {}, Mode::recompute)->units, 3);
}

// dE of filter "tile" needs the lse first, so it forms the logits again.
TEST(Plan, TileFilterCountsTheLogitsItFormsAgain) {
  for (const bool d_c : {false, true}) {
    Problem p = problem(9, 9, 9, true, d_c);
    p.filter = Filter::tile;
    p.epsilon = 0x1p-12f;
    EXPECT_EQ(plan_with(p, {})->units, d_c ? 5 : 3);
  }
}

TEST(Plan, BudgetTooSmallNamesTheSmallestThatWorks) {
  for (const bool d_c : {false, true}) {
    const Problem p = problem(4096, 32000, 256, true, d_c);
    const Result<Plan> refused = plan_with(p, 0);
    ASSERT_EQ(refused.status().code(), StatusCode::budget_too_small);
    const std::string& message = refused.status().message();
    const std::string key = "smallest that works here is ";
    const std::uint64_t smallest = std::stoull(message.substr(message.find(key) + key.size()));
    EXPECT_TRUE(plan_with(p, smallest).ok());
    EXPECT_FALSE(plan_with(p, smallest - 1).ok());
    EXPECT_LE(plan_with(p, smallest)->workspace_bytes, smallest);
  }
}

TEST(Plan, StaysInTheBudgetAndGrowsWithIt) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Problem p = problem(32768, 262144, 64, true, true, dtype);
    std::int64_t chunk = 0;
    bool chunked = false;
    for (int shift = 20; shift <= 40; ++shift) {
      const std::uint64_t budget = std::uint64_t{1} << shift;
      const Result<Plan> plan = plan_with(p, budget);
      if (!plan.ok()) {
        EXPECT_EQ(plan.status().code(), StatusCode::budget_too_small);
        EXPECT_FALSE(chunked) << "a larger budget was refused";
        continue;
      }
      EXPECT_LE(plan->workspace_bytes, budget);
      EXPECT_TRUE(!chunked || plan->mode == Mode::chunk) << "a larger budget chose a costlier mode";
      chunked = chunked || plan->mode == Mode::chunk;
      EXPECT_GE(plan->chunk_tokens, chunk) << "the chunk fell as the budget grew";
      chunk = plan->chunk_tokens;
      EXPECT_LE(plan->workspace_bytes, std::uint64_t{1200} << 20) << "a huge budget is not a reason to use it all";
    }
    EXPECT_TRUE(chunked);
  }
}

// In steps of a tenth from 1 MiB to 16 GiB: what fits once fits ever after, and never costs more.
TEST(Plan, NothingGetsWorseAsTheBudgetGrows) {
  std::vector<Problem> problems = {problem(8192, 262144, 640, true, false), problem(8192, 262144, 640, true, true),
                                   problem(300, 32000, 2304, true, true, DType::bf16),
                                   problem(4096, 151936, 1024, true, true)};
  problems.back().filter = Filter::unbiased;
  problems.back().epsilon = 1e-4;
  for (const Problem& p : problems) {
    std::optional<Plan> last;
    for (double budget = 1 << 20; budget <= 16.0 * (1 << 30); budget *= 1.1) {
      const Result<Plan> plan = plan_with(p, static_cast<std::uint64_t>(budget));
      if (!plan.ok()) {
        EXPECT_EQ(plan.status().code(), StatusCode::budget_too_small);
        EXPECT_FALSE(last) << "refused at " << budget << ", not below";
        continue;
      }
      EXPECT_LE(plan->workspace_bytes, budget);
      if (last) {
        EXPECT_LE(plan->units, last->units) << budget;
        EXPECT_GE(plan->chunk_tokens, last->chunk_tokens) << budget;
        // Mode sparse may give up a thread for more room for entries: its bits follow from that room.
        if (plan->mode != Mode::sparse) {
          EXPECT_GE(plan->threads, last->threads) << budget;
        }
      }
      last = plan.value();
    }
    EXPECT_TRUE(last);
  }
}

TEST(Plan, WithoutABudgetTheWorkspaceIsBounded) {
  EXPECT_LE(plan_with(problem(32768, 262144, 64, true, true), {})->workspace_bytes, std::uint64_t{512} << 20);
  EXPECT_LE(plan_with(problem(2048, 262144, 640, true, false), {})->workspace_bytes, std::uint64_t{64} << 20);
  EXPECT_LE(plan_with(problem(2048, 262144, 640, true, true), {}, Mode::recompute)->workspace_bytes,
            std::uint64_t{64} << 20);
}

// Each chunk reads and writes all of dC: with a fixed room for logits a large vocabulary must not mean tiny chunks.
TEST(Plan, ALargeVocabularyMeansTinyChunks) {
  for (const std::int64_t vocab : {32000, 128256, 262144}) {
    EXPECT_GE(plan_with(problem(4096, vocab, 256, true, true), {})->chunk_tokens, 256) << vocab;
  }
}

TEST(Plan, ChunkAskedForByNameTakesTheSmallestChunksBesideAnF32Sum) {
  const Problem p = problem(1024, 262144, 640, true, true, DType::bf16);
  const Result<Plan> plan = plan_with(p, {}, Mode::chunk);
  ASSERT_TRUE(plan->head_sum);
  EXPECT_GE(plan->chunk_tokens, 200);
  EXPECT_LE(plan->workspace_bytes, (std::uint64_t{640} + 16 + 256) << 20);  // sum, smallest chunk, half of 512 MiB
}

// What a filter leaves to the exact mode is worked in chunks as long as the room of mode sparse allows, however few
// entries the filter itself needs room for.
TEST(Plan, FlatRowsAreWorkedInTinyChunks) {
  for (const Filter filter : {Filter::certified, Filter::unbiased}) {
    Problem p = problem(1024, 262144, 640, true, true);
    p.filter = filter;
    p.epsilon = 0x1p-14f;
    const Result<Plan> plan = plan_with(p, {});
    ASSERT_TRUE(plan->exact);
    EXPECT_EQ(plan->exact->mode, Mode::chunk);
    EXPECT_GE(plan->exact->chunk_tokens, 96);
    EXPECT_LE(plan->workspace_bytes, std::uint64_t{128} << 20);
    const std::uint64_t budget = std::uint64_t{50} << 20;
    EXPECT_LE(plan_with(p, budget, Mode::sparse)->workspace_bytes, budget);
  }
}

// 8 GiB of f32 logits: nothing of a plan may be of that order, whatever the mode.
TEST(Plan, WorkspaceOfStreamAndRecomputeDoesNotGrowWithVocabulary) {
  for (const Mode mode : {Mode::stream, Mode::recompute}) {
    const std::uint64_t small =
        plan_with(problem(8192, 32000, 256, true, mode == Mode::recompute), {}, mode)->workspace_bytes;
    const std::uint64_t large =
        plan_with(problem(8192, 512000, 256, true, mode == Mode::recompute), {}, mode)->workspace_bytes;
    EXPECT_LE(large, small + small / 100) << name(mode);
  }
}

TEST(Plan, IllegalModeNamesTheLegalOnes) {
  const auto message = [](bool d_e, bool d_c, Mode mode) {
    return plan_with(problem(8, 8, 8, d_e, d_c), {}, mode).status().message();
  };
  EXPECT_NE(message(true, true, Mode::stream).find("\"chunk\" or \"recompute\""), std::string::npos);
  EXPECT_NE(message(true, false, Mode::chunk).find("\"stream\""), std::string::npos);
  EXPECT_NE(message(false, false, Mode::stream).find("\"loss\""), std::string::npos);
}

TEST(Plan, UnknownTargetIsUnavailable) {
  Machine other = machine();
  other.target = "avx9000";
  const Result<Plan> plan = make_plan(problem(8, 8, 8, true, false), {}, other);
  EXPECT_EQ(plan.status().code(), StatusCode::unavailable);
}

TEST(Plan, IsAPureFunction) {
  const Problem p = problem(777, 5000, 96, true, true);
  EXPECT_EQ(plan_with(p, {})->json(), plan_with(p, {})->json());
}

TEST(Plan, TilesFollowTheCacheSize) {
  Machine small = machine();
  Machine large = machine();
  small.l2_bytes = 256 << 10;
  large.l2_bytes = 2 << 20;
  const Problem p = problem(2048, 262144, 1024, true, false);
  EXPECT_LT(make_plan(p, {}, small)->vocab_tile, make_plan(p, {}, large)->vocab_tile);
  const int rows = cpu::find_kernels(machine().target)->rows;
  EXPECT_EQ(make_plan(p, {}, small)->vocab_tile % rows, 0);
}

TEST(Plan, ManyThreadsAreAnErrorOrCostNothingOnSmallProblems) {
  Limits limits;
  limits.threads = 2000000000;
  EXPECT_EQ(make_plan(problem(8, 8, 8, true, false), limits, machine()).status().code(), StatusCode::invalid_argument);
  limits.threads = 1024;
  const Result<Plan> plan = make_plan(problem(6, 21, 8, true, true), limits, machine());
  ASSERT_TRUE(plan.ok());
  EXPECT_LE(plan->workspace_bytes, std::uint64_t{1} << 20);
}

TEST(Validate, EachBadFieldIsNamed) {
  const auto refuses = [](const Problem& p, const std::string& word) {
    const Status status = validate(p);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  const Problem good = problem(4, 4, 4, true, true);
  EXPECT_TRUE(validate(good).ok());
  Problem p = good;
  p.vocab = 0;
  refuses(p, "vocab");
  p = good;
  p.hidden = 0;
  refuses(p, "hidden");
  p = good;
  p.hidden = std::int64_t{1} << 30;
  refuses(p, "hidden");
  p = good;
  p.tokens = -1;
  refuses(p, "tokens");
  p = good;
  p.tokens = std::int64_t{1} << 40;
  p.hidden = std::int64_t{1} << 20;
  refuses(p, "tokens x hidden");
  p = good;
  p.vocab = std::int64_t{1} << 62;
  refuses(p, "vocab x hidden");
  for (const float cap : {0.0f, -1.0f, 1e-30f, 9e37f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    p = good;
    p.softcap = cap;
    refuses(p, "softcap");
  }
  p = good;
  p.label_dtype = DType::f32;
  refuses(p, "label_dtype");
  p = good;
  p.e_dtype = DType::i32;
  refuses(p, "e_dtype");
  p = good;
  p.c_strides = Strides{std::numeric_limits<std::int64_t>::min(), 1};
  refuses(p, "stride");
}

TEST(Run, MissingAndOverlappingBuffersAreNamed) {
  testing::Case test = testing::Case::random(6, 9, 4, 1);
  test.problem.want_d_e = true;
  const Plan plan = plan_with(test.problem, {}).value();
  std::vector<float> d_e(24);
  float loss = 0;
  Outputs out;
  out.loss = &loss;
  EXPECT_NE(run(plan, test.inputs(), out).message().find("d_e is null"), std::string::npos);
  out.d_e = test.e.data();
  EXPECT_NE(run(plan, test.inputs(), out).message().find("e and d_e overlap"), std::string::npos);
  out.d_e = d_e.data();
  std::byte tiny[8];
  EXPECT_NE(run(plan, test.inputs(), out, tiny).message().find("workspace has 8 bytes"), std::string::npos);
  EXPECT_TRUE(run(plan, test.inputs(), out).ok());
}

TEST(Plan, MaxTokensFitAndOneMoreDoesNot) {
  for (const bool d_c : {false, true}) {
    for (const std::uint64_t budget : {std::uint64_t{1} << 20, std::uint64_t{5} << 20, std::uint64_t{100} << 20}) {
      Problem p = problem(77, 32000, 256, true, d_c, DType::bf16);
      Limits limits;
      limits.budget_bytes = budget;
      const Result<std::int64_t> most = max_tokens(p, limits, machine());
      ASSERT_TRUE(most.ok()) << most.status().message();
      ASSERT_GT(most.value(), 0);
      p.tokens = most.value();
      EXPECT_TRUE(make_plan(p, limits, machine()).ok()) << p.tokens;
      p.tokens += 1;
      EXPECT_EQ(make_plan(p, limits, machine()).status().code(), StatusCode::budget_too_small) << p.tokens;
    }
  }
  Limits nothing;
  nothing.budget_bytes = 1;
  EXPECT_EQ(max_tokens(problem(1, 32000, 256, true, false), nothing, machine()).status().code(),
            StatusCode::budget_too_small);
}

// Cut Cross-Entropy's Gemma 2 2B example, where 1161 MiB are the gradients themselves.
TEST(Plan, LowerBoundIsTheGradients) {
  Problem p = problem(8192, 256000, 2304, true, true, DType::bf16);
  EXPECT_EQ(gradient_bytes(p) >> 20, 1161u);
  p.bias_dtype = DType::f32;
  p.want_d_bias = true;
  EXPECT_EQ(gradient_bytes(p), (8192 + 256000) * 2304 * 2ull + 256000 * 4ull);
}

TEST(Plan, FiltersTakeTheModesTheyAreMadeFor) {
  Problem p = problem(512, 50000, 64, true, true);
  p.filter = Filter::unbiased;
  p.tolerance = 1e-2f;
  EXPECT_EQ(plan_with(p, {})->mode, Mode::sparse);
  EXPECT_EQ(plan_with(p, {}, Mode::sparse)->mode, Mode::sparse);
  EXPECT_NEAR(plan_with(p, {})->epsilon, 1e-4, 1e-9);
  EXPECT_EQ(plan_with(p, {}, Mode::chunk).status().code(), StatusCode::invalid_argument);
  p.filter = Filter::tile;
  EXPECT_EQ(plan_with(p, {}).status().code(), StatusCode::invalid_argument) << "a tolerance";
  p.tolerance.reset();
  p.epsilon = 0x1p-12f;
  EXPECT_EQ(plan_with(p, {})->mode, Mode::recompute);
  EXPECT_EQ(plan_with(p, {}, Mode::sparse).status().code(), StatusCode::invalid_argument);
  p.filter = Filter::none;
  EXPECT_EQ(plan_with(p, {}).status().code(), StatusCode::invalid_argument) << "an epsilon";
  p.epsilon.reset();
  EXPECT_EQ(plan_with(p, {}, Mode::sparse).status().code(), StatusCode::invalid_argument);
}

TEST(Plan, SparseStaysInItsBudgetWithItsExactPlan) {
  for (const Filter filter : {Filter::certified, Filter::unbiased}) {
    for (const bool d_c : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Problem p = problem(3000, 100000, 64, true, d_c, dtype);
        p.filter = filter;
        p.epsilon = 0x1p-14f;
        bool taken = false;
        for (int shift = 16; shift <= 34; ++shift) {
          const Result<Plan> plan = plan_with(p, std::uint64_t{1} << shift);
          EXPECT_TRUE(plan.ok() || !taken) << "a larger budget was refused: " << plan.status().message();
          if (!plan.ok()) continue;
          taken = true;
          EXPECT_LE(plan->workspace_bytes, std::uint64_t{1} << shift);
          EXPECT_LE(plan->exact->workspace_bytes, plan->workspace_bytes);
          EXPECT_EQ(map_workspace(plan.value(), nullptr).bytes, plan->workspace_bytes);
        }
        EXPECT_TRUE(taken);
      }
    }
  }
}

}  // namespace
}  // namespace cutloss
