#include "src/plan/tuning.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "src/cpu/kernels.h"
#include "src/cpu/test_problem.h"
#include "src/plan/test_folder.h"
#include "src/plan/workspace.h"

namespace cutloss {
namespace {

constexpr const char* kCpu = "GenuineTest, family 6, model 1";

class Tuning : public testing::InFolder {
 protected:
  void SetUp() override {
    InFolder::SetUp();
    path_ = root_ + "/cache/tuning.txt";
  }

  std::string content() const {
    std::ostringstream all;
    all << std::ifstream(path_, std::ios::binary).rdbuf();
    return all.str();
  }
  void put(const std::string& bytes) { std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes; }

  // FNV-1a, as the format says, so that a lie can be signed.
  static std::string signed_file(const std::string& body) {
    std::uint64_t sum = 0xCBF29CE484222325u;
    for (const char c : body) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
    char line[32];
    std::snprintf(line, sizeof line, "sum %016llx\n", static_cast<unsigned long long>(sum));
    return body + line;
  }

  std::string path_;
};

TunedBlocks entry(const std::string& target, Mode mode, std::int64_t hidden, Blocks blocks) {
  return {target, mode, hidden, DType::f32, HeadLayout::vd, blocks};
}

std::vector<TunedBlocks> some_entries() {
  return {entry("avx2", Mode::stream, 640, {512, 96, 1024, 256, 384}),
          entry("avx512", Mode::chunk, 2304, {2048, 224, 512, 1024, 1536}),
          {"neon", Mode::recompute, 1, DType::bf16, HeadLayout::dv, {1, 1, 1, 1, 65536}}};
}

TEST_F(Tuning, WhatIsWrittenIsRead) {
  ASSERT_TRUE(write_tuning(path_, kCpu, some_entries()).ok());
  const TuningFile file = read_tuning(path_, kCpu);
  EXPECT_TRUE(file.used) << file.note;
  EXPECT_EQ(format_tuning(file.entries), format_tuning(some_entries()));
  EXPECT_NE(file.note.find("3 entries"), std::string::npos) << file.note;
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(root_ + "/cache"), {}), 1) << "a temporary file stayed";
}

TEST_F(Tuning, EveryTruncationIsIgnoredWithAWord) {
  ASSERT_TRUE(write_tuning(path_, kCpu, some_entries()).ok());
  const std::string whole = content();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    put(whole.substr(0, size));
    const TuningFile file = read_tuning(path_, kCpu);
    EXPECT_FALSE(file.used) << size;
    EXPECT_TRUE(file.entries.empty()) << size;
    EXPECT_TRUE(file.note.starts_with("ignored " + path_)) << file.note;
  }
}

TEST_F(Tuning, EveryFlippedBitIsIgnored) {
  ASSERT_TRUE(write_tuning(path_, kCpu, some_entries()).ok());
  const std::string whole = content();
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string changed = whole;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
    put(changed);
    const TuningFile file = read_tuning(path_, kCpu);
    EXPECT_FALSE(file.used) << bit;
    EXPECT_TRUE(file.entries.empty()) << bit;
  }
}

TEST_F(Tuning, ForeignFilesAreIgnoredAndSaidWhy) {
  const auto note = [&](const std::string& bytes) {
    put(bytes);
    const TuningFile file = read_tuning(path_, kCpu);
    EXPECT_FALSE(file.used);
    EXPECT_TRUE(file.entries.empty());
    return file.note;
  };
  ASSERT_TRUE(write_tuning(path_, "another CPU", some_entries()).ok());
  EXPECT_NE(note(content()).find("another CPU"), std::string::npos);
  const std::string head = std::string("cutloss tuning 1\ncpu ") + kCpu + "\n";
  EXPECT_NE(note(signed_file("cutloss tuning 2\n")).find("another version"), std::string::npos);
  EXPECT_NE(note("\x7f"
                 "ELF\n")
                .find("not a tuning file"),
            std::string::npos);
  EXPECT_NE(note(head + std::string(100000, 'x')).find("too long"), std::string::npos);
  EXPECT_NE(note(signed_file("cutloss tuning 1\n")).find("no CPU"), std::string::npos);
  // Sums that are right do not make sizes so.
  for (const char* line :
       {"avx2 stream 640 f32 vd 0 96 1024 256 384\n", "avx2 stream 640 f32 vd 512 -96 1024 256 384\n",
        "avx2 stream 640 f32 vd 512 65537 1024 256 384\n", "avx2 stream 99999999999999999999 f32 vd 1 1 1 1 1\n",
        "avx2 sparse 640 f32 vd 512 96 1024 256 384\n", "avx2 auto 640 f32 vd 512 96 1024 256 384\n",
        "avx2 stream 640 i64 vd 512 96 1024 256 384\n", "avx2 stream 640 f32 xx 512 96 1024 256 384\n",
        "avx2 stream 640 f32 vd 512 96 1024 256\n", "avx2 stream 640 f32 vd 512 96 1024 256 384 7\n",
        "a/b stream 640 f32 vd 512 96 1024 256 384\n", "\n", "avx2  stream 640 f32 vd 512 96 1024 256 384\n",
        "avx2 stream 640 f32 vd 512 96 1024 256 384x\n"}) {
    EXPECT_NE(note(signed_file(head + line)).find("line 1"), std::string::npos) << line;
  }
  std::string many = head;
  for (int k = 1; k <= 257; ++k) many += "avx2 stream " + std::to_string(k) + " f32 vd 1 1 1 1 1\n";
  EXPECT_NE(note(signed_file(many)).find("more than 256"), std::string::npos);
}

