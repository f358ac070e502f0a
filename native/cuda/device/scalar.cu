// Instances of the scalar routes, one per cache type and arm.
#include "native/cuda/device/scalar.cuh"

using namespace flashverify::cuda;

#define FV_SCALAR(name, codec)                                         \
  extern "C" __global__ void __launch_bounds__(128)                    \
      scalar_fp32_##name(const __grid_constant__ AttentionArgs args) { \
    scalar_splits<codec, false>(args);                                 \
  }                                                                    \
  extern "C" __global__ void __launch_bounds__(128)                    \
      scalar_half_##name(const __grid_constant__ AttentionArgs args) { \
    scalar_splits<codec, true>(args);                                  \
  }

FV_SCALAR(e4m3, E4m3Codec)
FV_SCALAR(e5m2, E5m2Codec)
FV_SCALAR(f16, HalfCodec)
FV_SCALAR(bf16, BfloatCodec)

extern "C" __global__ void __launch_bounds__(128)
    scalar_fp32_merge(const __grid_constant__ AttentionArgs args) {
  scalar_merge<false>(args);
}
extern "C" __global__ void __launch_bounds__(128)
    scalar_half_merge(const __grid_constant__ AttentionArgs args) {
  scalar_merge<true>(args);
}
