// wgmma m64nNk16, A in registers, B in shared memory as 8x8 core matrices
// without swizzle, FP32 accumulators. One wrapper per N = 8 * kRowBlocks.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_WGMMA_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_WGMMA_CUH_

#include "native/cuda/device/ptx.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
namespace flashverify::cuda {

FV_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FV_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
FV_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The descriptor's halves: address and stride between blocks of 8 along K;
// stride between blocks of 8 along N.
FV_DEVICE uint32 wgmma_descriptor_low(uint32 address, uint32 k_stride) {
  return (address >> 4) | ((k_stride >> 4) << 16);
}
constexpr uint32 kWgmmaDescriptorHigh = 128 >> 4;

#define FV_ACCUMULATOR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FV_OPERANDS(a, low, high, add) \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high), "r"(add)

// kTransposed: B lies with N contiguous in its core matrices, not K.
template <int kRowBlocks, bool kTransposed, bool kBfloat>
struct Wgmma;

template <bool kTransposed, bool kBfloat>
struct Wgmma<1, kTransposed, kBfloat> {
  static FV_DEVICE void run(float (&d)[1][4], const uint32 (&a)[4], uint32 low, uint32 high,
                            int add) {
#define FV_WGMMA(type, transposed)                                                \
  asm volatile(                                                                   \
      "{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %10, 0; mov.b64 b, {%8, %9};\n" \
      "wgmma.mma_async.sync.aligned.m64n8k16.f32." type                           \
      " {"                                                                        \
      "%0, %1, %2, %3"                                                            \
      "}, {%4, %5, %6, %7}, b, p, 1, 1, " transposed ";}\n"                       \
      : FV_ACCUMULATOR(d, 0)                                                      \
      : FV_OPERANDS(a, low, high, add))
    if constexpr (kBfloat) {
      if constexpr (kTransposed)
        FV_WGMMA("bf16.bf16", "1");
      else
        FV_WGMMA("bf16.bf16", "0");
    } else {
      if constexpr (kTransposed)
        FV_WGMMA("f16.f16", "1");
      else
        FV_WGMMA("f16.f16", "0");
    }
#undef FV_WGMMA
  }
};

template <bool kTransposed, bool kBfloat>
struct Wgmma<2, kTransposed, kBfloat> {
  static FV_DEVICE void run(float (&d)[2][4], const uint32 (&a)[4], uint32 low, uint32 high,
                            int add) {
#define FV_WGMMA(type, transposed)                                                  \
  asm volatile(                                                                     \
      "{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %14, 0; mov.b64 b, {%12, %13};\n" \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type                            \
      " {"                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7"                                              \
      "}, {%8, %9, %10, %11}, b, p, 1, 1, " transposed ";}\n"                       \
      : FV_ACCUMULATOR(d, 0), FV_ACCUMULATOR(d, 1)                                  \
      : FV_OPERANDS(a, low, high, add))
    if constexpr (kBfloat) {
      if constexpr (kTransposed)
        FV_WGMMA("bf16.bf16", "1");
      else
        FV_WGMMA("bf16.bf16", "0");
    } else {
      if constexpr (kTransposed)
        FV_WGMMA("f16.f16", "1");
      else
        FV_WGMMA("f16.f16", "0");
    }
#undef FV_WGMMA
  }
};

template <bool kTransposed, bool kBfloat>
struct Wgmma<4, kTransposed, kBfloat> {
  static FV_DEVICE void run(float (&d)[4][4], const uint32 (&a)[4], uint32 low, uint32 high,
                            int add) {
#define FV_WGMMA(type, transposed)                                                             \
  asm volatile(                                                                                \
      "{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %22, 0; mov.b64 b, {%20, %21};\n"            \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type                                       \
      " {"                                                                                     \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                   \
      "}, {%16, %17, %18, %19}, b, p, 1, 1, " transposed ";}\n"                                \
      : FV_ACCUMULATOR(d, 0), FV_ACCUMULATOR(d, 1), FV_ACCUMULATOR(d, 2), FV_ACCUMULATOR(d, 3) \
      : FV_OPERANDS(a, low, high, add))
    if constexpr (kBfloat) {
      if constexpr (kTransposed)
        FV_WGMMA("bf16.bf16", "1");
      else
        FV_WGMMA("bf16.bf16", "0");
    } else {
      if constexpr (kTransposed)
        FV_WGMMA("f16.f16", "1");
      else
        FV_WGMMA("f16.f16", "0");
    }
#undef FV_WGMMA
  }
};

template <bool kTransposed, bool kBfloat>
struct Wgmma<6, kTransposed, kBfloat> {
  static FV_DEVICE void run(float (&d)[6][4], const uint32 (&a)[4], uint32 low, uint32 high,
                            int add) {
#define FV_WGMMA(type, transposed)                                                              \
  asm volatile(                                                                                 \
      "{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %30, 0; mov.b64 b, {%28, %29};\n"             \
      "wgmma.mma_async.sync.aligned.m64n48k16.f32." type                                        \
      " {"                                                                                      \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
      "%16, %17, %18, %19, %20, %21, %22, %23"                                                  \
      "}, {%24, %25, %26, %27}, b, p, 1, 1, " transposed ";}\n"                                 \
      : FV_ACCUMULATOR(d, 0), FV_ACCUMULATOR(d, 1), FV_ACCUMULATOR(d, 2), FV_ACCUMULATOR(d, 3), \
        FV_ACCUMULATOR(d, 4), FV_ACCUMULATOR(d, 5)                                              \
      : FV_OPERANDS(a, low, high, add))
    if constexpr (kBfloat) {
      if constexpr (kTransposed)
        FV_WGMMA("bf16.bf16", "1");
      else
        FV_WGMMA("bf16.bf16", "0");
    } else {
      if constexpr (kTransposed)
        FV_WGMMA("f16.f16", "1");
      else
        FV_WGMMA("f16.f16", "0");
    }
#undef FV_WGMMA
  }
};

template <bool kTransposed, bool kBfloat>
struct Wgmma<8, kTransposed, kBfloat> {
  static FV_DEVICE void run(float (&d)[8][4], const uint32 (&a)[4], uint32 low, uint32 high,
                            int add) {
#define FV_WGMMA(type, transposed)                                                              \
  asm volatile(                                                                                 \
      "{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %38, 0; mov.b64 b, {%36, %37};\n"             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type                                        \
      " {"                                                                                      \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "                  \
      "%30, %31"                                                                                \
      "}, {%32, %33, %34, %35}, b, p, 1, 1, " transposed ";}\n"                                 \
      : FV_ACCUMULATOR(d, 0), FV_ACCUMULATOR(d, 1), FV_ACCUMULATOR(d, 2), FV_ACCUMULATOR(d, 3), \
        FV_ACCUMULATOR(d, 4), FV_ACCUMULATOR(d, 5), FV_ACCUMULATOR(d, 6), FV_ACCUMULATOR(d, 7)  \
      : FV_OPERANDS(a, low, high, add))
    if constexpr (kBfloat) {
      if constexpr (kTransposed)
        FV_WGMMA("bf16.bf16", "1");
      else
        FV_WGMMA("bf16.bf16", "0");
    } else {
      if constexpr (kTransposed)
        FV_WGMMA("f16.f16", "1");
      else
        FV_WGMMA("f16.f16", "0");
    }
#undef FV_WGMMA
  }
};

#undef FV_ACCUMULATOR
#undef FV_OPERANDS

}  // namespace flashverify::cuda
#endif

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_WGMMA_CUH_
