// The consumers' program: items, tiles, splits. A Pipe brings the tiles:
//   start()          once per block, after its first queries were asked for
//   wait_keys()      address of this warpgroup's half of the next K tile
//   release_keys()   ... which it has read
//   wait_values()    address of the next V tile
//   release_values()
//   peek_values(k)   waits for the V tile that comes after k more K tiles
//   before_publish(), after_publish()  around the barrier that ends a tile
// Tiles come in the order in which they are used: K0 K1 V0 K2 V1 ... V(n-1).
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_LOOP_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_LOOP_CUH_

#include "native/cuda/device/grouped_consumer.cuh"
#include "native/cuda/device/grouped_merge.cuh"

namespace flashverify::cuda {

// Values that steer the loops are the same in every lane; the shuffle says so to
// the compiler, which otherwise serialises wgmma.
FV_DEVICE int uniform(int v) { return __shfl_sync(~0u, v, 0); }

// Where not every row sees every key of a tile: values at or beyond the length
// become zero, since 0 * NaN would reach rows that must not see them. Returns
// whether this thread met a non-finite value among those that some row must not see.
template <class Shape>
FV_RARE bool clean_values(unsigned char* smem, uint32 offset, int first_key) {
  using Kv = typename Shape::Kv;
  constexpr int kChunks = Shape::kRowBytes / 16;
  constexpr int kStep = kConsumers / kChunks;
  const auto& rows =
      *reinterpret_cast<const RowState<Shape::kTileRows>*>(smem + Shape::kRowStateOffset);
  bool found = false;
  int key = threadIdx.x / kChunks;
  // Usually all but the last keys are seen by all.
  if (rows.mask_below <= first_key) key += max_of(rows.mask_from - first_key, 0) / kStep * kStep;
#pragma unroll 1
  for (; key < kUnitTokens; key += kStep) {
    if (first_key + key >= rows.mask_below && first_key + key < rows.mask_from) continue;
    uint4* const chunk = reinterpret_cast<uint4*>(
        smem + offset + key / kHalfTokens * Shape::kHalfBytes +
        tile_offset<Shape::kRowBytes>(key % kHalfTokens, threadIdx.x % kChunks));
    if (first_key + key >= rows.seq_len) {
      *chunk = make_uint4(0, 0, 0, 0);
    } else {
      const uint4 v = *chunk;
      found |= !(Kv::is_finite_quad(v.x) && Kv::is_finite_quad(v.y) && Kv::is_finite_quad(v.z) &&
                 Kv::is_finite_quad(v.w));
    }
  }
  async_proxy_fence();
  return found;
}

// Takes the non-finite values out of such a tile, and notes per d which rows see
// one; `adds` to what is noted already.
template <class Shape>
FV_RARE void note_poison(unsigned char* smem, uint32 offset, int first_key, uint64* poison,
                         bool adds) {
  using Kv = typename Shape::Kv;
  const auto& rows =
      *reinterpret_cast<const RowState<Shape::kTileRows>*>(smem + Shape::kRowStateOffset);
#pragma unroll 1
  for (int d = threadIdx.x; d < Shape::kDim; d += kConsumers) {
    uint64 bits = adds ? poison[d] : 0;
#pragma unroll 1
    for (int key = 0; key < kUnitTokens; ++key) {
      const int byte = d * Kv::kBytes;
      unsigned char* const value = smem + offset + key / kHalfTokens * Shape::kHalfBytes +
                                   tile_offset<Shape::kRowBytes>(key % kHalfTokens, byte >> 4) +
                                   (byte & 15);
      if (Kv::is_finite(value)) continue;
#pragma unroll 1
      for (int row = 0; row < Shape::kTileRows; ++row) {
        const int2 v = rows.visible[row];
        if (first_key + key >= v.x && first_key + key < v.y) bits |= 1ull << row;
      }
      if constexpr (Kv::kBytes == 1) {
        *value = 0;
      } else {
        *reinterpret_cast<unsigned short*>(value) = 0;
      }
    }
    poison[d] = bits;
  }
  async_proxy_fence();
}

template <class Shape, bool kWgmma, class Pipe>
struct GroupedLoop {
  using Kv = typename Shape::Kv;
  using C = Consumer<Shape, kWgmma>;
  const AttentionArgs& p;
  C& c;
  Pipe& pipe;

  FV_DEVICE bool is_partial(int first_key) const {
    return uniform(first_key < c.rows.mask_below || first_key + kUnitTokens > c.rows.mask_from);
  }

