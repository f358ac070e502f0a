// Compile-time geometry of the grouped kernel for sm_70 and sm_75, for device and
// host. Transposed products as in grouped_geometry.h, by mma.m8n8k4, whose four
// quad pairs take 32 keys (later 32 d) at once: a lane holds four bytes of one key
// either way, so both caches go from memory to operand A without a transposition,
// and without shared memory.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_GEOMETRY_SM70_H_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_GEOMETRY_SM70_H_

#include "native/cuda/device/grouped_geometry.h"

namespace flashverify::cuda {

// What the merge keeps in shared memory; the values stay in registers.
constexpr int kMergeBytesSm70 =
    (kMaxSplits + 2 * kMaxGroups) * 8 * 8 + kMaxGroups * kSlicePositions * 16 + 8 * 4;

template <int kKvBytes, int kDimValue, int kRowBlocksValue, int kSharedBytes>
struct GroupedGeometrySm70 {
  static constexpr int kDim = kDimValue;
  static constexpr int kRowBlocks = kRowBlocksValue;
  static constexpr int kTileRows = 8 * kRowBlocks;
  static constexpr int kRowBytes = kDim * kKvBytes;

  // Q K: a warp multiplies 32 keys by all rows, over half of d, and two warps
  // exchange halves of their scores. Half the rows over all of d would take every
  // byte through the decoder twice.
  static constexpr int kKeyBytes = kRowBytes / 2;  // of a lane's key
  static constexpr int kKeyLoads = kKeyBytes / 16;
  static constexpr int kKeyBatchLoads = kKeyLoads < 4 ? kKeyLoads : 4;
  static constexpr int kKeyBatches = kKeyLoads / kKeyBatchLoads;
  static constexpr int kKeyBuffers = kKeyBatches < 2 ? kKeyBatches : 2;

  // P V: shared memory gives a warp one register of operand B in the time that
  // the tensor cores need for half a product, so each B must meet two A. A row
  // tile of one block is limited by memory instead, and takes one.
  static constexpr int kKeySplits = 256 / kDim;  // part of the bits: the same for all row counts
  static constexpr int kBlocksM = kRowBlocks > 1 ? 2 : 1;  // of 32 d, per warp
  static constexpr int kRowGroups = kRowBlocks > 1 ? 2 : 1;
  static constexpr int kColumns = 32 * kBlocksM;  // d of a warp
  static constexpr int kColumnGroups = kDim / kColumns;
  static constexpr int kBlocksN = kRowBlocks / kRowGroups;
  static_assert(kColumnGroups * kRowGroups * kKeySplits == kConsumerWarps, "a part for each warp");
  static_assert(kBlocksN * kRowGroups == kRowBlocks, "whole row blocks");

  static constexpr int kValueRegisters = kBlocksM * kKvBytes;  // per lane and four keys
  static constexpr int kBatchRegisters = kRowBlocks > 2 ? 8 : 16;
  static constexpr int kStepsPv = kUnitTokens / 4 / kKeySplits;
  static constexpr int kBatchSteps =
      kBatchRegisters / kValueRegisters < kStepsPv ? kBatchRegisters / kValueRegisters : kStepsPv;
  static constexpr int kBatchesPv = kStepsPv / kBatchSteps;
  static_assert(kBatchSteps % 2 == 0 && (kBatchesPv == 1 || kBatchesPv % 2 == 0), "pairs");

  static constexpr int kAccumulators = kBlocksM * kBlocksN * 8;
  // In registers, where they are enough. FP16 needs more of them for its values.
  static constexpr bool kFoldsGroups = kAccumulators * kKvBytes <= 32;
  // Beside 48 accumulators there is no room for a second set: splits are folded in
  // the partial's place in memory, which the half-precision arms do not have.
  static constexpr bool kFoldsInMemory = kAccumulators > 32;
  static constexpr int kPartialFloats = kTileRows * kDim;

  // Shared memory. Q and P: [eight d or keys][row] of 16 bytes.
  static constexpr int kColumnBytes = kTileRows * 16;
  static constexpr int kQBytes = kTileRows * kDim * 2;
  static constexpr int kPBytes = kTileRows * kUnitTokens * 2;  // P_hi, as many for P_lo
  // Halves of scores, and at the end of a split the sums of the other key splits.
  static constexpr int kScoreBytes = kConsumers * kRowBlocks * 16;
  static constexpr int kSumBytes = (kKeySplits - 1) * (kConsumers / kKeySplits) * kAccumulators * 4;
  static constexpr int kQOffset = 0;
  static constexpr int kPOffset = kQOffset + kQBytes;
  static constexpr int kExchangeOffset = kPOffset + 2 * kPBytes;
  static constexpr int kExchangeBytes = kScoreBytes > kSumBytes ? kScoreBytes : kSumBytes;
  static_assert(kTileRows * kDim * 4 <= 2 * kPBytes + kExchangeBytes, "the output is staged there");
  static constexpr int kValueOffset = kExchangeOffset + kExchangeBytes;  // of two units' keys
  static constexpr int kPoisonOffset = kValueOffset + 2 * kUnitTokens * 8;
  static constexpr int kRowStateOffset = kPoisonOffset + kDim * 8;
  static constexpr int kItemBytes = kRowStateOffset + static_cast<int>(sizeof(RowState<kTileRows>));
  static constexpr int kTotalBytes = kItemBytes > kMergeBytesSm70 ? kItemBytes : kMergeBytesSm70;
  static constexpr bool kFits = kTotalBytes <= kSharedBytes;
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_GEOMETRY_SM70_H_
