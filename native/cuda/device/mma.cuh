// One interface over the two ways to multiply: wgmma (sm_90a), asynchronous,
// operand B read from shared memory by the unit itself; and mma.sync (sm_80 and
// newer), operand B read by ldmatrix. Fragments of A and of the accumulators are the
// same. The products of a row depend on nothing but that row.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_MMA_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_MMA_CUH_

#include "native/cuda/device/ptx.cuh"
#include "native/cuda/device/wgmma.cuh"

namespace flashverify::cuda {

template <int kRowBlocks, bool kTransposed, bool kBfloat, bool kWgmma>
struct Mma;

#if __CUDA_ARCH_FEAT_SM90_ALL
template <int kRowBlocks, bool kTransposed, bool kBfloat>
struct Mma<kRowBlocks, kTransposed, kBfloat, true> {
  using Unit = Wgmma<kRowBlocks, kTransposed, kBfloat>;
  // Operand B, and how far apart two are per byte: made once, then advanced.
  static constexpr int kHandleBytes = 16;
  static FV_DEVICE uint32 handle(uint32 address) {
    return wgmma_descriptor_low(address, kRowBlocks * 128);
  }
  static FV_DEVICE void begin() { wgmma_fence(); }
  static FV_DEVICE void run(float (&d)[kRowBlocks][4], const uint32 (&a)[4], uint32 b, int,
                            bool add) {
    Unit::run(d, a, b, kWgmmaDescriptorHigh, add);
  }
  // d[m] += a[first + m] b, or = where not `add`
  template <int kBlocks>
  static FV_DEVICE void run_blocks(float (&d)[kBlocks][kRowBlocks][4], const uint32 (&a)[4][4],
                                   int first, uint32 b, int, bool add) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      Unit::run(d[m], a[first + m], b, kWgmmaDescriptorHigh, add);
    }
  }
  template <int kPending>
  static FV_DEVICE void end() {
    wgmma_commit();
    wgmma_wait<kPending>();
  }
  static FV_DEVICE void wait() { wgmma_wait<0>(); }
};
#endif

#if __CUDA_ARCH__ >= 750
template <int kRowBlocks, bool kTransposed, bool kBfloat>
struct Mma<kRowBlocks, kTransposed, kBfloat, false> {
  static constexpr int kHandleBytes = 1;
  static FV_DEVICE uint32 handle(uint32 address) { return address; }
  static FV_DEVICE void multiply(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#if __CUDA_ARCH__ < 800
    static_assert(!kBfloat, "sm_75 multiplies FP16 only");
    multiply_half_step(d, a[0], a[1], b0);
    multiply_half_step(d, a[2], a[3], b1);
#else
    if constexpr (kBfloat) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#endif
  }
  static FV_DEVICE void multiply_half_step(float (&d)[4], uint32 a0, uint32 a1, uint32 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
  }
  // Operand B of row blocks j and j + 1 (one block: of that one).
  static FV_DEVICE void load_pair(uint32 (&b)[4], uint32 address, int lane, int j) {
    if constexpr (kRowBlocks == 1) {
      if constexpr (kTransposed) {
        load_matrix2_transposed(b[0], b[1], address + (lane & 15) * 16);
      } else {
        load_matrix2(b[0], b[1], address + (lane & 15) * 16);
      }
    } else {
      const int matrix = lane >> 3;
      address += (matrix & 1) * kRowBlocks * 128 + ((j + (matrix >> 1)) * 8 + (lane & 7)) * 16;
      if constexpr (kTransposed) {
        load_matrix4_transposed(b, address);
      } else {
        load_matrix4(b, address);
      }
    }
  }
  static FV_DEVICE void begin() {}
  static FV_DEVICE void run(float (&d)[kRowBlocks][4], const uint32 (&a)[4], uint32 b, int lane,
                            bool) {
#pragma unroll
    for (int j = 0; j < kRowBlocks; j += 2) {
      uint32 fragment[4];
      load_pair(fragment, b, lane, j);
      multiply(d[j], a, fragment[0], fragment[1]);
      if (j + 1 < kRowBlocks) multiply(d[j + 1], a, fragment[2], fragment[3]);
    }
  }
  template <int kBlocks>
  static FV_DEVICE void run_blocks(float (&d)[kBlocks][kRowBlocks][4], const uint32 (&a)[4][4],
                                   int first, uint32 b, int lane, bool add) {
    if (!add) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
        for (int j = 0; j < kRowBlocks; ++j)
          d[m][j][0] = d[m][j][1] = d[m][j][2] = d[m][j][3] = 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < kRowBlocks; j += 2) {
      uint32 fragment[4];
      load_pair(fragment, b, lane, j);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        multiply(d[m][j], a[first + m], fragment[0], fragment[1]);
        if (j + 1 < kRowBlocks) multiply(d[m][j + 1], a[first + m], fragment[2], fragment[3]);
      }
    }
  }
  template <int kPending>
  static FV_DEVICE void end() {}
  static FV_DEVICE void wait() {}
};
#endif

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_MMA_CUH_
