// What one instruction set's compilation of kernels.cc offers.
#ifndef FLASHVERIFY_NATIVE_CPU_KERNELS_H_
#define FLASHVERIFY_NATIVE_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "flashverify/flashverify.h"
#include "native/plan/plan.h"

namespace flashverify::cpu {

// One attention call under way. Partial state lies in three arrays indexed by
// partial row: outputs (FP32, chunk by chunk within an item; or FP16 rows),
// running maxima in log2 units, and sums.
struct Call {
  const AttentionProblem* problem = nullptr;
  Plan plan;
  int64_t tree_depth = 0;
  int64_t max_unit_rows = 0;
  void* partial_out = nullptr;
  float* partial_max = nullptr;
  float* partial_sum = nullptr;
};

struct Kernels {
  fv_cpu_isa isa;
  // Reduces one item to a partial state; whoever finishes a unit's last item
  // merges them and writes the unit's output. Returns the route that the code
  // which ran implements.
  fv_route (*run_item)(const Call& call, int64_t item, void* scratch);
};

extern const Kernels kKernelsAvx512;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsPortable;

}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_KERNELS_H_
