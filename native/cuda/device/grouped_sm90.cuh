// The grouped kernel for sm_90a: two consumer warpgroups with wgmma, a producer
// warpgroup that fills a ring of tiles, by the bulk copy engine where the cache's
// strides allow it, by plain loads of any alignment otherwise.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM90_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM90_CUH_

#include "native/cuda/device/grouped_loop.cuh"

namespace flashverify::cuda {

// cuTensorMapEncodeTiled's result, opaque here.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};
// Boxes of a whole half tile and of one granule, for K and V.
struct GroupedMaps {
  TensorMap half[2];
  TensorMap granule[2];
};

constexpr int kProducers = 128;
constexpr int kStartBarrier = 3;
constexpr int kStarting = kConsumers + 64;  // threads: the consumers, two warps of producers
constexpr int kProducerBarrier = 2;

template <class Shape>
struct RingPosition {
  int slot = 0;
  uint32 round = 0;
  FV_DEVICE void advance() {
    if (++slot == Shape::kSlots) {
      slot = 0;
      round ^= 1;
    }
  }
};
template <class Shape>
FV_DEVICE uint32 full_barrier(uint32 base, int slot, int half) {
  return base + Shape::kBarrierOffset + 8 * (2 * slot + half);
}
template <class Shape>
FV_DEVICE uint32 empty_barrier(uint32 base, int slot) {
  return base + Shape::kBarrierOffset + 8 * (2 * kMaxSlots + slot);
}

template <class Shape>
struct RingPipe {
  const AttentionArgs& p;
  const uint32 base;
  const int lane;
  const int warpgroup;
  RingPosition<Shape> position;

  FV_DEVICE void start() const {
    if (p.bulk_copy) named_barrier(kStartBarrier, kStarting);
  }
  FV_DEVICE void open_item(const Item&, const RowTile&, int) {}
  FV_DEVICE uint32 address(int slot) const {
    return base + Shape::kRingOffset + slot * Shape::kSlotBytes;
  }
  FV_DEVICE uint32 wait_keys() {
    mbarrier_wait(full_barrier<Shape>(base, position.slot, warpgroup), position.round);
    return address(position.slot) + warpgroup * Shape::kHalfBytes;
  }
  FV_DEVICE uint32 wait_values() {
    mbarrier_wait(full_barrier<Shape>(base, position.slot, 0), position.round);
    mbarrier_wait(full_barrier<Shape>(base, position.slot, 1), position.round);
    return address(position.slot);
  }
  FV_DEVICE void release() {
    if (lane == 0 || !p.bulk_copy) mbarrier_arrive(empty_barrier<Shape>(base, position.slot));
    position.advance();
  }
  FV_DEVICE void release_keys() { release(); }
  FV_DEVICE void release_values() { release(); }
  FV_DEVICE uint32 peek_values(bool more_keys) const {
    RingPosition<Shape> next = position;
    if (more_keys) next.advance();
    mbarrier_wait(full_barrier<Shape>(base, next.slot, 0), next.round);
    mbarrier_wait(full_barrier<Shape>(base, next.slot, 1), next.round);
    return address(next.slot);
  }
  FV_DEVICE void before_publish() const {}
  FV_DEVICE void after_publish() const {}
};

template <class Shape>
struct Producer {
  using Kv = typename Shape::Kv;
  const AttentionArgs& p;
  const GroupedMaps& maps;
  unsigned char* const smem;
  const uint32 base;
  const int lane;
  const int warp;  // of the producer warpgroup
  const uint64 policy;
  RingPosition<Shape> position;
  const int* table;
  int head;
  int seq_len;

  FV_DEVICE void wait_empty() const {
    mbarrier_wait(empty_barrier<Shape>(base, position.slot), position.round ^ 1);
  }