TEST_F(Tuning, WhatIsNoFileNeitherBlocksNorCounts) {
  EXPECT_TRUE(read_tuning(path_, kCpu).note.starts_with("none yet"));
  std::filesystem::create_directories(root_ + "/cache");
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  for (const std::string& path : {path_, root_, std::string("/dev/zero")}) {
    EXPECT_NE(read_tuning(path, kCpu).note.find("not a regular file"), std::string::npos) << path;
  }
  EXPECT_FALSE(write_tuning("/proc/no/file", kCpu, {}).ok());
}

TEST_F(Tuning, LinksAreNeitherReadNorWrittenThrough) {
  const std::string target = root_ + "/target";
  ASSERT_TRUE(write_tuning(target, kCpu, some_entries()).ok());
  std::filesystem::create_directories(root_ + "/cache");
  std::filesystem::create_symlink(target, path_);
  EXPECT_NE(read_tuning(path_, kCpu).note.find("a symbolic link"), std::string::npos);
  ASSERT_TRUE(write_tuning(path_, kCpu, {}).ok());
  EXPECT_EQ(read_tuning(path_, kCpu).note.find("ignored"), std::string::npos);
  EXPECT_EQ(read_tuning(target, kCpu).entries.size(), some_entries().size()) << "the link's target was changed";
}

TEST_F(Tuning, ReadersAmongWritersSeeWholeFilesOnly) {
  ASSERT_TRUE(write_tuning(path_, kCpu, some_entries()).ok());
  const auto write = [&] {
    for (int k = 0; k < 200; ++k) EXPECT_TRUE(write_tuning(path_, kCpu, some_entries()).ok());
  };
  std::thread one(write), two(write);
  for (int k = 0; k < 400; ++k) EXPECT_TRUE(read_tuning(path_, kCpu).used);
  one.join();
  two.join();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(root_ + "/cache"), {}), 1) << "a temporary file stayed";
}

TEST_F(Tuning, EnvironmentNamesTheFile) {
  const std::string before = std::getenv("CUTLOSS_TUNING_FILE") ? std::getenv("CUTLOSS_TUNING_FILE") : "";
  setenv("CUTLOSS_TUNING_FILE", path_.c_str(), 1);
  EXPECT_EQ(tuning_path(kCpu), path_);
  ASSERT_TRUE(write_tuning(path_, this_cpu(), some_entries()).ok());
  EXPECT_EQ(Machine::detect()->tuning.size(), 3u);
  setenv("CUTLOSS_TUNING_FILE", "none", 1);
  EXPECT_EQ(tuning_path(kCpu), "");
  EXPECT_TRUE(Machine::detect()->tuning.empty());
  unsetenv("CUTLOSS_TUNING_FILE");
  setenv("XDG_CACHE_HOME", (root_ + "/xdg").c_str(), 1);
  EXPECT_TRUE(tuning_path(kCpu).starts_with(root_ + "/xdg/cutloss/tuning-"));
  EXPECT_NE(tuning_path(kCpu), tuning_path("another CPU"));
  setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_FALSE(tuning_path(kCpu).starts_with("relative"));
  unsetenv("XDG_CACHE_HOME");
  if (!before.empty()) setenv("CUTLOSS_TUNING_FILE", before.c_str(), 1);
}

TEST_F(Tuning, CpuModelIsOneLineOfTheFirstProcessor) {
  std::ofstream(root_ + "/x86") << "processor\t: 0\nvendor_id\t: A\ncpu family\t: 25\nmodel\t\t: 1\n"
                                   "model name\t: EP\tYC \nstepping\t: 2\n\nmodel name\t: other\n";
  EXPECT_EQ(cpu_model(root_ + "/x86"), "A, cpu family 25, model 1, stepping 2, EP YC ");
  std::ofstream(root_ + "/arm") << "processor\t: 0\nBogoMIPS\t: 50\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
  EXPECT_EQ(cpu_model(root_ + "/arm"), "CPU implementer 0x41, CPU part 0xd0c");
  EXPECT_EQ(cpu_model(root_ + "/none"), "unknown");
}

// ---------------------------------------------------------------------------------------------- in the planner

const std::string kTarget = available_targets().front();

