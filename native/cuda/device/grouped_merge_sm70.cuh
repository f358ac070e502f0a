// The merge of the sm_70 grouped kernel: the folds of grouped_merge.cuh, in the
// same order, with the partials in registers, since there is no asynchronous copy
// and sm_75 has no room for them in shared memory.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_MERGE_SM70_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_MERGE_SM70_CUH_

#include "native/cuda/device/grouped_geometry_sm70.h"
#include "native/cuda/device/grouped_merge.cuh"

namespace flashverify::cuda {

struct MergeScratchSm70 {
  float2 stats[kMaxSplits][8];  // of the parts, then the factors of their fold
  float2 group_stats[kMaxGroups][8];
  float2 group_factors[kMaxGroups][8];
  float4 group_values[kMaxGroups][kSlicePositions];
  float output_factor[8];
};
static_assert(sizeof(MergeScratchSm70) == kMergeBytesSm70, "what the geometry sets aside");

template <class Shape>
struct MergerSm70 {
  using Kv = typename Shape::Kv;
  // A slice: eight rows, 16 d.
  static constexpr int kSlices = Shape::kPartialFloats / 4 / kSlicePositions;
  static constexpr int kGroupsPerWarp = kMaxGroups / kConsumerWarps;
  const AttentionArgs& p;
  MergeScratchSm70& scratch;
  const int thread;

  FV_DEVICE float4 load(int64 part, int position) const {
    const int64 index = part * (Shape::kPartialFloats / 4) + position;
    if constexpr (Shape::kLegacy) {
      const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p.partials) + index);
      const float2 a = unpack_half2(v.x);
      const float2 b = unpack_half2(v.y);
      return make_float4(a.x, a.y, b.x, b.y);
    } else {
      return __ldcg(reinterpret_cast<const float4*>(p.partials) + index);
    }
  }

  // Parts are splits, of which `chain` make a group, or groups already (chain 1).
  FV_DEVICE void merge(const RowTile& tile, int head, int64 first_part, int slice) const {
    const int warp = thread >> 5;
    const int lane = thread & 31;
    const int row_block = slice % Shape::kRowBlocks;
    const int parts = p.parts;
    const int chain = p.fold == 1 ? min_of(kChain, parts) : 1;
    const int groups = parts / chain;

    float4 values[kGroupsPerWarp][kChain];
#pragma unroll
    for (int i = 0; i < kGroupsPerWarp; ++i) {
#pragma unroll
      for (int k = 0; k < kChain; ++k) {
        const int part = (warp + i * kConsumerWarps) * chain + k;
        values[i][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k < chain && part < parts && is_stored(p, tile, part))
          values[i][k] = load(first_part + part, slice * kSlicePositions + lane);
      }
    }
#pragma unroll
    for (int k = 0; k < kMaxSplits * 8 / kConsumers; ++k) {
      const int i = thread + k * kConsumers;
      const int part = i >> 3;
      float2 s = make_float2(-kInfinity, 0.0f);
      if (part < parts && is_stored(p, tile, part)) {
        s = __ldcg(
            &p.partial_stats[(first_part + part) * Shape::kTileRows + row_block * 8 + (i & 7)]);
      }
      scratch.stats[part][i & 7] = s;
    }
    __syncthreads();

    if (thread < groups * 8) {
      float2* const states = &scratch.stats[(thread >> 3) * chain][thread & 7];
      scratch.group_stats[thread >> 3][thread & 7] = fold_states(states, states, chain);
    }
    __syncthreads();
    if (thread < 8) {
      const float2 state =
          fold_states(&scratch.group_stats[0][thread], &scratch.group_factors[0][thread], groups);
      // The log-sum-exp once per row: by the slice of its first d.
      scratch.output_factor[thread] = finish_tile_row<Kv>(
          p, tile, head, row_block * 8 + thread, state.x, state.y, slice < Shape::kRowBlocks);
    }
#pragma unroll
    for (int i = 0; i < kGroupsPerWarp; ++i) {
      const int group = warp + i * kConsumerWarps;
      if (group >= groups) break;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int k = 0; k < kChain; ++k) {
        if (k < chain) {
          sum = fold_values(sum, values[i][k], &scratch.stats[group * chain + k][2 * (lane & 3)]);
        }
      }
      scratch.group_values[group][lane] = sum;
    }
    __syncthreads();
    if (warp == 0) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int i = 0; i < groups; ++i) {
        sum = fold_values(sum, scratch.group_values[i][lane],
                          &scratch.group_factors[i][2 * (lane & 3)]);
      }
      store_fragment<Shape>(
          p, tile, head, 8 * row_block + 2 * (lane & 3), slice / Shape::kRowBlocks, lane >> 2, sum,
          scratch.output_factor[2 * (lane & 3)], scratch.output_factor[2 * (lane & 3) + 1]);
    }
    __syncthreads();
  }

  FV_DEVICE void run() const {
    const int work = p.row_tiles * p.kv_heads * kSlices;
    arrive_at_grid_barrier(p.barrier, thread);
    wait_for_grid(p.barrier, thread);
    int tile_index = -1;
    RowTile tile = {};
#pragma unroll 1
    for (int index = blockIdx.x; index < work; index += gridDim.x) {
      const int slice = index % kSlices;
      const int tile_head = index / kSlices;
      const int next = divide_by_heads(p, tile_head);
      const int head = tile_head - next * p.kv_heads;
      if (next != tile_index) {
        tile_index = next;
        tile = row_tile<Shape::kTileRows>(p, tile_index, thread & 31);
      }
      merge(tile, head, part_index(p, next, head, 0), slice);
    }
    leave_grid_barrier(p.barrier, thread);
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_MERGE_SM70_CUH_
