// Allocations that fail on demand, and what is held: in a program of its own, whose operator new failing_new.cc
// replaces.
#ifndef CUTLOSS_TESTS_TRUST_FAILING_NEW_H_
#define CUTLOSS_TESTS_TRUST_FAILING_NEW_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "cutloss/cutloss.h"
#include "cutloss/cutloss.hpp"

namespace cutloss::testing {

inline std::atomic<bool> armed{false};
inline std::atomic<std::int64_t> count{0};         // allocations since arm()
inline std::atomic<std::int64_t> fails_from{-1};   // the first of them that fails; -1: none
inline std::atomic<std::int64_t> fails_until{-1};  // and the one behind the last
inline std::atomic<std::int64_t> live{0};
inline std::atomic<std::int64_t> live_bytes{0}, most_bytes{0};  // most_bytes: since it was set

enum class Outcome { ok, expected_error, out_of_memory, wrong };

Outcome outcome_of(const Status& status, StatusCode expected = StatusCode::ok);
Outcome outcome_of(cutloss_status status, cutloss_status expected = CUTLOSS_OK);

// Fails allocation k alone, and k with all that follow, for every k. call() makes one call of the library; check(ok)
// looks at what it left, ok: whether it did its work. Returns the number of allocations.
std::int64_t fail_each(
    const std::function<Outcome()>& call, const std::function<void(bool)>& check = [](bool) {});

Machine machine();

}  // namespace cutloss::testing

#endif  // CUTLOSS_TESTS_TRUST_FAILING_NEW_H_