  // Ends a tile: P, and the V tile it meets next, are ready for all warps.
  FV_DEVICE void publish(int first_key, bool more_keys) {
    if constexpr (kWgmma) async_proxy_fence();
    pipe.before_publish();
    if (FV_UNLIKELY(is_partial(first_key))) {
      if constexpr (!kWgmma) c.barrier();  // a pipe without mbarriers speaks of this one
      const uint32 offset = pipe.peek_values(more_keys) - c.base;
      const bool found = clean_values<Shape>(c.smem, offset, first_key);
      if (uniform(named_barrier_or(kConsumerBarrier, kConsumers, found))) {
        note_poison<Shape>(c.smem, offset, first_key, poison_of(split_parity),
                           poisoned >> split_parity & 1);
        c.barrier();
        poisoned |= 1 << split_parity;
      }
    } else {
      c.barrier();
    }
    pipe.after_publish();
  }

  // Splits are noted in turns, since one is folded after the next has begun.
  int split_parity;
  int poisoned;  // bit 0, 1: something is noted for such a split
  FV_DEVICE uint64* poison_of(int parity) const {
    return reinterpret_cast<uint64*>(c.smem + Shape::kPoisonOffset) + parity * Shape::kDim;
  }
  FV_DEVICE const uint64* poison_to_apply(int parity) const {
    return FV_UNLIKELY(poisoned >> parity & 1) ? poison_of(parity) : nullptr;
  }

  // Where warpgroups exchange their sums, the split before may still be read from
  // there: one tile per split has no barrier in between.
  FV_DEVICE void close_exchange() const {
    if constexpr (Shape::kKeySplit) c.barrier();
  }

  FV_DEVICE void multiply_keys() {
    c.multiply_keys(pipe.wait_keys());
    pipe.release_keys();
  }

  FV_DEVICE void run_item(const Item& item, const RowTile& tile, int total, const UnitWalk& start) {
    UnitWalk walk = start;
    const int64 part = part_index(p, item.tile, item.head, item.part);
    int first_key = walk.unit * kUnitTokens;
    poisoned = split_parity = 0;
    bool opens = true;  // the tile that P V meets is the first of its split
    c.clear_sums();
    c.clear_products();
    c.clear_split_sum();
    c.clear_group_sum();
    uint32 raw[16];

    multiply_keys();
    c.wait_products();
    c.finish_scores(first_key, is_partial(first_key));
    c.publish_max();
    c.barrier();
    c.decide_references(true);
    c.barrier();
    c.take_references(true);
    c.template exponentiate_blocks<0, Shape::kRowBlocks>();
    c.swap_probabilities();
    publish(first_key, total > 1);

    for (int i = 1; i < total; ++i) {
      const int old_split = walk.split;
      const bool fresh = walk.next(p);
      first_key = walk.unit * kUnitTokens;
      multiply_keys();
      const uint32 values = pipe.wait_values();
      c.load_values(raw, values, 0);
      constexpr int kEarly = Shape::kBatchesPv / 2;  // batches before the exponentials
#pragma unroll
      for (int b = 0; b < kEarly; ++b) c.multiply_values(raw, values, b, !opens || b > 0);
      if constexpr (kEarly == 0) c.wait_products();
      c.finish_scores(first_key, is_partial(first_key));
      const bool in_line = !fresh && !named_barrier_or(kConsumerBarrier, kConsumers, c.exceeds());
      constexpr int kLate = Shape::kBatchesPv - kEarly;
#pragma unroll
      for (int b = 0; b < kLate; ++b) {
        c.multiply_values(raw, values, kEarly + b, !opens || kEarly + b > 0);
        if (!FV_UNLIKELY(!in_line)) {
          if (kLate == 1) {
            c.template exponentiate_blocks<0, Shape::kRowBlocks>();
          } else if (b == 0) {
            c.template exponentiate_blocks<0, Shape::kRowBlocks / 2>();
          } else {
            c.template exponentiate_blocks<Shape::kRowBlocks / 2, Shape::kRowBlocks>();
          }
        }
      }
      pipe.release_values();
      c.wait_products();
      opens = fresh;
      const bool ends_group = fresh && old_split / kChain != walk.split / kChain;
      if (FV_UNLIKELY(!in_line)) {
        if (fresh) {
          close_exchange();
          c.publish_split();
          split_parity ^= 1;
          poisoned &= ~(1 << split_parity);
        }
        c.publish_max();
        c.barrier();
        if (fresh) c.fold_split_stats(ends_group, nullptr);
        c.decide_references(fresh);
        c.barrier();
        c.take_references(fresh);
        c.template exponentiate_blocks<0, Shape::kRowBlocks>();
      }
      c.swap_probabilities();
      publish(first_key, i + 1 < total);
      if (FV_UNLIKELY(fresh)) c.fold_split(ends_group, poison_to_apply(split_parity ^ 1));
    }

    const uint32 values = pipe.wait_values();
    c.load_values(raw, values, 0);
#pragma unroll
    for (int b = 0; b < Shape::kBatchesPv; ++b) c.multiply_values(raw, values, b, !opens || b > 0);
    pipe.release_values();
    c.wait_products();
    close_exchange();
    c.publish_split();
    c.barrier();
    unsigned char* const target =
        p.partials + part * Shape::kPartialFloats * (Shape::kLegacy ? 2 : 4);
    float2* const stats = p.partial_stats + part * Shape::kTileRows;
    const bool finishes = p.fold == p.splits;
    if (!FV_UNLIKELY(p.fold > 1 || finishes)) {
      if (c.thread() < Shape::kTileRows) {
        const float2 state = c.split_state(c.thread());
        c.write_stats(stats, c.thread(), state.x, state.y);
      }
      if constexpr (Shape::kLegacy) c.barrier();
      float v[Shape::kBlocksM][Shape::kRowBlocks][4];
      c.finish_split(v, poison_to_apply(split_parity));
      c.store_partial(target, v);
      return;
    }
    c.fold_split_stats(true, stats);
    if (finishes && c.thread() < Shape::kTileRows) {
      c.rows.output_factor[c.thread()] =
          finish_tile_row<Kv>(p, tile, item.head, c.thread(), c.rows.group_max[c.thread()],
                              c.rows.group_sum[c.thread()], true);
    }
    c.barrier();
    c.fold_split(true, poison_to_apply(split_parity));
    if (!finishes) {
      c.store_partial(target, c.split_sum);
    } else if constexpr (Shape::kFoldsGroups) {
      write_output(tile, item.head, c.group_sum);
    } else {
      write_output(tile, item.head, c.split_sum);  // one group: its sum is the row's
    }
  }

