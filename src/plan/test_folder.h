// For tests: a folder of their own, gone with them.
#ifndef CUTLOSS_SRC_PLAN_TEST_FOLDER_H_
#define CUTLOSS_SRC_PLAN_TEST_FOLDER_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace cutloss::testing {

class InFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "cutloss-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override {
    if (!root_.empty()) std::filesystem::remove_all(root_);
  }

  void write(const std::string& path, const std::string& content) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << content;
  }

  std::string root_;
};

}  // namespace cutloss::testing

#endif  // CUTLOSS_SRC_PLAN_TEST_FOLDER_H_
