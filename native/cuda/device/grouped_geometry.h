// Compile-time geometry of the grouped kernels, for device and host.
//
// Eight consumer warps work in step on tiles of 128 keys, with transposed
// products: S^T = K Q^T, O^T = V^T P^T. Keys, later d, are the 64-row (16 per
// warp) side, so that each byte of the cache is converted once, straight into
// the registers of operand A; query rows are the N side, any multiple of 8, and
// a row's bits do not depend on how many rows stand beside it.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_GEOMETRY_H_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_GEOMETRY_H_

#include "native/cuda/device/args.h"

namespace flashverify::cuda {

constexpr int kHopperSharedBytes = 227 * 1024;
// What a block can have on a device of `arch` (__CUDA_ARCH__), as a macro since
// neither compiler takes one constant function for both sides.
#define FV_SHARED_LIMIT(arch)                     \
  (1024 * ((arch) < 750                     ? 96  \
           : (arch) < 800                   ? 64  \
           : (arch) == 800 || (arch) == 870 ? 163 \
           : (arch) < 900 || (arch) >= 1200 ? 99  \
                                            : 227))
constexpr int kConsumers = 256;  // threads
constexpr int kConsumerWarps = kConsumers / 32;
constexpr int kHalfTokens = 64;  // tokens of a half tile: one warpgroup's keys

// A slot of the ring holds K or V of one tile; each half has a barrier that says
// full, the slot one that says empty.
constexpr int kMaxSlots = 8;
constexpr int kBarrierBytes = 3 * 8 * kMaxSlots;

// Per-row values in shared memory.
template <int kTileRows>
struct RowState {
  int2 visible[kTileRows];           // [begin, end) of the row's keys
  float minus_reference[kTileRows];  // what exponents are taken against
  float moved[kTileRows];            // 2^(old reference - new), where it moved
  int tile_max[kTileRows];           // ordered integers, -inf between uses
  float output_factor[kTileRows];
  float2 split_factors[kTileRows];
  float2 group_factors[kTileRows];
  float split_max[kTileRows];  // running state over the splits of a group
  float split_sum[kTileRows];
  float group_max[kTileRows];  // over groups
  float group_sum[kTileRows];
  float warp_sum[kConsumerWarps][kTileRows];
  // Of the row tile: keys within [mask_below, mask_from) need no mask in any row.
  int mask_below;
  int mask_from;
  int seq_len;
  int padding;
};

// A slice of the merge: 32 accumulator positions, eight rows of one row block.
constexpr int kSlicePositions = 32;
constexpr int kMergeBytes = kMaxSplits * (kSlicePositions * 16 + 8 * 8) +
                            kMaxGroups * (2 * 8 * 8 + kSlicePositions * 16) + 8 * 4;

template <int kKvBytes, int kDimValue, int kRowBlocksValue, int kSharedBytes>
struct GroupedGeometry {
  static constexpr int kDim = kDimValue;
  static constexpr int kRowBlocks = kRowBlocksValue;
  static constexpr int kTileRows = 8 * kRowBlocks;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kRowBytes = kDim * kKvBytes;
  static constexpr int kHalfBytes = kHalfTokens * kRowBytes;
  static constexpr int kSlotBytes = 2 * kHalfBytes;

  // P V: the warps divide d between them, 16 rows each at a time; where d is too
  // short for eight warps, both warpgroups cover it, each for its half of the
  // keys, and the second hands its sums to the first at the end of a split.
  static constexpr bool kKeySplit = kDim < 128;
  static constexpr int kBlocksM = kKeySplit ? kDim / 64 : kDim / 128;
  static constexpr int kStepsPv = kKeySplit ? 4 : 8;
  static constexpr int kStepsPerBatch = 4 / kBlocksM;  // four A fragments in flight
  static constexpr int kBatchesPv = kStepsPv / kStepsPerBatch;
  static constexpr int kOwners = kKeySplit ? 128 : kConsumers;  // threads that hold a sum

  // Groups can be folded in registers too where the accumulators are few.
  static constexpr int kAccumulators = kBlocksM * kRowBlocks * 4;
  static constexpr bool kFoldsGroups = kAccumulators <= 24;

  // Shared memory. Q and P are 8x8 core matrices: [16-byte column][row block].
  static constexpr int kColumnBytes = kRowBlocks * 128;
  static constexpr int kQBytes = kTileRows * kDim * 2;
  static constexpr int kPBytes = kTileRows * kUnitTokens * 2;  // P_hi, as many for P_lo
  static constexpr int kQOffset = 0;
  static constexpr int kPOffset = kQBytes;
  static constexpr int kRingOffset = (kPOffset + 4 * kPBytes + 1023) / 1024 * 1024;
  static constexpr int kExchangeBytes = kKeySplit ? kTileRows * kDim * 4 : 0;
  static constexpr int kPoisonBytes = 2 * kDim * 8;  // of two splits, one bit per row of each d
  static constexpr int kFixedBytes =
      static_cast<int>(sizeof(RowState<kTileRows>)) + kExchangeBytes + kPoisonBytes + kBarrierBytes;
  static constexpr int kFitting = (kSharedBytes - kRingOffset - kFixedBytes) / kSlotBytes;
  // K and V of one tile, and the merge.
  static constexpr bool kFits = kFitting >= 2 && kMergeBytes <= kSharedBytes;
  static constexpr int kSlots = kFitting > kMaxSlots ? kMaxSlots : kFits ? kFitting : 2;
  static constexpr int kExchangeOffset = kRingOffset + kSlots * kSlotBytes;
  static constexpr int kPoisonOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kBarrierOffset = kPoisonOffset + kPoisonBytes;
  static constexpr int kRowStateOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kItemBytes = kRowStateOffset + static_cast<int>(sizeof(RowState<kTileRows>));
  // The merge, which comes last, takes the same room from the start.
  static constexpr int kTotalBytes = kItemBytes > kMergeBytes ? kItemBytes : kMergeBytes;
  static_assert(kStepsPv % kStepsPerBatch == 0 && kSteps % 4 == 0, "whole batches");

  static constexpr int kPartialFloats = kBlocksM * kRowBlocks * kOwners * 4;
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_GEOMETRY_H_