  // Through shared memory (P's, which nobody reads now), so that the code is short
  // and a row's elements leave side by side.
  FV_DEVICE void write_output(const RowTile& tile, int head,
                              const float (&v)[Shape::kBlocksM][Shape::kRowBlocks][4]) const {
    float* const staged = reinterpret_cast<float*>(c.smem + Shape::kPOffset);
    static_assert(Shape::kDim * 4 <= 4 * kUnitTokens * 2, "a row of floats in a row of P");
    if (c.owner()) {
#pragma unroll
      for (int j = 0; j < Shape::kRowBlocks; ++j) {
        const float2 f = *reinterpret_cast<const float2*>(&c.rows.output_factor[8 * j + 2 * c.t]);
#pragma unroll
        for (int m = 0; m < Shape::kBlocksM; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int row = 8 * j + 2 * c.t + (e & 1);
            const int d = fragment_column<Shape>(c.warp * Shape::kBlocksM + m, c.g, e >> 1);
            staged[row * Shape::kDim + d] = finish_value(v[m][j][e], (e & 1) ? f.y : f.x);
          }
        }
      }
    }
    c.barrier();
    const int bytes = element_bytes(p.out_type);
#pragma unroll 1
    for (int row = c.warp; row < tile.count; row += kConsumerWarps) {
      unsigned char* const target = p.out + output_offset(p, tile, head, row);
#pragma unroll 1
      for (int d = c.lane; d < p.head_dim; d += 32) {
        store_element(target + d * bytes, p.out_type, staged[row * Shape::kDim + d]);
      }
    }
  }

  FV_DEVICE void run() {
    const int items = item_count(p);
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const Item item = item_at(p, index);
      RowTile tile = locate_row_tile<Shape::kTileRows>(p, item.tile, c.lane);
      // Asked for first: they are what the block waits for.
      const int length = p.seq_lens[tile.request];
      const bool fetched = c.fetches_queries();
      if (index != blockIdx.x) c.barrier();  // the item before has been read
      if (fetched) c.fetch_queries(tile, item.head);
      if (index == blockIdx.x) pipe.start();
      const float k_scale =
          p.k_scale == nullptr ? p.k_scale_number : p.k_scale[item.head * p.k_scale_stride];
      resolve_row_tile(p, tile, length, c.lane);
      const int begin = uniform(tile.unit_begin);
      const int end = uniform(tile.unit_end);
      const int total = uniform(unit_count(p, item, begin, end));
      if (total <= 0) {
        // The copies of the next queries, or of the merge, must not meet these.
        copy_async_wait();
        if (p.fold == p.splits) write_unseen<Shape>(p, tile, item.head, c.thread());
        continue;
      }
      if (c.thread() == 0) {
        const int last = tile.first + tile.count - 1;
        c.rows.mask_from =
            visible_keys(p, tile.seq_len, tile.query_len, token_of(p, tile.first)).end;
        c.rows.mask_below = visible_keys(p, tile.seq_len, tile.query_len, token_of(p, last)).begin;
        c.rows.seq_len = tile.seq_len;
      }
      c.store_queries(tile, item.head, fetched, p.score_scale * k_scale / Kv::kScale);
      pipe.open_item(item, tile, total);
      c.barrier();
      UnitWalk walk;
      walk.start(p, item, begin, end);
      run_item(item, tile, total, walk);
    }
    if (static_cast<int>(blockIdx.x) >= items) pipe.start();
    if (p.fold == p.splits) return;
    Merger<Shape> merger = {p, *reinterpret_cast<MergeScratch*>(c.smem), c.thread()};
    merger.run();
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_LOOP_CUH_
