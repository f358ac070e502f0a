// Instances of the sm_90a grouped kernel for one cache type and head dimension,
// which the build passes as FV_KV, FV_KV_NAME and FV_DIM.
#include "native/cuda/device/grouped_sm90.cuh"

#define FV_NAME4(route, kv, dim, rows) route##_##kv##_d##dim##_r##rows
#define FV_NAME3(route, kv, dim, rows) FV_NAME4(route, kv, dim, rows)
#define FV_INSTANCE(route, blocks, rows, legacy)                                                  \
  extern "C" __global__ void __launch_bounds__(384, 1) FV_NAME3(route, FV_KV_NAME, FV_DIM, rows)( \
      const __grid_constant__ flashverify::cuda::AttentionArgs args,                              \
      const __grid_constant__ flashverify::cuda::GroupedMaps maps) {                              \
    using namespace flashverify::cuda;                                                            \
    grouped_sm90<GroupedShape<FV_KV, FV_DIM, blocks, legacy>>(args, maps);                        \
  }
#define FV_ARMS(blocks, rows)                    \
  FV_INSTANCE(grouped_fp32, blocks, rows, false) \
  FV_INSTANCE(grouped_half, blocks, rows, true)

FV_ARMS(1, 8)
FV_ARMS(2, 16)
FV_ARMS(4, 32)
#if FV_DIM > 128
FV_ARMS(6, 48)
#else
FV_ARMS(8, 64)
#endif
