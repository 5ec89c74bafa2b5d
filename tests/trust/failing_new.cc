#include "tests/trust/failing_new.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

using namespace cutloss::testing;

void* allocate(std::size_t size, std::size_t alignment) {
  if (armed) {
    const std::int64_t at = count++;
    if (at >= fails_from && at < fails_until) return nullptr;
  }
  void* const memory = alignment <= alignof(std::max_align_t)
                           ? std::malloc(size == 0 ? 1 : size)
                           : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) return nullptr;
  ++live;
  const std::int64_t bytes = live_bytes += static_cast<std::int64_t>(malloc_usable_size(memory));
  for (std::int64_t most = most_bytes; bytes > most && !most_bytes.compare_exchange_weak(most, bytes);) continue;
  return memory;
}

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  if (void* const memory = allocate(size, alignment)) return memory;
  throw std::bad_alloc();
}

void release(void* memory) {
  if (memory == nullptr) return;
  --live;
  live_bytes -= static_cast<std::int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

constexpr std::size_t kPlain = alignof(std::max_align_t);

}  // namespace

void* operator new(std::size_t size) { return allocate_or_throw(size, kPlain); }
void* operator new[](std::size_t size) { return allocate_or_throw(size, kPlain); }
void* operator new(std::size_t size, std::align_val_t a) { return allocate_or_throw(size, std::size_t(a)); }
void* operator new[](std::size_t size, std::align_val_t a) { return allocate_or_throw(size, std::size_t(a)); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, kPlain); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, kPlain); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }

namespace cutloss::testing {
namespace {

Outcome with_failures(std::int64_t from, std::int64_t until, const std::function<Outcome()>& call) {
  count = 0;
  fails_from = from;
  fails_until = until;
  armed = true;
  const Outcome outcome = call();
  armed = false;
  return outcome;
}

}  // namespace

Outcome outcome_of(const Status& status, StatusCode expected) {
  if (status.code() == expected) return expected == StatusCode::ok ? Outcome::ok : Outcome::expected_error;
  return status.code() == StatusCode::out_of_memory ? Outcome::out_of_memory : Outcome::wrong;
}

Outcome outcome_of(cutloss_status status, cutloss_status expected) {
  if (status != CUTLOSS_OK && *cutloss_last_error() == 0) return Outcome::wrong;
  if (status == expected) return expected == CUTLOSS_OK ? Outcome::ok : Outcome::expected_error;
  return status == CUTLOSS_OUT_OF_MEMORY ? Outcome::out_of_memory : Outcome::wrong;
}

std::int64_t fail_each(const std::function<Outcome()>& call, const std::function<void(bool)>& check) {
  EXPECT_NE(with_failures(-1, -1, call), Outcome::wrong);
  const std::int64_t allocations = count;
  check(true);
  std::int64_t refused = 0;
  for (std::int64_t k = 0; k < allocations; ++k) {
    for (const std::int64_t until : {k + 1, std::int64_t{1} << 60}) {
      const std::int64_t before = live;
      const Outcome outcome = with_failures(k, until, call);
      EXPECT_EQ(live, before) << "leaked; allocation " << k << " of " << allocations;
      EXPECT_NE(outcome, Outcome::wrong) << "allocation " << k << " of " << allocations;
      refused += outcome == Outcome::out_of_memory;
      check(outcome != Outcome::out_of_memory);
    }
  }
  const Outcome again = with_failures(-1, -1, call);
  EXPECT_TRUE(again == Outcome::ok || again == Outcome::expected_error);
  check(true);
  if (allocations > 0) {
    EXPECT_GT(refused, 0);
  }
  return allocations;
}

Machine machine() {
  Machine m;
  m.target = available_targets().front();
  m.threads = 3;
  return m;
}

}  // namespace cutloss::testing
