#include "native/cpu/threads.h"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <memory>
#include <utility>

#include "native/state/float_environment.h"

namespace flashverify::cpu {
namespace {

// Runs `body` in an arena of so many threads. Making one takes 4 us, a quarter of
// what a whole call on a tiny problem may take, so that each thread keeps its
// last; a nested call finds it taken and makes another.
template <class Body>
void in_arena(int num_threads, Body&& body) {
  thread_local std::unique_ptr<tbb::task_arena> kept;
  std::unique_ptr<tbb::task_arena> arena = std::move(kept);
  if (arena == nullptr || arena->max_concurrency() != num_threads) {
    arena = std::make_unique<tbb::task_arena>(num_threads);
  }
  arena->execute(body);
  kept = std::move(arena);
}

}  // namespace

void for_each_index(int64_t count, int num_threads,
                    const std::function<void(int64_t index, int thread)>& body) {
  if (count <= 1 || num_threads <= 1) {
    const DefaultFloatEnvironment environment;
    for (int64_t index = 0; index < count; ++index) body(index, 0);
    return;
  }
  in_arena(num_threads, [&] {
    tbb::parallel_for(
        tbb::blocked_range<int64_t>(0, count, 1),
        [&](const tbb::blocked_range<int64_t>& range) {
          const DefaultFloatEnvironment environment;
          const int thread = tbb::this_task_arena::current_thread_index();
          for (int64_t index = range.begin(); index < range.end(); ++index) body(index, thread);
        },
        tbb::simple_partitioner());
  });
}

}  // namespace flashverify::cpu
