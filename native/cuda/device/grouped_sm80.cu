// Instances of the mma.sync grouped kernel for one cache type and head dimension,
// which the build passes as FV_KV, FV_KV_NAME and FV_DIM. One that does not fit
// an architecture's shared memory is empty there, and never chosen.
#include "native/cuda/device/grouped_sm80.cuh"

#define FV_NAME4(route, kv, dim, rows) route##_##kv##_d##dim##_r##rows
#define FV_NAME3(route, kv, dim, rows) FV_NAME4(route, kv, dim, rows)
#define FV_INSTANCE(route, blocks, rows, legacy)                                                  \
  extern "C" __global__ void __launch_bounds__(256, 1) FV_NAME3(route, FV_KV_NAME, FV_DIM, rows)( \
      const __grid_constant__ flashverify::cuda::AttentionArgs args) {                            \
    using namespace flashverify::cuda;                                                            \
    run_if_it_fits<GroupedShape<FV_KV, FV_DIM, blocks, legacy, FV_SHARED_LIMIT(__CUDA_ARCH__)>>(  \
        args);                                                                                    \
  }

namespace flashverify::cuda {
template <class Shape>
FV_DEVICE void run_if_it_fits(const AttentionArgs& args) {
  if constexpr (Shape::kFits) grouped_sm80<Shape>(args);
}
}  // namespace flashverify::cuda

#define FV_ARMS(blocks, rows)                    \
  FV_INSTANCE(grouped_fp32, blocks, rows, false) \
  FV_INSTANCE(grouped_half, blocks, rows, true)

FV_ARMS(1, 8)
#if FV_DIM > 128
FV_ARMS(2, 16)
// Of 48 rows, the accumulators would spill.
FV_ARMS(3, 24)
#else
FV_ARMS(4, 32)
#endif
