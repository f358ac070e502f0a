// The end of a grouped launch: folds stored splits into groups, groups into the
// row's state, and writes the output. Also the writers of finished rows.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_MERGE_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_MERGE_CUH_

#include "native/cuda/device/grouped_shape.cuh"
#include "native/cuda/device/state.cuh"
#include "native/cuda/device/work.cuh"

namespace flashverify::cuda {

FV_DEVICE int64 output_offset(const AttentionArgs& p, const RowTile& tile, int head, int row) {
  const int index = tile.first + row;
  const int token = token_of(p, index);
  return (tile.first_row + token) * p.out_row_stride +
         (head * p.group + index - token * p.group) * p.out_head_stride;
}

// v: (even row, first d), (odd row, first d), (even row, second d), (odd ...), as
// an accumulator fragment of block `block` of 16 d holds them.
template <class Shape>
FV_DEVICE void store_fragment(const AttentionArgs& p, const RowTile& tile, int head, int row,
                              int block, int g, float4 v, float even, float odd) {
  const int first = fragment_column<Shape>(block, g, 0);
  const int second = fragment_column<Shape>(block, g, 1);
  const int bytes = element_bytes(p.out_type);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (row + e >= tile.count) continue;
    unsigned char* target = p.out + output_offset(p, tile, head, row + e);
    const float factor = e ? odd : even;
    const float x = finish_value(e ? v.y : v.x, factor);
    const float y = finish_value(e ? v.w : v.z, factor);
    if (Shape::kColumnsAdjacent && p.out_type != kFloat32 && first < p.head_dim &&
        (reinterpret_cast<uint64>(target) & 3) == 0) {
      *reinterpret_cast<uint32*>(target + first * 2) =
          p.out_type == kFloat16 ? pack_half2(x, y) : pack_bfloat2(x, y);
    } else {
      if (first < p.head_dim) store_element(target + first * bytes, p.out_type, x);
      if (second < p.head_dim) store_element(target + second * bytes, p.out_type, y);
    }
  }
}

FV_DEVICE float* lse_address(const AttentionArgs& p, const RowTile& tile, int head, int row) {
  const int index = tile.first + row;
  const int token = token_of(p, index);
  return p.lse + (tile.first_row + token) * p.lse_row_stride +
         (head * p.group + index - token * p.group) * p.lse_head_stride;
}
// Returns the row's output factor and, where `writes`, stores its log-sum-exp.
template <class Kv>
FV_DEVICE float finish_tile_row(const AttentionArgs& p, const RowTile& tile, int head, int row,
                                float max, float sum, bool writes) {
  if (row >= tile.count) return 0.0f;
  const float* sink =
      p.sinks == nullptr ? nullptr : p.sinks + head * p.group + (tile.first + row) % p.group;
  const float scale = p.v_scale == nullptr ? p.v_scale_number : p.v_scale[head * p.v_scale_stride];
  float lse;
  float factor = finish_row(max, sum, sink, scale / Kv::kScale, lse);
  if (tile.bad) factor = lse = __int_as_float(0x7fffffff);
  if (writes && p.lse != nullptr) *lse_address(p, tile, head, row) = lse;
  return factor;
}

// Rows that no unit reaches: 0 and -inf, or NaN where the length was unusable.
template <class Shape>
FV_RARE void write_unseen(const AttentionArgs& p, RowTile tile, int head, int thread) {
  const float value = tile.bad ? __int_as_float(0x7fffffff) : 0.0f;
#pragma unroll 1
  for (int i = thread; i < tile.count * p.head_dim; i += kConsumers) {
    const int row = i / p.head_dim;
    const int d = i % p.head_dim;
    store_element(p.out + output_offset(p, tile, head, row) + d * element_bytes(p.out_type),
                  p.out_type, value);
  }
  if (thread < tile.count && p.lse != nullptr) {
    *lse_address(p, tile, head, thread) = tile.bad ? value : -kInfinity;
  }
}

// A barrier of the grid, whose blocks are all co-resident: the launch is
// cooperative. Each block arrives, waits for all if it needs them, and leaves, which
// makes the counters zero again; that takes an answer from memory, and is done when
// nobody waits any more.
FV_DEVICE void arrive_at_grid_barrier(uint32* counters, int thread) {
  named_barrier(1, kConsumers);
  if (thread == 0) add_release(&counters[0], 1u);
}
FV_DEVICE void wait_for_grid(const uint32* counters, int thread) {
  if (thread == 0) {
    while (load_acquire(&counters[0]) < gridDim.x) {
    }
  }
  named_barrier(1, kConsumers);
}
FV_DEVICE void leave_grid_barrier(uint32* counters, int thread) {
  if (thread == 0 && atomicAdd(&counters[1], 1u) == gridDim.x - 1) {
    counters[0] = 0;
    counters[1] = 0;
  }
}

