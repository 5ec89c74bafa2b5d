// What a host with threads, forks and floating-point settings of its own may rely on.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "cutloss/cutloss.h"
#include "src/cpu/objective_draw.h"
#include "tests/sanitizers.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace cutloss {
namespace {

// A problem with its plan, and the bits of its answer.
struct Call {
  // other_terms: a bias, softcap, soft targets and compensated sums in place of smoothing.
  Call(Mode mode, Filter filter, unsigned seed, bool other_terms = false) {
    testing::Draw draw(seed);
    testing::Objective& o = test.objective;
    Problem& p = o.problem;
    p.tokens = 90;
    p.vocab = 300;
    p.hidden = 17;
    p.e_dtype = p.c_dtype = mode == Mode::chunk ? DType::f16 : DType::f32;
    p.d_c_dtype = mode == Mode::chunk ? DType::f32 : DType::bf16;  // bf16 would hide how its operands were rounded
    p.logit_scale = 0.7f;
    p.filter = filter;
    if (filter == Filter::tile) p.epsilon = 1e-3f;
    if (filter == Filter::certified || filter == Filter::unbiased) p.tolerance = 1e-2f;
    if (filter == Filter::none) p.label_smoothing = 0.1f;
    p.want_d_e = mode != Mode::loss;
    p.want_d_c = mode != Mode::loss && mode != Mode::stream;
    if (other_terms) {
      p.label_smoothing = 0;
      p.soft_targets = 3;
      p.softcap = 5.0f;
      p.bias_dtype = DType::f32;
      p.want_d_bias = p.want_d_c;
      p.compensated = true;
    }
    p.metrics = {true, true, true, 4, true};
    p.token_weights = true;
    testing::internal::draw_targets(draw, o);
    testing::internal::draw_values(draw, 3.0f, 0.0f, o);
    Limits limits;
    limits.mode = mode;
    limits.threads = 3;
    Machine machine = testing::machine_for(available_targets().front(), 3);
    machine.tuning = {{machine.target, Mode::chunk, p.hidden, p.c_dtype, p.head_layout, {32, 32, 32, 32, 32}}};
    plan = make_plan(p, limits, machine).value();
    EXPECT_TRUE(mode != Mode::chunk || plan.chunk_tokens < p.tokens) << "one chunk: nothing is summed over chunks";
    want = bits();
  }

  std::string bits(Executor* executor = nullptr) const {
    testing::Results results(test.objective.problem);
    const Status status = run(plan, test.objective.inputs(), results.outputs(), executor);
    if (!status.ok()) return status.message();
    std::string all;
    for (testing::Buffer* b : {&results.loss, &results.nll, &results.lse, &results.d_e, &results.d_c, &results.d_bias,
                               &results.entropy, &results.mean_logits, &results.top_logprobs}) {
      all.append(static_cast<const char*>(b->at(0)), static_cast<const char*>(b->at(b->size())));
    }
    all.append(reinterpret_cast<const char*>(results.rank.data()), results.rank.size() * 8);
    return all;
  }