Problem problem(std::int64_t n, std::int64_t v, std::int64_t d, bool d_c) {
  Problem p;
  p.tokens = n;
  p.vocab = v;
  p.hidden = d;
  p.want_d_e = true;
  p.want_d_c = d_c;
  return p;
}

Machine tuned_machine(const Problem& p, Mode mode, const Blocks& blocks) {
  Machine machine = testing::machine_for(kTarget);
  machine.tuning = {entry(kTarget, mode, p.hidden, blocks)};
  return machine;
}

TEST(TunedPlan, TakesTheSizesThatWereMeasuredForItsKindOnly) {
  const Problem p = problem(4096, 262144, 640, false);
  const std::int64_t rows = cpu::find_kernels(kTarget)->rows;
  const Machine machine = tuned_machine(p, Mode::stream, {256, 2 * rows, 64, 64, 64});
  const Plan plan = make_plan(p, {}, machine).value();
  EXPECT_TRUE(plan.tuned);
  EXPECT_EQ(plan.vocab_tile, 2 * rows);
  EXPECT_EQ(plan.token_block, 256);
  for (const auto change :
       {+[](Problem& q) { q.hidden = 641; }, +[](Problem& q) { q.c_dtype = DType::bf16; },
        +[](Problem& q) { q.head_layout = HeadLayout::dv; }, +[](Problem& q) { q.want_d_c = true; }}) {
    Problem other = p;
    change(other);
    EXPECT_FALSE(make_plan(other, {}, machine)->tuned);
    EXPECT_EQ(make_plan(other, {}, machine)->json(), make_plan(other, {}, testing::machine_for(kTarget))->json());
  }
}

TEST(TunedPlan, AnySizesGiveAPlanThatFitsItsBudget) {
  for (const bool d_c : {false, true}) {
    const Problem p = problem(4096, 100000, 320, d_c);
    for (const Mode mode : {Mode::stream, Mode::chunk, Mode::recompute}) {
      if (d_c == (mode == Mode::stream)) continue;
      for (const std::int64_t size : {std::int64_t{1}, std::int64_t{7}, std::int64_t{300}, std::int64_t{65536}}) {
        const Machine machine = tuned_machine(p, mode, {size, size, size, size, size});
        Limits limits{mode, {}, 0};
        ASSERT_TRUE(make_plan(p, limits, machine).ok());
        EXPECT_LE(make_plan(p, limits, machine)->workspace_bytes, std::uint64_t{512} << 20);
        std::int64_t chunk = 0;
        for (int shift = 18; shift <= 34; ++shift) {
          limits.budget_bytes = std::uint64_t{1} << shift;
          const Result<Plan> plan = make_plan(p, limits, machine);
          EXPECT_EQ(plan.ok(), make_plan(p, limits, testing::machine_for(kTarget)).ok()) << "tuning refused a budget";
          if (!plan.ok()) continue;
          EXPECT_LE(plan->workspace_bytes, *limits.budget_bytes);
          EXPECT_EQ(plan->workspace_bytes, map_workspace(plan.value(), nullptr).bytes);
          EXPECT_GE(plan->chunk_tokens, chunk) << "the chunk fell as the budget grew";
          chunk = plan->chunk_tokens;
        }
      }
    }
  }
}

TEST(TunedPlan, SizesNoFileCouldHoldAreNotUsed) {
  const Problem p = problem(64, 1000, 64, false);
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{-5}, std::int64_t{1} << 40}) {
    EXPECT_FALSE(make_plan(p, {}, tuned_machine(p, Mode::stream, {size, 96, 64, 64, 64}))->tuned);
  }
}

TEST(TunedPlan, BitsDoNotDependOnThreads) {
  for (const Mode mode : {Mode::stream, Mode::chunk, Mode::recompute}) {
    testing::Case test = testing::Case::random(150, 900, 40, 3);
    test.problem.want_d_e = true;
    test.problem.want_d_c = mode != Mode::stream;
    std::vector<float> first_e, first_c;
    for (const int threads : {1, 2, 3}) {
      Machine machine = tuned_machine(test.problem, mode, {48, 30, 64, 32, 100});
      machine.threads = threads;
      const Limits limits{mode, {}, threads};
      const Plan plan = make_plan(test.problem, limits, machine).value();
      ASSERT_TRUE(plan.tuned);
      std::vector<float> d_e(150 * 40), d_c(900 * 40);
      float loss = 0;
      Outputs out;
      out.loss = &loss;
      out.d_e = d_e.data();
      if (test.problem.want_d_c) out.d_c = d_c.data();
      const Status status = run(plan, test.inputs(), out);
      ASSERT_TRUE(status.ok()) << status.message();
      if (threads == 1) {
        first_e = d_e;
        first_c = d_c;
      }
      EXPECT_EQ(d_e, first_e) << name(mode) << threads;
      EXPECT_EQ(d_c, first_c) << name(mode) << threads;
    }
  }
}

}  // namespace
}  // namespace cutloss
