// Addresses that are no multiple of an element's size, which vectors and some CPUs would trap on.
#include "tests/buffers.h"
#include "tests/fixtures.h"

namespace cutloss {
namespace {

using testing::Objective;
using testing::Results;

Objective with_everything(bool soft) {
  Objective f = testing::fixture(7, 11, 5, DType::bf16, DType::f16);
  testing::add_bias(f, DType::bf16);
  Problem& p = f.problem;
  p.soft_targets = soft ? 2 : 0;
  p.token_weights = p.lse_cotangent = p.vocab_order = true;
  p.class_weights = !soft;
  p.metrics = {true, true, true, 2, true};
  f.token_weights.assign(7, 1.0f), f.class_weights.assign(11, 1.0f), f.lse_cotangent.assign(7, 1.0f);
  f.soft_ids.assign(14, 1), f.soft_probabilities.assign(14, 0.5f);
  for (std::int64_t v = 0; v < 11; ++v) f.order.push_back(v);
  return f;
}

TEST(Alignment, AnAddressBetweenTwoElementsIsRead) {
  for (const bool soft : {false, true}) {
    Objective f = with_everything(soft);
    const Plan plan = testing::plan_in(f.problem, Mode::chunk, available_targets()[0]).value();
    Results results(f.problem);
    Inputs in = f.inputs();
    Outputs out = results.outputs();
    ASSERT_TRUE(run(plan, in, out).ok()) << run(plan, in, out).message();
    std::vector<testing::Place> places = testing::places_of(f.problem, in);
    places.push_back(testing::place("e", in.e, 35, 2));
    places.push_back(testing::place("c", in.c, 55, 2));
    for (testing::Place& place : testing::places_of(f.problem, out)) places.push_back(place);
    int checked = 0;
    for (const testing::Place& place : places) {
      void* const at = const_cast<void*>(place.get());
      if (at == nullptr || place.item == 1) continue;
      place.set(static_cast<char*>(at) + place.item / 2);
      EXPECT_EQ(run(plan, in, out).message(),
                std::string(place.name) + " is at an address that is no multiple of " + std::to_string(place.item) +
                    ", the size of its elements; copy it to one that is");
      place.set(at);
      ++checked;
    }
    EXPECT_GT(checked, 15);
    EXPECT_TRUE(run(plan, in, out).ok());
  }
}

}  // namespace
}  // namespace cutloss
