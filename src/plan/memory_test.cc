#include "src/plan/memory.h"

#include <gtest/gtest.h>

#include "src/cpu/test_problem.h"
#include "src/plan/test_folder.h"

namespace cutloss {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

class Memory : public testing::InFolder {
 protected:
  void SetUp() override {
    InFolder::SetUp();
    write("/meminfo", "MemTotal:       65536000 kB\nMemFree:  100 kB\nMemAvailable:   33554432 kB\n");  // 32 GiB
  }

  std::optional<std::uint64_t> left(std::optional<std::uint64_t> address_space = {}) {
    return available_memory(root_ + "/fs", root_ + "/membership", root_ + "/meminfo", address_space);
  }
};

TEST_F(Memory, WithoutLimitsTheHostsIsAvailable) { EXPECT_EQ(left(), 32 * kGiB); }

TEST_F(Memory, TightestCgroupMinusItsUseWins) {
  write("/membership", "0::/outer/inner\n");
  write("/fs/outer/memory.max", "2147483648\n");
  write("/fs/outer/memory.current", "1610612736\n");
  write("/fs/outer/inner/memory.max", "1073741824\n");
  write("/fs/outer/inner/memory.current", "1073741\n");
  EXPECT_EQ(left(), kGiB / 2);
}

TEST_F(Memory, PageCacheIsNotUse) {
  write("/membership", "0::/job\n");
  write("/fs/job/memory.max", "1073741824\n");
  write("/fs/job/memory.current", "1073741824\n");
  write("/fs/job/memory.stat", "anon 1000\nactive_file 7\ninactive_file 805306368\n");
  EXPECT_EQ(left(), 3 * kGiB / 4);
}

TEST_F(Memory, ReadsVersion1AndItsWordForNoLimit) {
  write("/membership", "5:memory:/job\n0::/other\n");
  write("/fs/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("/fs/memory/memory.usage_in_bytes", "123\n");
  EXPECT_EQ(left(), 32 * kGiB);
  write("/fs/memory/job/memory.limit_in_bytes", "1073741824\n");
  write("/fs/memory/job/memory.usage_in_bytes", "536870912\n");
  EXPECT_EQ(left(), kGiB / 2);
}

TEST_F(Memory, NothingLeftIsZeroAndNotUnknown) {
  write("/membership", "0::/job\n");
  write("/fs/job/memory.max", "0\n");
  write("/fs/job/memory.current", "4096\n");
  EXPECT_EQ(left(), 0u);
  EXPECT_EQ(left(kGiB), 0u);
}

TEST_F(Memory, UnlimitedUnreadableAndMalformedAreNoLimit) {
  write("/membership", "0::/job\nnonsense\n");
  for (const char* content : {"max", "", "-1", "1e9", "words", "99999999999999999999999"}) {
    write("/fs/job/memory.max", content);
    EXPECT_EQ(left(), 32 * kGiB) << content;
  }
  write("/meminfo", "MemAvailable: lots\n");
  EXPECT_EQ(left(), std::nullopt);
  std::filesystem::remove(root_ + "/meminfo");
  EXPECT_EQ(left(), std::nullopt);
}

TEST_F(Memory, AddressSpaceIsALimitToo) { EXPECT_EQ(left(kGiB), kGiB); }

// 512 MiB of logits by default, where a container has 64 MiB left.
TEST(SpareMemory, ChunksWithoutABudgetHeedIt) {
  Problem p;
  p.tokens = 4096;
  p.vocab = 262144;
  p.hidden = 64;
  p.want_d_e = p.want_d_c = true;
  Machine machine = testing::machine_for(available_targets().front());
  EXPECT_GT(make_plan(p, {}, machine)->workspace_bytes, std::uint64_t{256} << 20);
  machine.spare_bytes = 64 << 20;
  EXPECT_LE(make_plan(p, {}, machine)->workspace_bytes, std::uint64_t{64} << 20);
  machine.spare_bytes = 0;
  EXPECT_EQ(make_plan(p, {}, machine)->mode, Mode::recompute);
  // A budget is the caller's word against ours.
  EXPECT_GT(make_plan(p, Limits{Mode::automatic, kGiB, 0}, machine)->workspace_bytes, std::uint64_t{256} << 20);
}

}  // namespace
}  // namespace cutloss
