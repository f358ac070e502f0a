// The ABI's calls on CUDA tensors: validated problems to native/cuda, and its
// statuses back.
#ifndef FLASHVERIFY_NATIVE_ABI_CUDA_CALLS_H_
#define FLASHVERIFY_NATIVE_ABI_CUDA_CALLS_H_

#include <cstddef>
#include <cstdint>

#include "flashverify/flashverify.h"
#include "native/abi/validate.h"

namespace flashverify::abi {

// Of a call, or of a capacity where seq_lens has no data.
fv_status cuda_workspace_bytes(const fv_attention_params& params, const AttentionCall& call,
                               size_t* bytes);
// Checks the workspace and the outputs too.
fv_status cuda_attention(const fv_attention_params& params, const AttentionCall& call,
                         fv_route* ran, const char** image);
fv_status cuda_append(const fv_append_params& params, const cpu::AppendProblem& problem);
fv_status cuda_merge(const fv_merge_params& params, const cpu::MergeProblem& problem);

// The entries of the table that concern devices.
const char* const* cuda_images();
fv_status cuda_device_count(int32_t* count);
fv_status cuda_device(int32_t index, fv_cuda_device* device);
fv_status cuda_faults(int32_t device_index, const void* workspace, uint32_t* faults);

}  // namespace flashverify::abi

#endif  // FLASHVERIFY_NATIVE_ABI_CUDA_CALLS_H_
