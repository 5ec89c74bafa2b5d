#include "src/plan/quota.h"

#include <gtest/gtest.h>

#include "src/plan/test_folder.h"

namespace cutloss {
namespace {

class Quota : public testing::InFolder {
 protected:
  int quota() { return cpu_quota(root_ + "/fs", root_ + "/membership"); }
};

TEST_F(Quota, RoundsAVersion2LimitDown) {
  write("/membership", "0::/job\n");
  write("/fs/job/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota(), 1);
}

TEST_F(Quota, TightestAncestorWins) {
  write("/membership", "0::/outer/inner\n");
  write("/fs/cpu.max", "max 100000\n");
  write("/fs/outer/cpu.max", "200000 100000\n");
  write("/fs/outer/inner/cpu.max", "800000 100000\n");
  EXPECT_EQ(quota(), 2);
}

TEST_F(Quota, ReadsVersion1) {
  write("/membership", "7:cpu,cpuacct:/job\n3:memory:/job\n");
  write("/fs/cpu/job/cpu.cfs_quota_us", "300000\n");
  write("/fs/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), 3);
}

TEST_F(Quota, LessThanOneCpuIsStillOneThread) {
  write("/membership", "0::/\n");
  write("/fs/cpu.max", "50000 100000\n");
  EXPECT_EQ(quota(), 1);
}

TEST_F(Quota, UnlimitedMissingAndMalformedAreNoLimit) {
  EXPECT_EQ(quota(), 0);
  write("/membership", "0::/job\nnonsense\n");
  EXPECT_EQ(quota(), 0);
  for (const char* content : {"max 100000", "", "-1 100000", "100000 0", "words words"}) {
    write("/fs/job/cpu.max", content);
    EXPECT_EQ(quota(), 0) << content;
  }
}

}  // namespace
}  // namespace cutloss
