// The grouped kernel by mma.sync: eight warps that multiply and fetch their own
// tiles, by cp.async. It is built for sm_80 and newer; no instance fits the shared
// memory of sm_75.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM80_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM80_CUH_

#include "native/cuda/device/grouped_loop.cuh"

namespace flashverify::cuda {

#if __CUDA_ARCH__ >= 750

FV_DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `pending` of this thread's groups are under way.
FV_DEVICE void copy_wait(int pending) {
#if __CUDA_ARCH__ >= 800
  if (pending >= 4) {
    asm volatile("cp.async.wait_group 4;" ::: "memory");
  } else if (pending == 3) {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  } else if (pending == 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (pending == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
#endif
}

// Tiles K0 K1 V0 K2 V1 ... of an item, numbered from 0; tile n lies in slot
// n % kSlots. A slot is free once a barrier has followed the last read of it.
template <class Shape>
struct CopyPipe {
  using Kv = typename Shape::Kv;
  const AttentionArgs& p;
  unsigned char* const smem;
  const uint32 base;
  const int lane;
  const int warp;

  UnitWalk keys;    // the next K tile to fetch
  UnitWalk values;  // the next V tile to fetch
  const int* table;
  int head;
  int seq_len;
  int tiles;  // of the item, K and V
  int issued;
  int ready;     // arrived, and a barrier has said so
  int position;  // the next to be used
  int freed;     // used, and a barrier has said so

  FV_DEVICE void start() const {}
  FV_DEVICE uint32 address(int tile) const {
    return base + Shape::kRingOffset + tile % Shape::kSlots * Shape::kSlotBytes;
  }

  FV_DEVICE void fetch(int unit, const Cache& cache, uint32 slot) const {
    constexpr int kChunks = Shape::kRowBytes / 16;
    constexpr int kRowsAtOnce = 32 / kChunks;
    constexpr int kRowsPerWarp = kUnitTokens / kConsumerWarps;
    // Lane i < 16 finds the row 16 * warp + i.
    const int token = unit * kUnitTokens + warp * kRowsPerWarp + (lane & (kRowsPerWarp - 1));
    int64 offset = 0;
    if (token < seq_len) {
      const int page = token / p.page_size;
      offset = usable_page(p, table[page]) * cache.page_stride +
               (token - page * p.page_size) * cache.token_stride;
    }
    const unsigned char* const heads = cache.data + head * cache.head_stride;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce + lane / kChunks;
      const int chunk = lane % kChunks;
      const unsigned char* source = heads + __shfl_sync(~0u, offset, row) + chunk * 16;
      const int key = warp * kRowsPerWarp + row;
      const bool valid = unit * kUnitTokens + key < seq_len && chunk * 16 < p.head_dim * Kv::kBytes;
      const uint32 target = slot + key / kHalfTokens * Shape::kHalfBytes +
                            tile_offset<Shape::kRowBytes>(key % kHalfTokens, chunk);
      if (p.vector_copy || !valid) {
        copy_async<16>(target, valid ? source : cache.data, valid);
      } else {
        unsigned char* const bytes = smem + (target - base);
#pragma unroll 1
        for (int b = 0; b < 16; ++b) bytes[b] = source[b];
      }
    }
    copy_commit();
  }

  FV_DEVICE void fetch_more() {
    const int end = min_of(tiles, freed + Shape::kSlots);
    for (; issued < end; ++issued) {
      // Tile 0, then the odd ones up to the last K, are keys.
      const bool is_keys = issued == 0 || (issued % 2 == 1 && issued + 1 < tiles);
      if (is_keys) {
        fetch(keys.unit, p.k, address(issued));
        if (issued + 3 < tiles) keys.next(p);
      } else {
        fetch(values.unit, p.v, address(issued));
        if (issued + 1 < tiles) values.next(p);
      }
    }
  }
  // Makes tile `tile` usable by all warps, whatever it takes.
  FV_DEVICE void ensure(int tile) {
    if (tile < ready) return;
    named_barrier(kConsumerBarrier, kConsumers);
    freed = position;
    fetch_more();
    copy_wait(0);
    named_barrier(kConsumerBarrier, kConsumers);
    ready = issued;
  }

  FV_DEVICE void open_item(const Item& item, const RowTile& tile, int total) {
    table = p.page_table + tile.request * p.page_table_row_stride;
    head = item.head;
    seq_len = tile.seq_len;
    tiles = 2 * total;
    issued = ready = position = freed = 0;
    keys.start(p, item, tile.unit_begin, tile.unit_end);
    values = keys;
    fetch_more();
  }
  FV_DEVICE uint32 wait_keys() {
    ensure(position);
    return address(position) + (warp >> 2) * Shape::kHalfBytes;
  }
  FV_DEVICE void release_keys() { ++position; }
  FV_DEVICE uint32 wait_values() {
    ensure(position);
    return address(position);
  }
  FV_DEVICE void release_values() { ++position; }
  FV_DEVICE uint32 peek_values(bool more_keys) {
    ensure(position + more_keys);
    return address(position + more_keys);
  }
  FV_DEVICE void before_publish() {
    const int wanted = min_of(issued, position + 2);
    if (wanted <= ready) return;
    copy_wait(issued - wanted);
    ready = wanted;  // the barrier follows
  }
  FV_DEVICE void after_publish() {
    freed = position;
    fetch_more();
  }
};

template <class Shape>
FV_DEVICE void grouped_sm80(const AttentionArgs& p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warp = uniform(threadIdx.x >> 5);
  Consumer<Shape, false> consumer(p, smem, warp);
  CopyPipe<Shape> pipe = {p, smem, shared_address(smem), static_cast<int>(threadIdx.x & 31), warp};
  GroupedLoop<Shape, false, CopyPipe<Shape>> loop = {p, consumer, pipe, 0, 0};
  loop.run();
}

#endif  // __CUDA_ARCH__ >= 750

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SM80_CUH_
