#include "native/abi/cuda_calls.h"

#include <cinttypes>
#include <cstdio>

#include "native/abi/error.h"
#include "native/cuda/cuda.h"
#include "native/cuda/device/args.h"

namespace flashverify::abi {
namespace {

static_assert(kMaxSplits == cuda::kMaxSplits);
static_assert(int{FV_CUDA_FAULT_LENGTH_ABOVE_CAPACITY} == int{cuda::kStatusLengthAboveCapacity});
static_assert(int{FV_CUDA_FAULT_NEGATIVE_LENGTH} == int{cuda::kStatusNegativeLength});
static_assert(int{FV_CUDA_FAULT_PAGE_OUT_OF_RANGE} == int{cuda::kStatusPageOutOfRange});
static_assert(int{FV_CUDA_FAULT_SLOT_OUT_OF_RANGE} == int{cuda::kStatusSlotOutOfRange});
static_assert(int{FV_CUDA_FAULT_BAD_QUERY_START} == int{cuda::kStatusBadQueryStart});

// The backend's messages name their argument themselves, as fail()'s do.
fv_status report(const cuda::Status& status) {
  return status.ok() ? FV_OK : fail_as_told(status.code, status.message.c_str());
}

template <typename Params>
cuda::Target target_of(const Params& params) {
  cuda::Target target;
  target.device = params.device_index;
  target.stream = params.stream;
  if (params.cuda_image != nullptr) target.image = params.cuda_image;
  return target;
}

cuda::Target attention_target(const fv_attention_params& params) {
  cuda::Target target = target_of(params);
  if (params.splits != 0) target.splits = params.splits;
  return target;
}

}  // namespace

fv_status cuda_workspace_bytes(const fv_attention_params& params, const AttentionCall& call,
                               size_t* bytes) {
  const cuda::Target target = attention_target(params);
  if (params.seq_lens.data == nullptr) {  // a capacity
    return report(cuda::capacity_workspace_bytes(call.problem, target, bytes));
  }
  cuda::AttentionPlan plan;
  FV_RETURN_IF_ERROR(report(cuda::plan_attention(call.problem, target, &plan)));
  *bytes = plan.workspace_bytes;
  return FV_OK;
}

fv_status cuda_attention(const fv_attention_params& params, const AttentionCall& call,
                         fv_route* ran, const char** image) {
  const cuda::Target target = attention_target(params);
  cuda::AttentionPlan plan;
  FV_RETURN_IF_ERROR(report(cuda::plan_attention(call.problem, target, &plan)));
  FV_RETURN_IF_ERROR(check_attention_memory(params, plan.workspace_bytes));
  return report(cuda::run_attention(call.problem, target, plan, params.workspace, ran, image));
}

fv_status cuda_append(const fv_append_params& params, const cpu::AppendProblem& problem) {
  return report(cuda::run_append(problem, target_of(params)));
}

fv_status cuda_merge(const fv_merge_params& params, const cpu::MergeProblem& problem) {
  return report(cuda::run_merge(problem, target_of(params)));
}

const char* const* cuda_images() { return cuda::image_names(); }

fv_status cuda_device_count(int32_t* count) {
  if (count == nullptr) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "count", "NULL; accepted: a pointer to the result");
  }
  return report(cuda::device_count(count));
}

fv_status cuda_device(int32_t index, fv_cuda_device* device) {
  if (device == nullptr) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "device", "NULL; accepted: a pointer to the result");
  }
  FV_RETURN_IF_ERROR(check_struct_size(device->struct_size, sizeof *device));
  cuda::DeviceInfo info;
  FV_RETURN_IF_ERROR(report(cuda::describe_device(index, &info)));
  device->index = index;
  device->major = info.major;
  device->minor = info.minor;
  std::snprintf(device->name, sizeof device->name, "%s", info.name.c_str());
  device->image = info.image;
  return FV_OK;
}

fv_status cuda_faults(int32_t device_index, const void* workspace, uint32_t* faults) {
  if (faults == nullptr) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "faults", "NULL; accepted: a pointer to the result");
  }
  cuda::Target target;
  target.device = device_index;
  return report(cuda::read_status(target, workspace, faults));
}

}  // namespace flashverify::abi
