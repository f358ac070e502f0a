#include "native/cuda/grouped_plan.h"

#include <algorithm>
#include <array>

#include "native/cuda/device.h"
#include "native/cuda/device/grouped_geometry.h"
#include "native/cuda/device/grouped_geometry_sm70.h"

namespace flashverify::cuda {
namespace {

// What the planner needs to know of one compiled geometry.
struct Geometry {
  int kv_bytes;
  int dim;
  int row_blocks;
  int shared_bytes;
  int partial_floats;
  bool folds_groups;
  bool folds_in_memory;
};

template <int kKvBytes, int kDim, int kRowBlocks, int kSharedBytes>
constexpr Geometry geometry() {
  using G = GroupedGeometry<kKvBytes, kDim, kRowBlocks, kSharedBytes>;
  return {kKvBytes,        kDim, kRowBlocks, G::kFits ? G::kTotalBytes : 0, G::kPartialFloats,
          G::kFoldsGroups, false};
}
template <int kKvBytes, int kDim, int kRowBlocks, int kSharedBytes>
constexpr Geometry geometry_sm70() {
  using G = GroupedGeometrySm70<kKvBytes, kDim, kRowBlocks, kSharedBytes>;
  return {kKvBytes,          kDim,
          kRowBlocks,        G::kFits ? G::kTotalBytes : 0,
          G::kPartialFloats, G::kFoldsGroups,
          G::kFoldsInMemory};
}

// The instances of device/grouped_sm90.cu, dims and rows ascending.
template <int kKvBytes>
constexpr std::array<Geometry, 12> hopper_instances() {
  constexpr int kShared = kHopperSharedBytes;
  return {geometry<kKvBytes, 64, 1, kShared>(),  geometry<kKvBytes, 64, 2, kShared>(),
          geometry<kKvBytes, 64, 4, kShared>(),  geometry<kKvBytes, 64, 8, kShared>(),
          geometry<kKvBytes, 128, 1, kShared>(), geometry<kKvBytes, 128, 2, kShared>(),
          geometry<kKvBytes, 128, 4, kShared>(), geometry<kKvBytes, 128, 8, kShared>(),
          geometry<kKvBytes, 256, 1, kShared>(), geometry<kKvBytes, 256, 2, kShared>(),
          geometry<kKvBytes, 256, 4, kShared>(), geometry<kKvBytes, 256, 6, kShared>()};
}
// Those of device/grouped_sm80.cu.
template <int kKvBytes, int kShared>
constexpr std::array<Geometry, 7> mma_instances() {
  return {geometry<kKvBytes, 64, 1, kShared>(),  geometry<kKvBytes, 64, 4, kShared>(),
          geometry<kKvBytes, 128, 1, kShared>(), geometry<kKvBytes, 128, 4, kShared>(),
          geometry<kKvBytes, 256, 1, kShared>(), geometry<kKvBytes, 256, 2, kShared>(),
          geometry<kKvBytes, 256, 3, kShared>()};
}
// Those of device/grouped_sm70.cu.
template <int kKvBytes, int kShared>
constexpr std::array<Geometry, 7> sm70_instances() {
  return {geometry_sm70<kKvBytes, 64, 1, kShared>(),  geometry_sm70<kKvBytes, 64, 4, kShared>(),
          geometry_sm70<kKvBytes, 128, 1, kShared>(), geometry_sm70<kKvBytes, 128, 4, kShared>(),
          geometry_sm70<kKvBytes, 256, 1, kShared>(), geometry_sm70<kKvBytes, 256, 2, kShared>(),
          geometry_sm70<kKvBytes, 256, 6, kShared>()};
}
// Of the family that an image of that architecture belongs to.
template <int kKvBytes>
std::array<Geometry, 7> instances_for(int arch) {
  if (arch < 75) return sm70_instances<kKvBytes, FV_SHARED_LIMIT(700)>();
  switch (FV_SHARED_LIMIT(10 * arch)) {
    case FV_SHARED_LIMIT(750):
      return sm70_instances<kKvBytes, FV_SHARED_LIMIT(750)>();
    case FV_SHARED_LIMIT(800):
      return mma_instances<kKvBytes, FV_SHARED_LIMIT(800)>();
    case FV_SHARED_LIMIT(900):
      return mma_instances<kKvBytes, FV_SHARED_LIMIT(900)>();
    default:
      return mma_instances<kKvBytes, FV_SHARED_LIMIT(890)>();
  }
}

// The smallest that takes head_dim and then all rows of a request; else the one
// with the most rows.
template <class Instances>
Geometry choose(const Instances& instances, int64_t head_dim, int64_t rows) {
  Geometry chosen = {};
  for (const Geometry& g : instances) {
    if (g.shared_bytes == 0 || g.dim < head_dim || (chosen.dim != 0 && g.dim > chosen.dim))
      continue;
    if (chosen.dim == 0 || chosen.row_blocks * 8 < rows) chosen = g;
  }
  return chosen;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest fold that keeps the blocks busy: folding more in registers means
// fewer partial states through memory, but fewer items to share out.
int choose_fold(const GroupedPlan& plan, int64_t row_tile_heads) {
  const int splits = plan.splits;
  const int blocks = plan.blocks;
  for (const int fold : {splits, kChain}) {
    if (fold >= splits && fold != splits) continue;
    if (fold > kChain && !plan.folds_groups) continue;
    // The half-precision arms exist to store half-precision partials.
    if (fold == splits && plan.legacy) continue;
    // In memory is where a partial lies, if one does, in FP32.
    if (plan.folds_in_memory && fold > 1 && (fold == splits || plan.legacy)) continue;
    const int64_t items = row_tile_heads * (splits / fold);
    if (items * 10 >= ceil_div(items, blocks) * blocks * 9) return fold;
  }
  return 1;
}

// Partial states that go through memory.
int64_t stored_parts(const GroupedPlan& plan, int64_t row_tile_heads) {
  return plan.fold < plan.splits ? row_tile_heads * (plan.splits / plan.fold) : 0;
}
size_t stats_bytes(const GroupedPlan& plan, int64_t parts) {
  return static_cast<size_t>(ceil_div(parts * 8 * plan.row_blocks * 8, 256) * 256);
}
size_t workspace_bytes(const GroupedPlan& plan, int64_t parts) {
  return std::max(kLeastWorkspaceBytes,
                  stats_bytes(plan, parts) + static_cast<size_t>(parts * plan.partial_bytes));
}

}  // namespace

Status plan_grouped(const AttentionProblem& problem, const PlanDevice& device, const Target& target,
                    GroupedPlan* plan) {
  const bool legacy = problem.route == FV_ROUTE_GROUPED_HALF || problem.route == FV_ROUTE_XQA_HALF;
  if (problem.q_dtype == FV_DTYPE_FLOAT32) {
    return Status::error(FV_ERROR_UNSUPPORTED,
                         "q: float32, of which a tensor core's 16-bit operand would lose bits; "
                         "accepted: float16 and bfloat16 (scalar_fp32 accepts every query type)");
  }
  if (problem.kv_dtype == FV_DTYPE_BFLOAT16 && problem.q_dtype != FV_DTYPE_BFLOAT16) {
    return Status::error(FV_ERROR_UNSUPPORTED,
                         "q: this kernel multiplies a bfloat16 cache by a bfloat16 query only; "
                         "scalar_fp32 accepts every query type");
  }
  FV_CUDA_RETURN_IF_ERROR(check_schedule(target));
  const int64_t kv_bytes =
      problem.kv_dtype == FV_DTYPE_FLOAT16 || problem.kv_dtype == FV_DTYPE_BFLOAT16 ? 2 : 1;
  const int64_t group = problem.group();
  const int64_t rows_per_request =
      std::max<int64_t>(ceil_div(problem.rows, problem.batch), 1) * group;
  const std::string suffix = std::string(dtype_name(problem.kv_dtype)) + "_d" +
                             std::to_string(problem.head_dim <= 64    ? 64
                                            : problem.head_dim <= 128 ? 128
                                                                      : 256);
  plan->source = "grouped_sm90_" + suffix;
  const std::string hopper_image =
      target.image.empty() ? device.best_image(plan->source) : target.image;
  plan->has_bulk_copy = hopper_image == "sm_90a";
  Geometry chosen = {};
  if (plan->has_bulk_copy) {
    chosen = kv_bytes == 1 ? choose(hopper_instances<1>(), problem.head_dim, rows_per_request)
                           : choose(hopper_instances<2>(), problem.head_dim, rows_per_request);
    plan->threads = kConsumers + 128;
  } else {
    std::string image;
    int arch = 0;
    for (const char* family : {"grouped_sm80_", "grouped_sm70_"}) {
      plan->source = family + suffix;
      image = target.image.empty() ? device.best_image(plan->source) : target.image;
      arch = arch_number(image);
      chosen = kv_bytes == 1 ? choose(instances_for<1>(arch), problem.head_dim, rows_per_request)
                             : choose(instances_for<2>(arch), problem.head_dim, rows_per_request);
      // What shared memory is too small for may fit the older family.
      if (arch >= 80 && chosen.dim != 0) break;
    }
    if (arch == 0) {
      return Status::error(FV_ERROR_UNSUPPORTED, "route: no grouped kernel for image " +
                                                     (image.empty() ? "of this device" : image) +
                                                     " and a " + dtype_name(problem.kv_dtype) +
                                                     " cache; scalar_fp32 runs there");
    }
    if (arch < 80 && problem.kv_dtype == FV_DTYPE_BFLOAT16) {
      return Status::error(FV_ERROR_UNSUPPORTED,
                           "kv_dtype: bfloat16 at this head_dim, for which image " + image +
                               " has no tensor-core kernel; scalar_fp32 reads every cache");
    }
    plan->threads = kConsumers;
  }
  if (chosen.dim == 0 && problem.head_dim <= 256) {
    return Status::error(FV_ERROR_UNSUPPORTED,
                         "head_dim: " + std::to_string(problem.head_dim) + " with a " +
                             dtype_name(problem.kv_dtype) + " cache, whose tiles the shared " +
                             "memory of this image does not hold; scalar_fp32 runs there");
  }
  if (chosen.dim == 0 || problem.head_dim % 16 != 0) {
    return Status::error(FV_ERROR_UNSUPPORTED,
                         "head_dim: " + std::to_string(problem.head_dim) +
                             "; the grouped kernels accept multiples of 16 up to 256");
  }
  plan->dim = chosen.dim;
  plan->row_blocks = chosen.row_blocks;
  plan->kernel = (legacy ? "grouped_half_" : "grouped_fp32_") + suffix + "_r" +
                 std::to_string(8 * chosen.row_blocks);
  const int tile_rows = 8 * chosen.row_blocks;
  if (problem.query_start_loc == nullptr) {
    plan->row_tiles =
        static_cast<int>(problem.batch * ceil_div(problem.rows / problem.batch * group, tile_rows));
  } else {
    plan->row_tiles = static_cast<int>(problem.rows * group / tile_rows + problem.batch);
  }
  plan->blocks = device.multiprocessors;
  if (target.max_blocks > 0) plan->blocks = std::min(plan->blocks, target.max_blocks);
  plan->shared_bytes = chosen.shared_bytes;
  plan->splits = target.splits;
  plan->legacy = legacy;
  plan->folds_groups = chosen.folds_groups;
  plan->folds_in_memory = chosen.folds_in_memory;
  plan->partial_bytes = chosen.partial_floats * (legacy ? 2 : 4);
  const int64_t row_tile_heads = plan->row_tiles * problem.kv_heads;
  plan->fold = choose_fold(*plan, row_tile_heads);
  const int64_t parts = stored_parts(*plan, row_tile_heads);
  plan->stats_bytes = stats_bytes(*plan, parts);
  plan->workspace_bytes = workspace_bytes(*plan, parts);
  return {};
}

Status grouped_capacity_bytes(const AttentionProblem& problem, const PlanDevice& device,
                              const Target& target, size_t* bytes) {
  constexpr int64_t kMostQueryTokens = 64;  // of one request, as the ABI has it
  static const int32_t dealt_in_any_way = 0;
  *bytes = kLeastWorkspaceBytes;
  // Calls are planned by their rows per request. Of those with the same, the ones
  // with fewer row tiles may fold less and so store more.
  for (int64_t tokens = 1; tokens <= std::min(problem.rows, kMostQueryTokens); ++tokens) {
    AttentionProblem call = problem;
    call.batch = std::min(problem.batch, ceil_div(problem.rows, tokens));
    call.rows = std::min(problem.rows, tokens * call.batch);
    call.query_start_loc = &dealt_in_any_way;
    GroupedPlan plan;
    FV_CUDA_RETURN_IF_ERROR(plan_grouped(call, device, target, &plan));
    const int64_t most = plan.row_tiles * problem.kv_heads;
    int64_t parts = stored_parts(plan, most);
    // From here on every fold is accepted that ever is.
    const int64_t steady = 16 * int64_t{plan.blocks};
    for (int64_t fewer = 1; fewer < std::min(most, steady); ++fewer) {
      plan.fold = choose_fold(plan, fewer);
      parts = std::max(parts, stored_parts(plan, fewer));
    }
    *bytes = std::max(*bytes, workspace_bytes(plan, parts));
  }
  return {};
}

}  // namespace flashverify::cuda