struct MergeScratch {
  float4 values[kMaxSplits][kSlicePositions];  // of the parts; halves lie packed in front
  float2 stats[kMaxSplits][8];                 // then the factors of their fold
  float2 group_stats[kMaxGroups][8];
  float2 group_factors[kMaxGroups][8];
  float4 group_values[kMaxGroups][kSlicePositions];
  float output_factor[8];
};
static_assert(sizeof(MergeScratch) == kMergeBytes, "what the geometry sets aside");

// `factors`: of rows 0 and 1 of a pair, side by side.
FV_DEVICE float4 fold_values(float4 a, float4 b, const float2* factors) {
  const float4 f = *reinterpret_cast<const float4*>(factors);
  const FoldFactors even = {f.x, f.y};
  const FoldFactors odd = {f.z, f.w};
  return make_float4(fold_value(a.x, b.x, even), fold_value(a.y, b.y, odd),
                     fold_value(a.z, b.z, even), fold_value(a.w, b.w, odd));
}

// Whether some unit of [unit_begin, unit_end) belongs to the splits of a part: whether
// its partial was stored. Distances are counted from the split of unit_begin on, the
// last one being followed by it.
FV_DEVICE bool is_stored(const AttentionArgs& p, const RowTile& tile, int part) {
  const int distance = (part * p.fold - tile.unit_begin) & (p.splits - 1);
  const int units = tile.unit_end - tile.unit_begin;
  return units > 0 && (distance < units || distance > p.splits - p.fold);
}

// Folds `count` states of a row, eight apart, left to right, and writes each one's
// factors; returns the state. In steps of four whose exponentials overlap: only the
// maxima and the sums wait for each other.
FV_DEVICE float2 fold_states(const float2* states, float2* factors, int count) {
  float max = -kInfinity;
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < count; first += 4) {
    float2 s[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      s[k] = first + k < count ? states[8 * (first + k)] : make_float2(-kInfinity, 0.0f);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const FoldFactors f = fold_stats(max, sum, s[k].x, s[k].y);
      if (first + k < count) factors[8 * (first + k)] = make_float2(f.old, f.add);
    }
  }
  return make_float2(max, sum);
}

// The merge runs once per launch, when everybody waits for it, and its code comes
// from memory then: everything here is a loop, and the loads that must overlap are
// asynchronous copies. A block that waits for the others merges nothing meanwhile,
// which brings the code into its processor.
template <class Shape>
struct Merger {
  using Kv = typename Shape::Kv;
  const AttentionArgs& p;
  MergeScratch& scratch;
  const int thread;

  FV_DEVICE void barrier() const { named_barrier(1, kConsumers); }

  FV_DEVICE float4 value(int part, int lane) const {
    if constexpr (Shape::kLegacy) {
      const uint2 v = reinterpret_cast<const uint2*>(scratch.values)[part * kSlicePositions + lane];
      const float2 a = unpack_half2(v.x);
      const float2 b = unpack_half2(v.y);
      return make_float4(a.x, a.y, b.x, b.y);
    } else {
      return scratch.values[part][lane];
    }
  }

