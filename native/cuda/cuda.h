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
#include "native/plan/problem.h"

namespace flashverify::cuda {

using cpu::AppendProblem;
using cpu::MergeProblem;

struct Target {
  int device = 0;
  void* stream = nullptr;
  // The image to run: "" picks the device's own; "compute_70" runs the PTX of
  // the oldest target, on any device. Named images are never replaced.
  std::string image;
  // The schedule n<splits>, which names how positions are split. 128 serves every
  // shape; a workspace planned for large batches may name a smaller one.
  int splits = 128;
  // Blocks to occupy at most, 0: one per multiprocessor. No bit depends on it.
  int max_blocks = 0;
};

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

// Bytes that run_attention needs. Reads no memory of the problem: the plan is
// made from shapes, so that a captured call serves every length up to
// max_pages * page_size.
Status attention_workspace_bytes(const AttentionProblem& problem, const Target& target,
                                 size_t* bytes);
// Bytes that serve every call of up to these rows, requests and pages, however
// the rows are dealt to the requests.
Status capacity_workspace_bytes(const AttentionProblem& problem, const Target& target,
                                size_t* bytes);

// Enqueues a validated problem on the target's stream. `ran` is the route as the
// kernel names itself, `image` the architecture of the code that was launched.
// A length above capacity or below zero makes its rows NaN and sets a bit that
// read_status returns.
Status run_attention(const AttentionProblem& problem, const Target& target, void* workspace,
                     size_t workspace_bytes, fv_route* ran, const char** image);

Status run_append(const AppendProblem& problem, const Target& target);
Status run_merge(const MergeProblem& problem, const Target& target);

// What went wrong on the device in launches with this workspace since the last
// call: bits of StatusBit. Waits for the device.
Status read_status(const Target& target, const void* workspace, uint32_t* bits);

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_CUDA_H_
