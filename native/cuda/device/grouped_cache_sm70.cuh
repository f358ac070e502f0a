// What a lane of the sm_70 grouped kernel works on, and how it reads the caches:
// straight into registers, four neighbouring d of a key to a word.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CACHE_SM70_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CACHE_SM70_CUH_

#include "native/cuda/device/elements.cuh"
#include "native/cuda/device/grouped_geometry_sm70.h"
#include "native/cuda/device/work.cuh"

namespace flashverify::cuda {

// kLegacyValue: P rounded once and half-precision partials, for A/B.
template <class KvType, int kDimValue, int kRowBlocksValue, bool kLegacyValue, int kSharedBytes>
struct GroupedShapeSm70
    : GroupedGeometrySm70<KvType::kBytes, kDimValue, kRowBlocksValue, kSharedBytes> {
  using Base = GroupedGeometrySm70<KvType::kBytes, kDimValue, kRowBlocksValue, kSharedBytes>;
  using Kv = KvType;
  static constexpr bool kLegacy = kLegacyValue;
  static constexpr bool kFoldsGroups = Base::kFoldsGroups && !kLegacy;
  static constexpr bool kPairsApart = false;
  static constexpr bool kColumnsAdjacent = true;
};

// Which part of a tile a lane works on.
template <class Shape>
struct LaneSm70 {
  const int lane;
  const int warp;
  // Q K: the warp's 32 keys and half of d; of the two rows of four that a lane's
  // products belong to, the first are the warp's own.
  const int key_group;
  const int d_half;
  // P V: the warp's d, rows and keys.
  int column_group;
  int row_group;
  int key_split;

  FV_DEVICE explicit LaneSm70(int warp_index)
      : lane(threadIdx.x & 31),
        warp(warp_index),
        key_group(warp_index & 3),
        d_half(warp_index >> 2) {
    constexpr int kParts = Shape::kColumnGroups * Shape::kRowGroups;
    key_split = warp / kParts;
    row_group = warp % kParts % Shape::kRowGroups;
    column_group = warp % kParts / Shape::kRowGroups;
  }

  FV_DEVICE int thread() const { return warp * 32 + lane; }
  // Warps that hold the sums of a split.
  FV_DEVICE bool owner() const { return Shape::kKeySplits == 1 || key_split == 0; }
  FV_DEVICE int pair() const { return lane >> 2 & 3; }
  FV_DEVICE int half() const { return lane >> 4; }

  // The four keys of a quad are operand A's and B's k in the order 0, 2, 1, 3, so
  // that a lane's two probabilities of a row lie side by side. Its own inverse.
  static FV_DEVICE int key_in_quad(int k) { return (k & 1) << 1 | k >> 1; }
  // Eight rows of a chunk of P are permuted, so that four chunks written at once
  // fall into different banks.
  static FV_DEVICE int row_swizzle(int chunk) { return (chunk & 1) | (chunk & 2) << 1; }

  // In a unit: the first key of the lane's quad, for Q K.
  FV_DEVICE int first_key() const { return 32 * key_group + 8 * pair() + 4 * half(); }
  // In a row block: the even row of the lane's scores.
  FV_DEVICE int first_row() const { return 4 * d_half + (lane & 2); }
  // P V: the lane's d as it loads them, 4 kBlocksM neighbours of every key.
  FV_DEVICE int column() const {
    return Shape::kColumns * column_group + 4 * Shape::kBlocksM * (2 * pair() + half());
  }
  // The even row of products [4u, 4u + 4) of row block j of this warp.
  FV_DEVICE int product_row(int j, int u) const {
    return 8 * (row_group * Shape::kBlocksN + j) + 4 * u + (lane & 2);
  }
  // Their first d; the second is next to it.
  FV_DEVICE int product_column(int m) const { return column() + 4 * m + 2 * (lane & 1); }
};

// Codes that are no finite number become zero. Added to an element without its
// sign, the constant reaches the sign bit from such codes alone.
template <class Kv>
constexpr uint32 kFiniteCarry = 0x04040404u;
template <>
constexpr uint32 kFiniteCarry<E4m3> = 0x01010101u;
template <>
constexpr uint32 kFiniteCarry<Half> = 0x04000400u;
template <class Kv>
FV_DEVICE uint32 finite_only(uint32 word) {
  constexpr uint32 kCarry = kFiniteCarry<Kv>;
  if constexpr (Kv::kBytes == 1) {
    const uint32 found = ((word & 0x7f7f7f7fu) + kCarry) & 0x80808080u;
    return word & ~((found >> 7) * 0xffu);
  } else {
    const uint32 found = ((word & 0x7c007c00u) + kCarry) & 0x80008000u;
    return word & ~((found >> 15) * 0xffffu);
  }
}

// Bits of `words` words from any address.
template <int kWords>
FV_DEVICE void load_bytes(uint32 (&r)[kWords], const unsigned char* source) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    r[i] = source[4 * i] | source[4 * i + 1] << 8 | source[4 * i + 2] << 16 |
           static_cast<uint32>(source[4 * i + 3]) << 24;
  }
}
template <int kWords>
FV_DEVICE void load_words(uint32 (&r)[kWords], const unsigned char* source) {
  if constexpr (kWords == 1) {
    r[0] = __ldg(reinterpret_cast<const uint32*>(source));
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(source));
    r[0] = v.x;
    r[1] = v.y;
  } else {
    static_assert(kWords == 4, "one load");
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(source));
    r[0] = v.x;
    r[1] = v.y;
    r[2] = v.z;
    r[3] = v.w;
  }
}