  // Parts are splits, of which `chain` make a group, or groups already (chain 1).
  // A row that nothing was stored for comes out as one that saw nothing.
  // `rehearses`: with an empty tile, and few parts.
  FV_DEVICE void merge(const RowTile& tile, int head, int64 first_part, int slice,
                       bool rehearses) const {
    constexpr int kSlicesPerBlock = Shape::kOwners / kSlicePositions;  // of a row block and 16 d
    constexpr int kBytes = Shape::kLegacy ? 8 : 16;
    const int warp = thread >> 5;
    const int lane = thread & 31;
    const int position = slice * kSlicePositions + lane;
    const int row_block = slice / kSlicesPerBlock % Shape::kRowBlocks;
    const int parts = rehearses ? min_of(kChain, p.parts) : p.parts;
    const int chain = p.fold == 1 ? min_of(kChain, parts) : 1;
    const int groups = parts / chain;

    // Statistics come first: their folds run while the values are on the way.
#pragma unroll 1
    for (int i = thread; i < parts * 8; i += kConsumers) {
      const int part = i >> 3;
      const float2* from =
          &p.partial_stats[(first_part + part) * Shape::kTileRows + row_block * 8 + (i & 7)];
      if (is_stored(p, tile, part)) {
        copy_async<8>(shared_address(&scratch.stats[part][i & 7]),
                      reinterpret_cast<const unsigned char*>(from), true);
      } else {
        scratch.stats[part][i & 7] = make_float2(-kInfinity, 0.0f);
      }
    }
    copy_async_end_batch();
    const unsigned char* source =
        p.partials + ((first_part + warp) * (Shape::kPartialFloats / 4) + position) * kBytes;
    uint32 target = shared_address(scratch.values) + (warp * kSlicePositions + lane) * kBytes;
#pragma unroll 2
    for (int part = warp; part < parts; part += kConsumerWarps) {
      copy_async<kBytes>(target, source, is_stored(p, tile, part));
      source += kConsumerWarps * (Shape::kPartialFloats / 4) * kBytes;
      target += kConsumerWarps * kSlicePositions * kBytes;
    }
    copy_async_end_batch();
    copy_async_wait_but_last();
    barrier();

#pragma unroll 1
    for (int i = thread; i < groups * 8; i += kConsumers) {
      float2* const states = &scratch.stats[(i >> 3) * chain][i & 7];
      scratch.group_stats[i >> 3][i & 7] = fold_states(states, states, chain);
    }
    copy_async_wait();
    barrier();
    if (thread < 8) {
      const float2 state =
          fold_states(&scratch.group_stats[0][thread], &scratch.group_factors[0][thread], groups);
      // The log-sum-exp once per row: by the slice of its first d.
      const bool writes_lse =
          slice % kSlicesPerBlock == 0 && slice < kSlicesPerBlock * Shape::kRowBlocks;
      scratch.output_factor[thread] =
          finish_tile_row<Kv>(p, tile, head, row_block * 8 + thread, state.x, state.y, writes_lse);
    }
    // The first warp folds the groups' statistics, the others their values.
#pragma unroll 1
    for (int group = warp == 0 ? groups : warp - 1; group < groups; group += kConsumerWarps - 1) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int k = 0; k < chain; ++k) {
        const int part = group * chain + k;
        sum = fold_values(sum, value(part, lane), &scratch.stats[part][2 * (lane & 3)]);
      }
      scratch.group_values[group][lane] = sum;
    }
    barrier();
    if (warp == 0) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int i = 0; i < groups; ++i) {
        sum = fold_values(sum, scratch.group_values[i][lane],
                          &scratch.group_factors[i][2 * (lane & 3)]);
      }
      finish(tile, head, position, sum);
    }
    barrier();
  }

  FV_DEVICE void finish(const RowTile& tile, int head, int position, float4 v) const {
    const int owner = position % Shape::kOwners;
    const int lane = owner & 31;
    const int j = position / Shape::kOwners % Shape::kRowBlocks;
    const int m = position / Shape::kOwners / Shape::kRowBlocks;
    const float even = scratch.output_factor[2 * (lane & 3)];
    const float odd = scratch.output_factor[2 * (lane & 3) + 1];
    store_fragment<Shape>(p, tile, head, 8 * j + 2 * (lane & 3), (owner >> 5) * Shape::kBlocksM + m,
                          lane >> 2, v, even, odd);
  }

  FV_DEVICE void run() const {
    constexpr int kSlices = Shape::kPartialFloats / 4 / kSlicePositions;
    const int work = p.row_tiles * p.kv_heads * kSlices;
    arrive_at_grid_barrier(p.barrier, thread);
    bool rehearses = true;
    int tile_index = -1;
    RowTile tile = {};
#pragma unroll 1
    for (int index = blockIdx.x; index < work;) {
      const int slice = index % kSlices;
      const int tile_head = index / kSlices;
      const int next = divide_by_heads(p, tile_head);
      const int head = tile_head - next * p.kv_heads;
      if (next != tile_index) {
        tile_index = next;
        tile = row_tile<Shape::kTileRows>(p, tile_index, thread & 31);
      }
      merge(rehearses ? RowTile{} : tile, head, part_index(p, next, head, 0), slice, rehearses);
      if (rehearses) {
        rehearses = false;
        wait_for_grid(p.barrier, thread);
      } else {
        index += gridDim.x;
      }
    }
    leave_grid_barrier(p.barrier, thread);
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_MERGE_CUH_
