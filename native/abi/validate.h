// Turns the structures of the ABI into validated problems, or says what is
// wrong with them. Nothing here writes to a caller's tensor.
#ifndef FLASHVERIFY_NATIVE_ABI_VALIDATE_H_
#define FLASHVERIFY_NATIVE_ABI_VALIDATE_H_

#include <cstddef>
#include <cstdint>

#include "flashverify/flashverify.h"
#include "native/abi/error.h"
#include "native/abi/tensor.h"
#include "native/cpu/cpu.h"
#include "native/plan/problem.h"

namespace flashverify::abi {

enum class Purpose {
  kRun,  // every pointer is checked
  kPlan  // shapes alone, as for a workspace's size: pointers may be anything
};

constexpr DataPointer data_pointer(Purpose purpose) {
  return purpose == Purpose::kRun ? DataPointer::kRequired : DataPointer::kIgnored;
}

constexpr int32_t kMaxThreads = 1024;
constexpr int64_t kMaxRows = INT32_MAX;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxPageSize = 65536;
constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxQueryLen = 64;
constexpr int32_t kMaxSplits = 128;  // of CUDA's schedules
constexpr size_t kWorkspaceAlignment = 64;

// What the structures of all calls have in common.
struct CallHeader {
  int32_t device_type;
  int32_t device_index;
  int32_t num_threads;
  const void* stream;
  const char* cuda_image;
};
fv_status check_header(const CallHeader& header);
fv_status check_struct_size(uint32_t found, size_t expected);
fv_status fail_null_params();

// Checks the pointer to a call's structure and the fields that all of them have.
template <typename Params>
fv_status check_call(const Params* params) {
  if (params == nullptr) return fail_null_params();
  // First: nothing beyond the size that the caller states may be read.
  FV_RETURN_IF_ERROR(check_struct_size(params->struct_size, sizeof *params));
  return check_header({params->device_type, params->device_index, params->num_threads,
                       params->stream, params->cuda_image});
}

// Checks a dequantisation scale, and its values where the host can read them;
// `view` is all ones if absent.
fv_status check_scale(const Argument& scale, int64_t kv_heads, Purpose purpose, bool on_cpu,
                      ScaleView* view);

// Checks two caches that describe the same pages.
struct CacheShape {
  int64_t pages;
  int64_t page_size;
  int64_t kv_heads;
  int64_t head_dim;
};
fv_status check_caches(const Argument& k_cache, const Argument& v_cache, DataPointer data,
                       CacheShape* shape);
CacheView cache_view(const fv_tensor& cache);

struct AttentionCall {
  AttentionProblem problem;
  bool on_cpu;
  fv_cpu_isa isa;
  int num_threads;
};
fv_status validate_attention(const fv_attention_params* params, Purpose purpose,
                             AttentionCall* call);

// Checks the query rows per request, and the contents of the tensors that the
// CPU can read: lengths, offsets, pages and sinks. The descriptors have passed
// their checks.
fv_status check_attention_values(const AttentionCall& call, Purpose purpose, int64_t pages);

// Checks the workspace against the bytes that the call needs, and that no
// output overlaps anything else.
fv_status check_attention_memory(const fv_attention_params& params, size_t needed_bytes);

fv_status validate_append(const fv_append_params* params, cpu::AppendProblem* problem);

fv_status validate_merge(const fv_merge_params* params, cpu::MergeProblem* problem);

}  // namespace flashverify::abi

#endif  // FLASHVERIFY_NATIVE_ABI_VALIDATE_H_
