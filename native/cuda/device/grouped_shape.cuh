// A grouped kernel's types beside its geometry.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SHAPE_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SHAPE_CUH_

#include "native/cuda/device/elements.cuh"
#include "native/cuda/device/grouped_geometry.h"

namespace flashverify::cuda {

// kLegacyValue: P rounded once and half-precision partials, for A/B.
template <class KvType, int kDimValue, int kRowBlocksValue, bool kLegacyValue,
          int kSharedBytes = kHopperSharedBytes>
struct GroupedShape : GroupedGeometry<KvType::kBytes, kDimValue, kRowBlocksValue, kSharedBytes> {
  using Base = GroupedGeometry<KvType::kBytes, kDimValue, kRowBlocksValue, kSharedBytes>;
  using Kv = KvType;
  static constexpr bool kLegacy = kLegacyValue;
  // How sm_90a shares registers out: 232 and 40 to a consumer and a producer
  // thread, else 224 and 56. Chosen by what spills.
  static constexpr bool kManyRegisters = Base::kAccumulators > 32;
  static constexpr bool kFoldsGroups = Base::kFoldsGroups && !kLegacy;
  // How decoded codes lie in operand A: see store_query_pairs and fragment_column.
  static constexpr bool kPairsApart = KvType::kBytes == 1;
  static constexpr bool kColumnsAdjacent = KvType::kBytes == 1;
};

// The d of an accumulator: element `second` of lane group g, block of 16 d.
template <class Shape>
FV_DEVICE int fragment_column(int block, int g, int second) {
  return block * 16 + (Shape::kColumnsAdjacent ? 2 * g + second : g + 8 * second);
}

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_SHAPE_CUH_
