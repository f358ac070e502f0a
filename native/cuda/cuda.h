// The CUDA backend's entry points. native/abi is the only caller. The problems
// are native/cpu's, with device pointers in place of host ones. Once a device's
// code has been loaded, nothing here allocates device memory, and only
// read_status waits or copies.
#ifndef FLASHVERIFY_NATIVE_CUDA_CUDA_H_
#define FLASHVERIFY_NATIVE_CUDA_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "flashverify/flashverify.h"
#include "native/cpu/cpu.h"
#include "native/cuda/driver.h"
#include "native/cuda/grouped_plan.h"
#include "native/cuda/target.h"
#include "native/plan/problem.h"

namespace flashverify::cuda {

using cpu::AppendProblem;
using cpu::MergeProblem;

// The architectures of the embedded images, each once; null ends the list.
const char* const* image_names();

Status device_count(int* count);

struct DeviceInfo {
  std::string name;
  int major = 0;
  int minor = 0;
  const char* image = nullptr;  // what "" loads for the grouped routes; null: nothing fits
};
Status describe_device(int index, DeviceInfo* info);

class Device;

struct ScalarPlan {
  int64_t blocks = 0;
  size_t stats_bytes = 0;
};

// How a call runs, made from shapes and the device alone, so that a captured call
// serves every length up to max_pages * page_size.
struct AttentionPlan {
  Device* device = nullptr;  // null: the call has no row
  ScalarPlan scalar;         // of the scalar routes
  GroupedPlan grouped;       // of the others
  size_t workspace_bytes = kLeastWorkspaceBytes;
};
Status plan_attention(const AttentionProblem& problem, const Target& target, AttentionPlan* plan);

// Bytes that serve every call of up to these rows, requests and pages, however
// the rows are dealt to the requests.
Status capacity_workspace_bytes(const AttentionProblem& problem, const Target& target,
                                size_t* bytes);

// Enqueues a validated problem on the target's stream, in a workspace of at least
// the plan's size. `ran` is the route as the kernel names itself, `image` the
// architecture of the code that was launched. A length above capacity or below zero
// makes its rows NaN and sets a bit that read_status returns.
Status run_attention(const AttentionProblem& problem, const Target& target,
                     const AttentionPlan& plan, void* workspace, fv_route* ran, const char** image);

Status run_append(const AppendProblem& problem, const Target& target);
Status run_merge(const MergeProblem& problem, const Target& target);

// What went wrong on the device in launches with this workspace since the last
// call: bits of StatusBit. Waits for the device.
Status read_status(const Target& target, const void* workspace, uint32_t* bits);

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_CUDA_H_
