// Which grouped kernel runs a problem, and how its splits are divided.
#ifndef FLASHVERIFY_NATIVE_CUDA_GROUPED_PLAN_H_
#define FLASHVERIFY_NATIVE_CUDA_GROUPED_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "native/cuda/driver.h"
#include "native/cuda/target.h"
#include "native/plan/problem.h"

namespace flashverify::cuda {

// "e4m3", "e5m2", "f16", "bf16": as kernels' names have it.
const char* dtype_name(fv_dtype type);

// Whether the target's schedule is one of n1, n2, n4 ... n128.
Status check_schedule(const Target& target);

struct GroupedPlan {
  std::string source;
  std::string kernel;
  bool has_bulk_copy = false;
  int dim = 0;         // head_dim as the kernel was compiled for it
  int row_blocks = 0;  // of eight rows
  int row_tiles = 0;
  int splits = 0;
  int fold = 0;
  bool legacy = false;
  bool folds_groups = false;     // in registers
  bool folds_in_memory = false;  // splits too: see GroupedGeometrySm70
  int partial_bytes = 0;         // of one part of one row tile: its accumulators
  int threads = 0;
  int blocks = 0;
  int shared_bytes = 0;
  size_t stats_bytes = 0;
  size_t workspace_bytes = 0;
};

// What a plan depends on beside the shapes.
struct PlanDevice {
  int multiprocessors = 0;
  // The image that runs a source there when none is named; empty: none.
  std::function<std::string(const std::string& source)> best_image;
};

// A function of shapes and the device alone. No choice made here but the kernel
// family (by device) changes a bit of any result.
Status plan_grouped(const AttentionProblem& problem, const PlanDevice& device, const Target& target,
                    GroupedPlan* plan);

constexpr size_t kLeastWorkspaceBytes = 64;

// Bytes that serve every grouped call of up to these rows and requests.
Status grouped_capacity_bytes(const AttentionProblem& problem, const PlanDevice& device,
                              const Target& target, size_t* bytes);

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_GROUPED_PLAN_H_