  // Lane i: page and offset of granule i of a unit; of no use, but readable, where
  // the granule lies beyond the length.
  struct Granule {
    int page;
    int token;
  };
  FV_DEVICE Granule look_up(int unit) const {
    Granule g = {0, 0};
    const int token = unit * kUnitTokens + lane * p.granule_tokens;
    if (lane * p.granule_tokens < kUnitTokens) {
      const int index = token / p.page_size;
      g.page = table[min_of(index, p.max_pages - 1)];
      g.token = token - index * p.page_size;
    }
    return g;
  }

  FV_DEVICE void copy_unit(int unit, Granule granule, int which) {
    constexpr int kColumns = Shape::kRowBytes >= 128 ? Shape::kRowBytes / 128 : 1;
    constexpr int kColumnWidth = Shape::kRowBytes >= 128 ? 128 : Shape::kRowBytes;
    // The copy engine reads no page that is not there; it brings zeros.
    if (which == 0 && unit * kUnitTokens + lane * p.granule_tokens < seq_len) {
      usable_page(p, granule.page);
    }
    if (lane == 0) wait_empty();
    __syncwarp();
    const int per_half = kHalfTokens / p.granule_tokens;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 full = full_barrier<Shape>(base, position.slot, half);
      const uint32 target =
          base + Shape::kRingOffset + position.slot * Shape::kSlotBytes + half * Shape::kHalfBytes;
      const int first = unit * kUnitTokens + half * kHalfTokens;
      const int valid =
          min_of(max_of(seq_len - first + p.granule_tokens - 1, 0) / p.granule_tokens, per_half);
      const int source_lane = half * per_half;
      const int page = __shfl_sync(~0u, granule.page, source_lane);
      const int token = __shfl_sync(~0u, granule.token, source_lane);
      if (lane == 0) {
        if (valid > 0) {
          mbarrier_expect(full, valid * p.granule_tokens * Shape::kRowBytes);
        } else {
          mbarrier_arrive(full);
        }
      }
      if (valid == per_half && token + kHalfTokens <= p.page_size) {
        if (lane == 0) {
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            bulk_copy_box(target + column * 8192, &maps.half[which], column * 128, head, token,
                          page, full, policy);
          }
        }
      } else {
        __syncwarp();
        const int mine = lane - source_lane;
        if (mine >= 0 && mine < valid) {
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            bulk_copy_box(target + column * 8192 + mine * p.granule_tokens * kColumnWidth,
                          &maps.granule[which], column * 128, head, granule.token, granule.page,
                          full, policy);
          }
        }
      }
    }
    position.advance();
  }

  // All four warps: sixteen bytes of a row at a time, from any address.
  FV_DEVICE void gather_unit(int unit, int which) {
    constexpr int kChunks = Shape::kRowBytes / 16;
    const Cache& cache = which == 0 ? p.k : p.v;
    wait_empty();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      unsigned char* const target =
          smem + Shape::kRingOffset + position.slot * Shape::kSlotBytes + half * Shape::kHalfBytes;
#pragma unroll 1
      for (int i = warp * 32 + lane; i < kHalfTokens * kChunks; i += kProducers) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const int token = unit * kUnitTokens + half * kHalfTokens + row;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (token < seq_len && chunk * 16 < p.head_dim * Kv::kBytes) {
          const int index = token / p.page_size;
          const int page = usable_page(p, table[index]);
          const unsigned char* source = cache.data + page * cache.page_stride +
                                        (token - index * p.page_size) * cache.token_stride +
                                        head * cache.head_stride + chunk * 16;
          if (p.vector_copy) {
            v = __ldcs(reinterpret_cast<const uint4*>(source));
          } else {
            unsigned char* const bytes = target + tile_offset<Shape::kRowBytes>(row, chunk);
#pragma unroll 1
            for (int b = 0; b < 16; ++b) bytes[b] = source[b];
            continue;
          }
        }
        *reinterpret_cast<uint4*>(target + tile_offset<Shape::kRowBytes>(row, chunk)) = v;
      }
      mbarrier_arrive(full_barrier<Shape>(base, position.slot, half));
    }
    position.advance();
  }

  FV_DEVICE void run() {
    const int items = item_count(p);
    if (p.bulk_copy && lane < 4) {
      const TensorMap* map = lane < 2 ? &maps.half[lane] : &maps.granule[lane - 2];
      asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
    }
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const Item item = item_at(p, index);
      RowTile tile = locate_row_tile<Shape::kTileRows>(p, item.tile, lane);
      table = p.page_table + tile.request * p.page_table_row_stride;
      const int length = p.seq_lens[tile.request];
      // The first unit, if no window moves it: its pages do not wait for the length.
      Granule first_granule = {0, 0};
      if (p.bulk_copy) first_granule = look_up(item.first_split);
      resolve_row_tile(p, tile, length, lane);
      const int total = unit_count(p, item, tile.unit_begin, tile.unit_end);
      if (total <= 0) continue;
      head = item.head;
      seq_len = tile.seq_len;
      UnitWalk walk;
      walk.start(p, item, tile.unit_begin, tile.unit_end);
      if (p.bulk_copy) {
        // One warp brings K, one V; each looks pages up one unit ahead.
        Granule granule = walk.unit == item.first_split ? first_granule : look_up(walk.unit);
        for (int i = 0; i < total; ++i) {
          const int unit = walk.unit;
          const Granule now = granule;
          if (i + 1 < total) {
            walk.next(p);
            granule = look_up(walk.unit);
          }
          if (warp == 0) {
            if (i != 1 && i > 0) position.advance();  // V of tile i - 2
            copy_unit(unit, now, 0);
          } else {
            if (i == 0) position.advance();         // K of tile 0
            if (i + 1 < total) position.advance();  // K of tile i + 1
            copy_unit(unit, now, 1);
          }
        }
        if (warp == 0) {
          // The values of the last tiles.
          if (total > 1) position.advance();
          position.advance();
        }
      } else {
        int unit = walk.unit;
        gather_unit(unit, 0);
        for (int i = 0; i < total; ++i) {
          int next_unit = unit;
          if (i + 1 < total) {
            walk.next(p);
            next_unit = walk.unit;
            gather_unit(next_unit, 0);
          }
          gather_unit(unit, 1);
          unit = next_unit;
        }
      }
    }
  }
};

