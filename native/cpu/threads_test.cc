#include "native/cpu/threads.h"

#include <tbb/info.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "native/testing/check.h"

namespace flashverify::cpu {
namespace {

// Long enough that several threads take part.
void work_a_little() {
  for (volatile int i = 0; i < 2000; i = i + 1) {
  }
}

// What one call of for_each_index did. Filled by its threads, checked after it.
struct Record {
  Record(int64_t count, int num_threads)
      : visits(static_cast<size_t>(count)), busy(static_cast<size_t>(num_threads)) {}

  void run(int64_t index, int thread) {
    if (index < 0 || index >= static_cast<int64_t>(visits.size()) || thread < 0 ||
        thread >= static_cast<int>(busy.size())) {
      ++out_of_range;
      return;
    }
    std::atomic<int>& mine = busy[static_cast<size_t>(thread)];
    if (mine.fetch_add(1) != 0) ++shared_threads;
    ++visits[static_cast<size_t>(index)];
    work_a_little();
    --mine;
  }

  void check() const {
    CHECK_EQ(out_of_range.load(), 0);
    CHECK_EQ(shared_threads.load(), 0);
    for (const std::atomic<int>& count : visits) CHECK_EQ(count.load(), 1);
  }

  std::vector<std::atomic<int>> visits;
  std::vector<std::atomic<int>> busy;
  std::atomic<int> out_of_range{0};
  std::atomic<int> shared_threads{0};
};

void run_and_check(int64_t count, int num_threads) {
  TRACE("%d items, %d threads", static_cast<int>(count), num_threads);
  Record record(count, num_threads);
  for_each_index(count, num_threads, [&](int64_t index, int thread) { record.run(index, thread); });
  record.check();
}

TEST(every_index_is_run_once_by_a_thread_of_its_own) {
  for (int num_threads = 1; num_threads <= 9; ++num_threads) {
    for (const int64_t count : {0, 1, 2, 3, 7, 64, 1000}) run_and_check(count, num_threads);
  }
  // Sizes in turn: each of them makes an arena, or finds one of another size.
  for (int i = 0; i < 50; ++i) run_and_check(20, 1 + i * 5 % 9);
}

TEST(one_thread_or_one_item_stays_on_the_calling_thread) {
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<int64_t> order;
  for_each_index(5, 1, [&](int64_t index, int thread) {
    CHECK_EQ(thread, 0);
    CHECK(std::this_thread::get_id() == caller);
    order.push_back(index);
  });
  CHECK(order == std::vector<int64_t>({0, 1, 2, 3, 4}));
  for_each_index(1, 8, [&](int64_t, int thread) {
    CHECK_EQ(thread, 0);
    CHECK(std::this_thread::get_id() == caller);
  });
}

// Two items that each wait for the other to begin can end only if they run at
// the same time.
TEST(several_threads_take_part) {
  if (tbb::info::default_concurrency() < 2) {
    std::printf("skipped: one processor\n");
    return;
  }
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(50);
  std::atomic<int> begun{0};
  std::atomic<int> met{0};
  for_each_index(2, 2, [&](int64_t, int) {
    ++begun;
    while (begun.load() < 2 && Clock::now() < deadline) std::this_thread::yield();
    if (begun.load() == 2) ++met;
  });
  CHECK_EQ(met.load(), 2);
}

TEST(concurrent_callers_do_not_meet) {
  constexpr int kCallers = 6;
  std::vector<std::deque<Record>> records(kCallers);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    std::deque<Record>& mine = records[static_cast<size_t>(caller)];
    callers.emplace_back([&mine, caller] {
      for (int i = 0; i < 30; ++i) {
        const int num_threads = 1 + (caller + i) % 5;
        Record& record = mine.emplace_back(40, num_threads);
        for_each_index(40, num_threads,
                       [&](int64_t index, int thread) { record.run(index, thread); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::deque<Record>& mine : records) {
    for (const Record& record : mine) record.check();
  }
}

// A body that makes calls of its own, of its caller's size or another.
TEST(nested_calls_keep_to_themselves) {
#if defined(__GLIBC__)
  // Freed memory changes at once, so that whoever still uses it fails.
  mallopt(M_PERTURB, 0xA5);
#endif
  for (int round = 0; round < 2000; ++round) {
    const int64_t count = 2 + round % 6;
    Record outer(count, 3);
    std::deque<Record> inner;
    for (int64_t i = 0; i < 2 * count; ++i)
      inner.emplace_back(3, static_cast<int>(1 + (round + i % 2) % 5));
    std::vector<std::atomic<int>> busy(3);
    std::atomic<int> shared{0};
    for_each_index(count, 3, [&](int64_t index, int thread) {
      std::atomic<int>& mine = busy[static_cast<size_t>(thread)];
      if (mine.fetch_add(1) != 0) ++shared;
      for (const int64_t i : {2 * index, 2 * index + 1}) {
        Record& record = inner[static_cast<size_t>(i)];
        for_each_index(3, static_cast<int>(record.busy.size()),
                       [&](int64_t j, int inner_thread) { record.run(j, inner_thread); });
      }
      --mine;
      outer.run(index, thread);
    });
    CHECK_EQ(shared.load(), 0);
    outer.check();
    for (const Record& record : inner) record.check();
  }
#if defined(__GLIBC__)
  mallopt(M_PERTURB, 0);
#endif
}

TEST(a_body_that_throws_reaches_the_caller) {
  for (const int num_threads : {1, 4}) {
    bool caught = false;
    try {
      for_each_index(16, num_threads, [](int64_t index, int) {
        if (index == 9) throw std::runtime_error("item 9");
      });
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()) == "item 9";
    }
    CHECK(caught);
    run_and_check(16, num_threads);
  }
}

#if defined(__SSE2__)
constexpr unsigned kStatusFlags = 0x3f;  // sticky; no part of how things round
constexpr unsigned kDefault = 0x1f80;
constexpr unsigned kFlushToZero = 0x8040;  // both of FTZ and DAZ

// Sets the calling thread's environment for a scope.
class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(unsigned bits) : saved_(_mm_getcsr()) { _mm_setcsr(bits); }
  ~ScopedEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

TEST(bodies_run_in_the_default_floating_point_environment) {
  for (const unsigned rounding : {_MM_ROUND_NEAREST, _MM_ROUND_UP, _MM_ROUND_TOWARD_ZERO}) {
    for (int num_threads = 1; num_threads <= 9; ++num_threads) {
      const unsigned callers = kDefault | kFlushToZero | rounding;
      std::atomic<int> wrong{0};
      unsigned after;
      {
        const ScopedEnvironment environment(callers);
        for_each_index(50, num_threads, [&](int64_t, int) {
          if ((_mm_getcsr() & ~kStatusFlags) != kDefault) ++wrong;
          volatile float small = 0x1p-126f;
          if (small * 0.5f != 0x1p-127f) ++wrong;  // not flushed
          volatile float one = 1.0f;
          if (one + 0x1p-24f != 1.0f) ++wrong;  // to nearest, ties to even
          work_a_little();
        });
        after = _mm_getcsr();
      }
      TRACE("threads %d, rounding 0x%x", num_threads, rounding);
      CHECK_EQ(wrong.load(), 0);
      CHECK_EQ(after & ~kStatusFlags, callers);
    }
  }
}

TEST(the_environment_comes_back_after_an_exception) {
  const unsigned callers = kDefault | kFlushToZero | _MM_ROUND_DOWN;
  for (const int num_threads : {1, 3}) {
    unsigned after;
    {
      const ScopedEnvironment environment(callers);
      try {
        for_each_index(4, num_threads, [](int64_t, int) { throw 1; });
      } catch (int) {
      }
      after = _mm_getcsr();
    }
    CHECK_EQ(after & ~kStatusFlags, callers);
  }
}
#endif

}  // namespace
}  // namespace flashverify::cpu

TEST_MAIN()
