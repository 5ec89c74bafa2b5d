// Memory that two arguments share, where only the C interface sees it: reports, orders, parts of a vocabulary.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "cutloss/cutloss.h"

namespace {

struct Call {
  std::vector<float> e = std::vector<float>(12 * 4, 0.5f), c = std::vector<float>(40 * 4, 0.25f), d_e = e;
  std::vector<std::int64_t> labels = std::vector<std::int64_t>(12, 1), order = std::vector<std::int64_t>(40);
  std::vector<std::int64_t> workspace;
  cutloss_problem problem;
  cutloss_plan* plan = nullptr;
  cutloss_inputs in;
  cutloss_outputs out;
  cutloss_filter_report report;

  Call() {
    cutloss_problem_init(&problem);
    problem.tokens = 12, problem.vocab = 40, problem.hidden = 4;
    problem.want_d_e = 1;
    problem.filter = CUTLOSS_FILTER_CERTIFIED;
    problem.epsilon = 0.001f;
    EXPECT_EQ(cutloss_make_plan(&problem, nullptr, &plan), CUTLOSS_OK) << cutloss_last_error();
    workspace.resize(cutloss_plan_workspace_bytes(plan) / 8 + 1);
    cutloss_inputs_init(&in);
    in.e = e.data(), in.c = c.data(), in.labels = labels.data();
    cutloss_outputs_init(&out);
    out.d_e = d_e.data();
    cutloss_filter_report_init(&report);
    out.filter_report = &report;
  }
  ~Call() { cutloss_plan_free(plan); }

  std::string run() {
    const auto status = cutloss_run(plan, &in, &out, workspace.data(), workspace.size() * 8, nullptr);
    return status == CUTLOSS_OK ? "" : cutloss_last_error();
  }
  std::string learn(std::int64_t* to) {
    return cutloss_learn_vocab_order(&problem, &in, to) == CUTLOSS_OK ? "" : cutloss_last_error();
  }
};

// The library fills a report of its own and copies it out at the end, over whatever is there.
TEST(COverlap, AReportIsWrittenOverAnArray) {
  Call call;
  EXPECT_EQ(call.run(), "");
  const auto report_in = [&](void* memory) {
    const cutloss_filter_report blank = call.report;
    std::byte before[sizeof blank];
    std::memcpy(before, memory, sizeof blank);
    std::memcpy(memory, &blank, sizeof blank);
    call.out.filter_report = static_cast<cutloss_filter_report*>(memory);
    const std::string said = call.run();
    EXPECT_EQ(std::memcmp(memory, &blank, sizeof blank), 0) << "written before the check";
    std::memcpy(memory, before, sizeof blank);
    return said;
  };
  EXPECT_EQ(report_in(call.d_e.data() + 2), "d_e and filter_report overlap in memory");
  EXPECT_EQ(report_in(call.c.data() + 4), "c and filter_report overlap in memory");
  EXPECT_EQ(report_in(call.labels.data() + 1), "labels and filter_report overlap in memory");
  EXPECT_EQ(report_in(call.workspace.data()), "filter_report and workspace overlap in memory");
  EXPECT_EQ(report_in(reinterpret_cast<char*>(call.order.data()) + 4),
            "filter_report is at an address that is no multiple of 8, the size of its elements; copy it to one that is");
  // The last byte of what a report says to be its size counts, and none behind it.
  std::vector<std::int64_t> memory(20);
  auto* report = reinterpret_cast<cutloss_filter_report*>(memory.data());
  report->size = 24;
  call.out.filter_report = report;
  call.out.valid_count = memory.data() + 2;
  EXPECT_EQ(call.run(), "valid_count and filter_report overlap in memory");
  call.out.valid_count = memory.data() + 3;
  EXPECT_EQ(call.run(), "");
}

TEST(COverlap, AnOrderIsWrittenOverAnArray) {
  Call call;
  EXPECT_EQ(call.learn(call.order.data()), "");
  std::vector<std::int64_t> large(200, 1);
  call.in.labels = large.data() + 39;
  EXPECT_EQ(call.learn(large.data()), "labels and order overlap in memory");
  EXPECT_TRUE(std::count(large.begin(), large.end(), 1) == 200) << "written before the check";
  call.in.labels = large.data() + 40;
  EXPECT_EQ(call.learn(large.data()), "");
  call.in.c = large.data() + 1;
  EXPECT_EQ(call.learn(large.data()), "c and order overlap in memory");
  EXPECT_EQ(call.learn(reinterpret_cast<std::int64_t*>(reinterpret_cast<char*>(call.order.data()) + 4)),
            "order is at an address that is no multiple of 8, the size of its elements; copy it to one that is");
}

TEST(COverlap, PartsOfAVocabularyAreJoinedOverAnArray) {
  std::vector<float> x(64, 1.0f);
  float *max = x.data(), *sum = max + 6, *target = max + 12, *lse = max + 18, *nll = max + 21;
  std::fill_n(target + 3, 3, -INFINITY);
  const auto combine = [&](float* to_lse, float* to_nll) {
    const auto status = cutloss_combine_shards(2, 3, max, sum, target, to_lse, to_nll);
    return status == CUTLOSS_OK ? std::string() : std::string(cutloss_last_error());
  };
  EXPECT_EQ(combine(lse, nll), "");
  EXPECT_EQ(combine(lse, lse), "lse and nll overlap in memory");
  EXPECT_EQ(combine(lse, lse + 2), "lse and nll overlap in memory");
  EXPECT_EQ(combine(max, nll), "max and lse overlap in memory");
  EXPECT_EQ(combine(lse, sum + 5), "sum and nll overlap in memory");
  EXPECT_EQ(combine(target + 3, nullptr), "target_logit and lse overlap in memory");
  EXPECT_EQ(combine(nullptr, nullptr), "");
  EXPECT_EQ(combine(lse, reinterpret_cast<float*>(reinterpret_cast<char*>(nll) + 2)),
            "nll is at an address that is no multiple of 4, the size of its elements; copy it to one that is");
}

}  // namespace
