// What a host program may do to the process: forbid threads, limit its memory.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "tests/fixtures.h"
#include "tests/sanitizers.h"

namespace cutloss {
namespace {

using testing::kSanitized;
using testing::Objective;
using testing::Results;

// The exit status of a child that runs `body`; -1 for one that does not end by itself in 60 seconds.
template <typename Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

float loss_of(const Objective& f, int threads) {
  const Result<Plan> plan = testing::plan_in(f.problem, Mode::automatic, available_targets()[0], {}, threads);
  const Results got = testing::run_planned(f, plan.value());
  return got.status.ok() ? got.loss.get(0) : -1.0f;
}

// Root may start threads past its limit, so the child becomes somebody else.
TEST(Process, AThreadLimitEndsTheProcess) {
  if (kSanitized || geteuid() != 0) GTEST_SKIP() << "needs to change its user";
  const Objective f = testing::fixture(300, 3000, 16);  // worth two threads
  const float want = loss_of(f, 2);
  const int status = in_child([&] {
    const rlimit one{1, 1};
    if (setresgid(65533, 65533, 65533) != 0 || setresuid(65533, 65533, 65533) != 0) return 2;
    if (setrlimit(RLIMIT_NPROC, &one) != 0) return 2;
    try {
      std::thread([] {}).join();
      return 3;  // threads can be had after all: nothing is tested
    } catch (const std::system_error&) {
    }
    return loss_of(f, 8) == want ? 0 : 1;
  });
  if (status == 2 || status == 3) GTEST_SKIP() << "no such limit here";
  EXPECT_EQ(status, 0);
}

std::int64_t address_space() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// With the workspace the plan names and 4 MiB more. All f32 logits of the test below would be 64 MiB.
int run_within_plan(const Objective& f, const Plan& plan) {
  Results results(f.problem);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  const auto executor = make_thread_executor(1);  // another thread would reserve 64 MiB more to allocate in
  const rlim_t limit = static_cast<rlim_t>(address_space() + (std::int64_t{4} << 20));
  const rlimit most{limit, limit};
  if (setrlimit(RLIMIT_AS, &most) != 0) return 2;
  return run(plan, f.inputs(), results.outputs(), workspace, executor.get()).ok() ? 0 : 1;
}

TEST(Process, MemoryIsTakenBesideThePlannedWorkspace) {
  if (kSanitized) GTEST_SKIP() << "an address space of its own";
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const bool d_c : {false, true}) {
      Objective f = testing::fixture(512, 32768, 2, dtype, dtype);
      f.problem.want_d_c = d_c;
      f.problem.softcap = 20.0f;
      for (const Mode mode : testing::modes_of(f.problem)) {
        const Plan plan = testing::plan_in(f.problem, mode, available_targets()[0], std::uint64_t{16} << 20, 1).value();
        Objective g = f;
        g.problem = plan.problem;
        EXPECT_EQ(in_child([&] { return run_within_plan(g, plan); }), 0) << name(mode) << " " << name(dtype);
      }
    }
  }
}

std::int64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib << 10;
  }
  return 0;
}

// Peak resident memory of a call above what was there before it, inputs and outputs being touched already.
std::int64_t measure(const Objective& f, const Plan& plan) {
  Results results(f.problem);
  std::ofstream("/proc/self/clear_refs") << 5;
  const std::int64_t before = peak_bytes();
  if (!run(plan, f.inputs(), results.outputs()).ok()) return -1;
  return peak_bytes() - before;
}

// bf16 tokens against 262144 ids: 4 GiB of f32 logits.
TEST(Process, LongF32CopiesOfTheLogitsAreKept) {
  if (kSanitized) GTEST_SKIP() << "takes more";
  Objective f = testing::fixture(4096, 262144, 64, DType::bf16, DType::bf16);
  for (const bool d_c : {false, true}) {
    f.problem.want_d_c = d_c;
    const Plan plan = make_plan(f.problem, {}, Machine::detect().value()).value();
    const std::int64_t extra = measure(f, plan);
    EXPECT_GE(extra, 0);
    EXPECT_LT(extra, std::int64_t{512} << 20);
    EXPECT_LE(extra, static_cast<std::int64_t>(plan.workspace_bytes) + (std::int64_t{8} << 20));
  }
}

// dC of this table is 256 MiB.
TEST(Process, LongAFrozenHeadCostsItsGradient) {
  if (kSanitized) GTEST_SKIP() << "takes more";
  Objective f = testing::fixture(128, 262144, 256);
  f.problem.want_d_c = false;
  for (const bool d_e : {true, false}) {
    f.problem.want_d_e = d_e;
    const Plan plan = make_plan(f.problem, {}, Machine::detect().value()).value();
    EXPECT_LT(measure(f, plan), std::int64_t{64} << 20) << d_e;
  }
}

}  // namespace
}  // namespace cutloss
