// Independent work items on a caller-sized number of threads of the process-wide
// oneTBB pool.
#ifndef FLASHVERIFY_NATIVE_CPU_THREADS_H_
#define FLASHVERIFY_NATIVE_CPU_THREADS_H_

#include <cstdint>
#include <functional>

namespace flashverify::cpu {

// Calls body(index, thread) for every index below `count`, `thread` below
// `num_threads` and never used by two calls at once. Runs on the calling thread
// alone where there is one item or one thread. Every call runs in the default
// floating-point environment: round to nearest, subnormals kept.
void for_each_index(int64_t count, int num_threads,
                    const std::function<void(int64_t index, int thread)>& body);

}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_THREADS_H_
