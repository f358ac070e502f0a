// mma.m8n8k4: four independent products, one per quad pair (lanes 4q .. 4q + 3 and
// 16 + 4q .. 16 + 4q + 3). With x = lane & 1, h = lane / 16, k = lane & 3:
//   A by rows     lane holds row k + 4h, four columns
//   A by columns  lane holds column k, rows 4h .. 4h + 3
//   B by columns  lane holds column k + 4h, four rows
//   D             d[i]: row x + (i & 2) + 4h, column (i & 4) + (lane & 2) + (i & 1)
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_MMA_SM70_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_MMA_SM70_CUH_

#include "native/cuda/device/ptx.cuh"

namespace flashverify::cuda {

#define FV_MMA_SM70(layout)                                                              \
  asm volatile("mma.sync.aligned.m8n8k4." layout                                         \
               ".col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "                        \
               "{%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"                          \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
                 "+f"(d[6]), "+f"(d[7])                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(b0), "r"(b1))

// d += a b, rows of a in lanes.
FV_DEVICE void multiply_rows(float (&d)[8], const uint32 (&a)[2], uint32 b0, uint32 b1) {
  FV_MMA_SM70("row");
}
// d += a b, columns of a in lanes.
FV_DEVICE void multiply_columns(float (&d)[8], const uint32 (&a)[2], uint32 b0, uint32 b1) {
  FV_MMA_SM70("col");
}
#undef FV_MMA_SM70

// Two quads of operand B.
FV_DEVICE uint4 load_shared4(uint32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_MMA_SM70_CUH_
