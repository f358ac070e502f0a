// The CPU backend's entry points. native/abi is the only caller.
#ifndef FLASHVERIFY_NATIVE_CPU_CPU_H_
#define FLASHVERIFY_NATIVE_CPU_CPU_H_

#include <cstddef>
#include <cstdint>

#include "flashverify/flashverify.h"
#include "native/plan/problem.h"

namespace flashverify::cpu {

// True where this CPU, as its operating system lets it be used, has `isa`.
bool has_isa(fv_cpu_isa isa);
// The best instruction set that this CPU has: what FV_CPU_ISA_AUTO stands for.
fv_cpu_isa best_isa();

// Bytes that run_attention needs for this problem. Reads seq_lens and
// query_start_loc (seq_lens null: every request has max_pages * page_size
// keys), no other memory.
size_t attention_workspace_bytes(const AttentionProblem& problem, int num_threads);

// Runs a validated problem. `isa` is one that has_isa() affirms; `workspace` is
// 64-byte aligned and of at least attention_workspace_bytes(). Returns the
// route that ran, as the kernel names itself.
fv_route run_attention(const AttentionProblem& problem, fv_cpu_isa isa, int num_threads,
                       void* workspace);

struct AppendProblem {
  int64_t tokens = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t pages = 0;
  int64_t page_size = 0;

  fv_dtype src_dtype = FV_DTYPE_NONE;
  const void* key = nullptr;
  int64_t key_token_stride = 0;
  int64_t key_head_stride = 0;
  const void* value = nullptr;
  int64_t value_token_stride = 0;
  int64_t value_head_stride = 0;

  fv_dtype kv_dtype = FV_DTYPE_NONE;
  CacheView k;  // written through, despite the view's const
  CacheView v;
  ScaleView k_scale;
  ScaleView v_scale;

  bool slots_are_int64 = true;
  const void* slots = nullptr;
  int64_t slot_stride = 1;
};

void run_append(const AppendProblem& problem, int num_threads);

struct MergeProblem {
  int64_t states = 0;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;

  const float* outs = nullptr;
  int64_t outs_stride[3] = {0, 0, 0};  // state, row, head; the last axis is contiguous
  const float* lses = nullptr;
  int64_t lses_stride[3] = {0, 0, 0};
  float* out = nullptr;
  int64_t out_stride[2] = {0, 0};
  float* out_lse = nullptr;
  int64_t out_lse_stride[2] = {0, 0};
};

void run_merge(const MergeProblem& problem, int num_threads);

}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_CPU_H_
