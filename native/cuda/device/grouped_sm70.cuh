// The grouped kernel for sm_70 and sm_75: no asynchronous copies, no ldmatrix. Keys
// and values go from memory to registers ahead of their use, and are decoded there;
// shared memory holds queries, probabilities and what warps tell each other.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM70_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM70_CUH_

#include "native/cuda/device/grouped_consumer_sm70.cuh"
#include "native/cuda/device/grouped_merge_sm70.cuh"

namespace flashverify::cuda {

// What non-finite values of one unit demand, where not every row sees every key:
// they are noted per d and row, and P V then reads zeros in their place, since
// 0 * NaN would reach rows that must not see them.
template <class Shape>
FV_RARE bool finds_non_finite(const AttentionArgs& p, const unsigned char* values,
                              const int64* offsets) {
  using Kv = typename Shape::Kv;
  const int quads = p.head_dim * Kv::kBytes / 4;
  bool found = false;
#pragma unroll 1
  for (int i = threadIdx.x; i < kUnitTokens * quads; i += kConsumers) {
    const int64 offset = offsets[i / quads];
    uint32 word[1];
    if (offset < 0) continue;
    load_bytes<1>(word, values + offset + i % quads * 4);
    found |= !Kv::is_finite_quad(word[0]);
  }
  return found;
}
template <class Shape>
FV_RARE void note_poison(const AttentionArgs& p, unsigned char* smem, const unsigned char* values,
                         const int64* offsets, int first_key, bool adds) {
  using Kv = typename Shape::Kv;
  const auto& rows =
      *reinterpret_cast<const RowState<Shape::kTileRows>*>(smem + Shape::kRowStateOffset);
  uint64* const poison = reinterpret_cast<uint64*>(smem + Shape::kPoisonOffset);
#pragma unroll 1
  for (int d = threadIdx.x; d < Shape::kDim; d += kConsumers) {
    uint64 bits = adds ? poison[d] : 0;
#pragma unroll 1
    for (int entry = 0; entry < kUnitTokens && d < p.head_dim; ++entry) {
      if (offsets[entry] < 0 || Kv::is_finite(values + offsets[entry] + d * Kv::kBytes)) continue;
      const int key = first_key + (entry & ~3) + LaneSm70<Shape>::key_in_quad(entry & 3);
#pragma unroll 1
      for (int row = 0; row < Shape::kTileRows; ++row) {
        const int2 v = rows.visible[row];
        if (key >= v.x && key < v.y) bits |= 1ull << row;
      }
    }
    poison[d] = bits;
  }
}

template <class Shape>
struct LoopSm70 {
  using Kv = typename Shape::Kv;
  using C = ConsumerSm70<Shape>;
  const AttentionArgs& p;
  C& c;

  FV_DEVICE bool is_partial(int first_key) const {
    return first_key < c.rows.mask_below || first_key + kUnitTokens > c.rows.mask_from;
  }

  // P V of the tile whose scores have become probabilities.
  FV_DEVICE void multiply_values(typename CacheSm70<Shape>::RawValues& first, int parity,
                                 bool scrub) {
    typename CacheSm70<Shape>::RawValues second;
    if constexpr (Shape::kBatchesPv == 1) {
      c.multiply_values(first, 0, scrub);
    } else {
#pragma unroll 1
      for (int batch = 0; batch < Shape::kBatchesPv; batch += 2) {
        c.cache.load_values(second, batch + 1, parity);
        c.multiply_values(first, batch, scrub);
        if (batch + 2 < Shape::kBatchesPv) c.cache.load_values(first, batch + 2, parity);
        c.multiply_values(second, batch + 1, scrub);
      }
    }
  }

  // Where an item's partial lies. Worked out where it is needed, like all that the
  // end of an item takes: registers are few.
  FV_DEVICE int64 part_of(int index) const {
    const Item item = item_at(p, index);
    return part_index(p, item.tile, item.head, item.part);
  }
  FV_DEVICE unsigned char* partial_of(int index) const {
    return p.partials + part_of(index) * Shape::kPartialFloats * (Shape::kLegacy ? 2 : 4);
  }