template <class Shape>
FV_DEVICE void grouped_sm90(const AttentionArgs& p, const GroupedMaps& maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32 base = shared_address(smem);
  const int warp = uniform(threadIdx.x >> 5);
  if (threadIdx.x == kConsumers) {
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      // Where threads write the tiles, every thread arrives for itself.
      mbarrier_init(full_barrier<Shape>(base, slot, 0), p.bulk_copy ? 1 : kProducers);
      mbarrier_init(full_barrier<Shape>(base, slot, 1), p.bulk_copy ? 1 : kProducers);
      mbarrier_init(empty_barrier<Shape>(base, slot), p.bulk_copy ? kConsumerWarps : kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncwarp();
  if (!p.bulk_copy) __syncthreads();
  // Computed twice: kept across the roles' ways, it would spill.
  if (warp >= kConsumerWarps) {
    const int lane = threadIdx.x & 31;
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kManyRegisters ? 40 : 56));
    if (p.bulk_copy) {
      if (warp > kConsumerWarps + 1) return;
      // The two producers meet, and do not wait for the consumers. (Waiting until
      // the queries are asked for costs 1 to 2 us, though they then queue less.)
      named_barrier(kProducerBarrier, 64);
      asm volatile("bar.arrive %0, %1;" ::"n"(kStartBarrier), "r"(kStarting) : "memory");
    }
    Producer<Shape> producer = {
        p, maps, smem, base, lane, warp - kConsumerWarps, evict_first_policy(), {}, nullptr, 0, 0};
    producer.run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kManyRegisters ? 232 : 224));
    const int lane = threadIdx.x & 31;
    Consumer<Shape, true> consumer(p, smem, warp);
    RingPipe<Shape> pipe = {p, base, lane, warp >> 2, {}};
    GroupedLoop<Shape, true, RingPipe<Shape>> loop = {p, consumer, pipe, 0, 0};
    loop.run();
  }
#endif
}

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM90_CUH_