  testing::DrawnCase test;
  Plan plan;
  std::string want;
};

std::vector<Call> calls() {
  std::vector<Call> all;
  all.emplace_back(Mode::stream, Filter::none, 1);
  all.emplace_back(Mode::chunk, Filter::none, 2);
  all.emplace_back(Mode::recompute, Filter::none, 3);
  all.emplace_back(Mode::automatic, Filter::certified, 4);
  all.emplace_back(Mode::automatic, Filter::unbiased, 5);
  all.emplace_back(Mode::automatic, Filter::tile, 6);
  all.emplace_back(Mode::loss, Filter::none, 7);
  for (const Mode mode : {Mode::loss, Mode::stream, Mode::chunk, Mode::recompute}) {
    all.emplace_back(mode, Filter::none, 8, true);
  }
  for (const Filter filter : {Filter::certified, Filter::unbiased, Filter::tile}) {
    all.emplace_back(Mode::automatic, filter, 9, true);
  }
  return all;
}

// All of the API but run(), for its side effects; whether it all went as it should.
bool call_the_rest(const Call& call) {
  const Problem& p = call.test.objective.problem;
  const Result<Machine> machine = Machine::detect();
  if (!machine.ok() || !make_plan(p, {}, machine.value()).ok() || call.plan.json().empty()) return false;
  Limits limits;
  limits.budget_bytes = 1 << 22;
  if (!max_tokens(p, limits, machine.value()).ok()) return false;
  Problem bad = p;
  bad.softcap = std::numeric_limits<float>::quiet_NaN();
  if (validate(bad).ok()) return false;
  std::vector<std::int64_t> order(static_cast<std::size_t>(p.vocab));
  if (!learn_vocab_order(p, call.test.objective.inputs(), order.data()).ok()) return false;
  const float max[] = {1e30f, 1}, sum[] = {1e-30f, 3}, target[] = {-INFINITY, 0.1f};
  float lse = 0, nll = 0;
  if (cutloss_combine_shards(2, 1, max, sum, target, &lse, &nll) != CUTLOSS_OK) return false;
  return cutloss_combine_shards(0, 1, max, sum, target, &lse, &nll) == CUTLOSS_INVALID_ARGUMENT &&
         std::string(cutloss_last_error()) == "shards is 0; it must be 1 or more";
}

// ------------------------------------------------------------------------------------------------------- threads

TEST(Threads, CallsAtTheSameTimeDisturbEachOther) {
  const std::vector<Call> all = calls();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const Call& call = all[(i + t) % all.size()];  // two or more threads at the same one
        wrong += call.bits() != call.want;
      }
      wrong += !call_the_rest(all[t % all.size()]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Threads, AnErrorIsToldToAnotherThread) {
  float x = 1;
  ASSERT_EQ(cutloss_combine_shards(0, 1, &x, &x, &x, nullptr, nullptr), CUTLOSS_INVALID_ARGUMENT);
  std::thread([] { EXPECT_STREQ(cutloss_last_error(), ""); }).join();
  EXPECT_STREQ(cutloss_last_error(), "shards is 0; it must be 1 or more");
}

std::int64_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(Threads, AThreadOutlivesACall) {
  if (!std::filesystem::exists("/proc/self/task")) GTEST_SKIP() << "no /proc";
  const std::vector<Call> all = calls();
  const std::int64_t before = threads_of_this_process();
  for (const Call& call : all) {
    EXPECT_EQ(call.bits(), call.want);
    EXPECT_TRUE(call_the_rest(call));
  }
  // A thread that has been joined may be listed for a moment more.
  for (int wait = 0; wait < 200 && threads_of_this_process() != before; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(threads_of_this_process(), before);
}

// ---------------------------------------------------------------------------------------------------------- fork

#if !defined(CUTLOSS_TSAN)  // which can neither follow threads into a child nor start any there
// Runs `body` in a child of its own; its result, or -1 if it did not end in 60 s.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(Fork, AChildHangsOrErrs) {
  const std::vector<Call> all = calls();  // every path has run once in the parent
  const auto work = [&] {
    for (const Call& call : all) {
      if (call.bits() != call.want) return 1;
      if (!call_the_rest(call)) return 2;
    }
    return 0;
  };
  EXPECT_EQ(in_child(work), 0);
  EXPECT_EQ(work(), 0) << "the parent, afterwards";
  EXPECT_EQ(in_child([&] { return in_child(work); }), 0) << "a grandchild";
}

// A thread that is in AddressSanitizer's allocator at the fork leaves a lock of it held in the child (GCC 12).
#if !defined(CUTLOSS_ASAN)
TEST(Fork, AChildOfAProcessThatIsInTheMidstOfCallsHangs) {
  const std::vector<Call> all = calls();
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> busy;
  for (std::size_t t = 0; t < 3; ++t) {
    busy.emplace_back([&, t] {
      for (std::size_t i = t; !stop; ++i) wrong += all[i % all.size()].bits() != all[i % all.size()].want;
    });
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(in_child([&] {
                const Call& call = all[static_cast<std::size_t>(i) % all.size()];
                return call.bits() == call.want ? 0 : 1;
              }),
              0);
  }
  stop = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_EQ(wrong, 0);
}
#endif
#endif

// ---------------------------------------------------------------------------------- floating-point environment

#if defined(__SSE__)
constexpr unsigned kDefault = 0x1F80;
// Each rounding mode; flushing of results and inputs; flags that are up; traps that would end the process.
constexpr unsigned kHosts[] = {kDefault,          kDefault | 0x2000, kDefault | 0x4000,       kDefault | 0x6000,
                               kDefault | 0x8040, kDefault | 0x003F, 0x0000 /* every trap */, 0x0000 | 0x6000};

struct WithHost {
  explicit WithHost(unsigned csr) {
    std::fegetenv(&before);
    // Rounding of the x87 unit, too, which the C library's formatting reads.
    std::fesetround((csr & 0x6000) == 0x2000   ? FE_DOWNWARD
                    : (csr & 0x6000) == 0x4000 ? FE_UPWARD
                    : (csr & 0x6000) == 0x6000 ? FE_TOWARDZERO
                                               : FE_TONEAREST);
    _mm_setcsr(csr);
  }
  ~WithHost() { std::fesetenv(&before); }
  std::fenv_t before;
};

// The whole environment, x87 included.
std::string environment() {
  std::fenv_t now;
  std::memset(&now, 0, sizeof now);
  std::fegetenv(&now);
  return std::string(reinterpret_cast<const char*>(&now), sizeof now) + std::to_string(_mm_getcsr());
}

TEST(FloatEnvironment, OfTheCallerIsUsedOrChanged) {
  const std::vector<Call> all = calls();
  const std::string json = all[0].plan.json();
  for (const unsigned csr : kHosts) {
    for (const Call& call : all) {
      std::string got, before, after, after_rest, text;
      bool rest = false;
      {
        const WithHost host(csr);
        before = environment();
        got = call.bits();
        after = environment();
        rest = &call != &all[csr % all.size()] || call_the_rest(call);
        after_rest = environment();
        text = all[0].plan.json();
      }
      EXPECT_TRUE(got == call.want) << "other bits with MXCSR " << std::hex << csr;
      EXPECT_TRUE(before == after) << "run changed it; MXCSR " << std::hex << csr;
      EXPECT_TRUE(rest) << "MXCSR " << std::hex << csr;
      EXPECT_TRUE(before == after_rest) << "planning or another call changed it; MXCSR " << std::hex << csr;
      EXPECT_EQ(text, json);
    }
  }
}

// Threads of a host's pool round as they like: that is theirs, before and after each task, and changes no bit.
class OddThreads final : public Executor {
 public:
  explicit OddThreads(unsigned csr) : csr_(csr) {}
  int concurrency() const override { return 3; }
  void parallel_for(std::int64_t tasks, const Body& body) override {
    std::atomic<std::int64_t> next{0};
    const auto work = [&](int worker) {
      const WithHost host(csr_);
      const std::string before = environment();
      for (std::int64_t task; (task = next++) < tasks;) {
        body(task, worker);
        if (environment() != before) ++changed;
      }
    };
    std::thread second(work, 1), third(work, 2);
    work(0);
    second.join();
    third.join();
  }
  std::atomic<int> changed{0};

 private:
  const unsigned csr_;
};

TEST(FloatEnvironment, OfAHostsThreadsIsUsedOrChanged) {
  for (const unsigned csr : kHosts) {
    for (const Call& call : calls()) {
      OddThreads threads(csr);
      EXPECT_TRUE(call.bits(&threads) == call.want) << "other bits with MXCSR " << std::hex << csr;
      EXPECT_EQ(threads.changed, 0) << "MXCSR " << std::hex << csr;
    }
  }
}
#endif

}  // namespace
}  // namespace cutloss