  FV_DEVICE void run_item(int index, const Item& item, const RowTile& tile, int total) {
    const int* const table = p.page_table + tile.request * p.page_table_row_stride;
    bool folded = false;  // something lies in the partial's place already
    UnitWalk walk;
    walk.start(p, item, tile.unit_begin, tile.unit_end);
    UnitWalk ahead = walk;  // the unit looked up last
    c.cache.open(item.head);
    c.cache.look_up(table, ahead.unit, tile.seq_len);
    c.cache.fetch_keys(0);
    if (total > 1) {
      ahead.next(p);
      c.cache.look_up(table, ahead.unit, tile.seq_len);
    }
    if constexpr (!Shape::kFoldsInMemory) c.clear(c.split_sum);
    if constexpr (Shape::kFoldsGroups) c.clear(c.group_sum);
    bool opens = true;  // the tile is the first of its split
    bool poisoned = false;
    c.barrier();

#pragma unroll 1
    for (int i = 0; i < total; ++i) {
      const int parity = i & 1;
      const int first_key = walk.unit * kUnitTokens;
      const bool partial = is_partial(first_key);
      typename CacheSm70<Shape>::RawValues raw;
      c.cache.load_values(raw, 0, parity);
      c.multiply_keys();
      c.barrier();  // everybody has left the tile before
      if (i + 1 < total) {
        c.cache.fetch_keys(parity ^ 1);
        if (i + 2 < total) {
          ahead.next(p);
          c.cache.look_up(table, ahead.unit, tile.seq_len);
        }
      }
      c.complete_scores();
      c.finish_scores(first_key, partial);
      if (FV_UNLIKELY(__syncthreads_or(opens || c.exceeds()))) {
        c.publish_max();
        c.barrier();
        c.decide_references(opens);
        c.barrier();
        c.take_references(opens);
      }
      c.exponentiate();
      bool scrub = false;
      if (FV_UNLIKELY(partial)) {
        const unsigned char* const values = p.v.data + item_at(p, index).head * p.v.head_stride;
        const int64* const offsets = c.cache.value_offsets + parity * kUnitTokens;
        scrub = __syncthreads_or(finds_non_finite<Shape>(p, values, offsets));
        if (scrub) {
          note_poison<Shape>(p, c.smem, values, offsets, first_key, poisoned);
          poisoned = true;
        }
      }
      c.barrier();
      multiply_values(raw, parity, scrub);

      const int old_split = walk.split;
      const bool last = i + 1 == total;
      opens = last || walk.next(p);
      if (!opens) continue;
      const bool ends_group = last || old_split / kChain != walk.split / kChain;
      c.publish_split();
      c.barrier();
      c.fold_split_stats(ends_group, p.partial_stats + part_of(index) * Shape::kTileRows);
      c.collect_sums(poisoned);
      poisoned = false;
      c.barrier();
      unsigned char* const target = partial_of(index);
      c.fold_split(ends_group, folded ? target : nullptr);
      if (p.fold < p.splits && (last || Shape::kFoldsInMemory)) c.store_partial(target);
      folded = true;
    }
    if (p.fold == p.splits) {
      const Item again = item_at(p, index);
      write_output(row_tile<Shape::kTileRows>(p, again.tile, c.at.lane), again.head);
    }
  }

  // Through shared memory, so that a row's elements leave side by side.
  FV_DEVICE void write_output(const RowTile& tile, int head) {
    if (c.at.thread() < Shape::kTileRows) {
      c.rows.output_factor[c.at.thread()] =
          finish_tile_row<Kv>(p, tile, head, c.at.thread(), c.rows.group_max[c.at.thread()],
                              c.rows.group_sum[c.at.thread()], true);
    }
    float* const staged = reinterpret_cast<float*>(c.smem + Shape::kPOffset);
    if (c.at.owner()) {
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 2; ++i) {
        // One group: its sum is the row's.
        float4 x;
        if constexpr (Shape::kFoldsGroups) {
          x = C::quarter(c.group_sum, i);
        } else {
          x = c.folded(i);
        }
        float* const target = staged + c.at.product_row(i / 2 % C::kN, i & 1) * Shape::kDim +
                              c.at.product_column(i / (2 * C::kN));
        target[0] = x.x;
        target[Shape::kDim] = x.y;
        target[1] = x.z;
        target[Shape::kDim + 1] = x.w;
      }
    }
    c.barrier();
    const int bytes = element_bytes(p.out_type);
#pragma unroll 1
    for (int row = c.at.warp; row < tile.count; row += kConsumerWarps) {
      unsigned char* const target = p.out + output_offset(p, tile, head, row);
      const float factor = c.rows.output_factor[row];
#pragma unroll 1
      for (int d = c.at.lane; d < p.head_dim; d += 32) {
        store_element(target + d * bytes, p.out_type,
                      finish_value(staged[row * Shape::kDim + d], factor));
      }
    }
  }

  FV_DEVICE void run() {
    const int items = item_count(p);
#pragma unroll 1
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const Item item = item_at(p, index);
      const RowTile tile = row_tile<Shape::kTileRows>(p, item.tile, c.at.lane);
      const int total = unit_count(p, item, tile.unit_begin, tile.unit_end);
      if (total <= 0) {
        if (p.fold == p.splits) write_unseen<Shape>(p, tile, item.head, c.at.thread());
        continue;
      }
      c.barrier();  // the item before has been read
      if (c.at.thread() == 0) {
        const int last = tile.first + tile.count - 1;
        c.rows.mask_from =
            visible_keys(p, tile.seq_len, tile.query_len, token_of(p, tile.first)).end;
        c.rows.mask_below = visible_keys(p, tile.seq_len, tile.query_len, token_of(p, last)).begin;
      }
      const float k_scale =
          p.k_scale == nullptr ? p.k_scale_number : p.k_scale[item.head * p.k_scale_stride];
      c.store_queries(tile, item.head, p.score_scale * k_scale / Kv::kScale);
      run_item(index, item, tile, total);
    }
    if (p.fold == p.splits) return;
    MergerSm70<Shape> merger = {p, *reinterpret_cast<MergeScratchSm70*>(c.smem), c.at.thread()};
    merger.run();
  }
};

template <class Shape>
FV_DEVICE void grouped_sm70(const AttentionArgs& p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  ConsumerSm70<Shape> consumer(p, smem, __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0));
  LoopSm70<Shape> loop = {p, consumer};
  loop.run();
}

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM70_CUH_
