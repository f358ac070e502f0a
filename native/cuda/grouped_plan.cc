#include "native/cuda/grouped_plan.h"

#include <algorithm>
#include <array>

#include "native/cuda/device.h"
#include "native/cuda/device/grouped_geometry.h"

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
};

template <int kKvBytes, int kDim, int kRowBlocks, int kSharedBytes>
constexpr Geometry geometry() {
  using G = GroupedGeometry<kKvBytes, kDim, kRowBlocks, kSharedBytes>;
  return {kKvBytes,          kDim,           kRowBlocks, G::kFits ? G::kTotalBytes : 0,
          G::kPartialFloats, G::kFoldsGroups};
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
          geometry<kKvBytes, 256, 6, kShared>()};
}
template <int kKvBytes>
std::array<Geometry, 7> mma_instances_for(int arch) {
  switch (FV_SHARED_LIMIT(10 * arch)) {
    case FV_SHARED_LIMIT(750):
      return mma_instances<kKvBytes, FV_SHARED_LIMIT(750)>();
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
int choose_fold(int64_t row_tile_heads, int splits, int blocks, bool folds_groups, bool legacy) {
  for (const int fold : {splits, kChain}) {
    if (fold >= splits && fold != splits) continue;
    if (fold > kChain && !folds_groups) continue;
    // The half-precision arms exist to store half-precision partials.
    if (fold == splits && legacy) continue;
    const int64_t items = row_tile_heads * (splits / fold);
    if (items * 10 >= ceil_div(items, blocks) * blocks * 9) return fold;
  }
  return 1;
}

}  // namespace

Status plan_grouped(const AttentionProblem& problem, const PlanDevice& device, const Target& target,
                    GroupedPlan* plan) {
  const bool legacy = problem.route == FV_ROUTE_GROUPED_HALF || problem.route == FV_ROUTE_XQA_HALF;
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
    plan->source = "grouped_sm80_" + suffix;
    const std::string image = target.image.empty() ? device.best_image(plan->source) : target.image;
    const int arch = arch_number(image);
    if (arch >= 75) {
      chosen = kv_bytes == 1
                   ? choose(mma_instances_for<1>(arch), problem.head_dim, rows_per_request)
                   : choose(mma_instances_for<2>(arch), problem.head_dim, rows_per_request);
    }
    plan->threads = kConsumers;
    if (arch < 75) {
      return Status::error(FV_ERROR_UNSUPPORTED, "route: no grouped kernel for image " +
                                                     (image.empty() ? "of this device" : image) +
                                                     "; scalar_fp32 runs there");
    }
  }
  if (chosen.dim == 0 || problem.head_dim % 16 != 0) {
    return Status::error(FV_ERROR_UNSUPPORTED,
                         "head_dim: " + std::to_string(problem.head_dim) +
                             "; the grouped kernels accept multiples of 16 up to 256");
  }
  if (legacy && kv_bytes == 2) {
    return Status::error(FV_ERROR_UNSUPPORTED,
                         "kv_dtype: the half-precision grouped routes read FP8 caches on CUDA; "
                         "scalar_half reads every cache");
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
  plan->fold = choose_fold(plan->row_tiles * problem.kv_heads, plan->splits, plan->blocks,
                           chosen.folds_groups, legacy);
  if (plan->fold < plan->splits) {
    const int64_t parts = plan->row_tiles * problem.kv_heads * (plan->splits / plan->fold);
    plan->stats_bytes = static_cast<size_t>(ceil_div(parts * tile_rows * 8, 256) * 256);
    plan->workspace_bytes =
        plan->stats_bytes + static_cast<size_t>(parts * chosen.partial_floats * (legacy ? 2 : 4));
  }
  plan->workspace_bytes = std::max<size_t>(plan->workspace_bytes, 64);
  return {};
}

}  // namespace flashverify::cuda
