// Which sanitizers a test runs under: some reserve memory and threads, take locks over a fork, or cost more than what
// is measured.
#ifndef CUTLOSS_TESTS_SANITIZERS_H_
#define CUTLOSS_TESTS_SANITIZERS_H_

#if defined(__has_feature)  // clang
#if __has_feature(address_sanitizer)
#define CUTLOSS_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define CUTLOSS_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define CUTLOSS_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define CUTLOSS_TSAN 1
#endif

namespace cutloss::testing {

#if defined(CUTLOSS_ASAN) || defined(CUTLOSS_TSAN)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace cutloss::testing

#endif  // CUTLOSS_TESTS_SANITIZERS_H_
