// The CPU backend from outside the kernels: the instruction set, the workspace,
// the threads.

#include <atomic>

#include "native/cpu/cpu.h"
#include "native/cpu/kernels.h"
#include "native/cpu/threads.h"
#include "native/cpu/tile.h"
#include "native/plan/plan.h"

namespace flashverify::cpu {
namespace {

const Kernels& kernels_of(fv_cpu_isa isa) {
  switch (isa) {
    case FV_CPU_ISA_AVX512:
      return kKernelsAvx512;
    case FV_CPU_ISA_AVX2:
      return kKernelsAvx2;
    default:
      return kKernelsPortable;
  }
}

size_t item_scratch_bytes(int64_t unit_rows, int64_t head_dim, int64_t tree_depth) {
  Scratch scratch;
  return lay_out_scratch(nullptr, unit_rows, head_dim, tree_depth, &scratch);
}

}  // namespace

size_t attention_workspace_bytes(const AttentionProblem& problem, int num_threads) {
  return plan_workspace(problem, num_threads, item_scratch_bytes).total_bytes;
}

fv_route run_attention(const AttentionProblem& problem, fv_cpu_isa isa, int num_threads,
                       void* workspace) {
  const WorkspaceLayout layout = plan_workspace(problem, num_threads, item_scratch_bytes);
  char* const memory = static_cast<char*>(workspace);
  const PartialKind kind = partial_kind(problem.route);
  const int64_t row_elements = padded_dims(problem.head_dim);

  Call call;
  call.problem = &problem;
  call.plan = make_plan(problem, num_threads, memory + layout.units_offset);
  call.tree_depth = layout.max_tree_depth;
  call.max_unit_rows = layout.max_unit_rows;
  call.partial_out = memory + layout.partials_offset;
  const size_t out_bytes = static_cast<size_t>(layout.max_partial_rows * row_elements) *
                           (kind == PartialKind::kFp32PerItem ? sizeof(float) : sizeof(uint16_t));
  call.partial_max = reinterpret_cast<float*>(static_cast<char*>(call.partial_out) + out_bytes);
  call.partial_sum = call.partial_max + layout.max_partial_rows;

  const Kernels& kernels = kernels_of(isa);
  std::atomic<int32_t> ran{problem.route};
  for_each_index(call.plan.num_items, num_threads, [&](int64_t item, int thread) {
    char* scratch = memory + layout.scratch_offset +
                    static_cast<size_t>(thread) * layout.scratch_bytes_per_thread;
    const fv_route route = kernels.run_item(call, item, scratch);
    if (route != problem.route) ran.store(route, std::memory_order_relaxed);
  });
  return static_cast<fv_route>(ran.load(std::memory_order_relaxed));
}

}  // namespace flashverify::cpu