// A lane's reader of both caches. Keys are on their way a unit ahead, their places
// in the page table two units ahead.
template <class Shape>
struct CacheSm70 {
  using Kv = typename Shape::Kv;
  using RawValues = uint32[Shape::kBatchSteps][Shape::kValueRegisters];
  const AttentionArgs& p;
  const LaneSm70<Shape> at;
  int64* const value_offsets;  // of two units' keys, in P's order; below 0: beyond the length
  uint32 raw_keys[Shape::kKeyBuffers][Shape::kKeyBatchLoads][4];
  const unsigned char* key_source;  // of the unit whose keys are loaded
  int key_loads;                    // of the lane's 16-byte pieces, those that exist
  const unsigned char* key_base;
  const unsigned char* value_base;
  int page_index;  // of the lane's key in the unit looked up last; below 0: beyond the length
  int page;
  int page_token;

  FV_DEVICE void open(int head) {
    const int first_byte = at.d_half * Shape::kKeyBytes;
    key_base = p.k.data + head * p.k.head_stride + first_byte;
    value_base = p.v.data + head * p.v.head_stride + at.column() * Kv::kBytes;
  }
  // Where the lane's key of a unit lies; the answer is on its way from memory.
  FV_DEVICE void look_up(const int* table, int unit, int seq_len) {
    const int position = unit * kUnitTokens + at.first_key() + (at.lane & 3);
    page_index = -1;
    if (position >= seq_len) return;
    page_index = position / p.page_size;
    page_token = position - page_index * p.page_size;
    page = __ldg(table + page_index);
  }
  // Starts the loads of the unit looked up last, and notes where its values lie.
  FV_DEVICE void fetch_keys(int parity) {
    const bool valid = page_index >= 0;
    int64 value_offset = -1;
    key_loads = 0;
    key_source = key_base;
    if (valid) {
      const int usable = usable_page(p, page);
      key_source = key_base + usable * p.k.page_stride + page_token * p.k.token_stride;
      value_offset = usable * p.v.page_stride + page_token * p.v.token_stride;
      key_loads = (p.head_dim * Kv::kBytes - at.d_half * Shape::kKeyBytes) / 16;
    }
    if (at.d_half == 0) {
      value_offsets[parity * kUnitTokens + at.first_key() + at.key_in_quad(at.lane & 3)] =
          value_offset;
    }
#pragma unroll
    for (int i = 0; i < Shape::kKeyBuffers; ++i) load_keys(raw_keys[i], i);
  }

  FV_DEVICE void load_keys(uint32 (&raw)[Shape::kKeyBatchLoads][4], int batch) const {
#pragma unroll
    for (int i = 0; i < Shape::kKeyBatchLoads; ++i)
      raw[i][0] = raw[i][1] = raw[i][2] = raw[i][3] = 0;
    const unsigned char* source = key_source + batch * Shape::kKeyBatchLoads * 16;
    if (!FV_UNLIKELY(!p.vector_copy)) {
#pragma unroll
      for (int i = 0; i < Shape::kKeyBatchLoads; ++i) {
        if (batch * Shape::kKeyBatchLoads + i < key_loads) load_words<4>(raw[i], source + 16 * i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kKeyBatchLoads; ++i) {
        if (batch * Shape::kKeyBatchLoads + i < key_loads) load_bytes<4>(raw[i], source + 16 * i);
      }
    }
  }

  FV_DEVICE void load_values(RawValues& raw, int batch, int parity) const {
    const int64* const offsets = value_offsets + parity * kUnitTokens + (at.lane & 3) +
                                 4 * (at.key_split * Shape::kStepsPv + batch * Shape::kBatchSteps);
    const bool exists = at.column() < p.head_dim;
#pragma unroll
    for (int i = 0; i < Shape::kBatchSteps; ++i) {
#pragma unroll
      for (int w = 0; w < Shape::kValueRegisters; ++w) raw[i][w] = 0;
    }
    if (!FV_UNLIKELY(!p.vector_copy)) {
#pragma unroll
      for (int i = 0; i < Shape::kBatchSteps; ++i) {
        const int64 offset = offsets[4 * i];
        if (offset >= 0 && exists) load_words<Shape::kValueRegisters>(raw[i], value_base + offset);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kBatchSteps; ++i) {
        const int64 offset = offsets[4 * i];
        if (offset >= 0 && exists) load_bytes<Shape::kValueRegisters>(raw[i], value_base + offset);
      }
    }
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CACHE_SM70_CUH_
