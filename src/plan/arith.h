#ifndef CUTLOSS_SRC_PLAN_ARITH_H_
#define CUTLOSS_SRC_PLAN_ARITH_H_

#include <cstdint>

namespace cutloss {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_ARITH_H_
