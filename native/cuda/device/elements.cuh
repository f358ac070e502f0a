// Cache element types: how four bytes of a shared-memory tile become operands
// of the tensor cores. Every decode is exact, up to one factor per type that
// the score scale and the output scale take out again.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_ELEMENTS_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_ELEMENTS_CUH_

#include "native/cuda/device/ptx.cuh"

namespace flashverify::cuda {

// decode_near: codes (0, 1), (2, 3) of one register; decode_far: (0, 2), (1, 3).
struct E4m3 {
  static constexpr int kBytes = 1;
  static constexpr bool kBfloat = false;
#if __CUDA_ARCH__ >= 890
  static constexpr float kScale = 1.0f;  // decoded value / true value
  static constexpr bool kNearIsNative = true;
  static FV_DEVICE void decode_near(uint32 codes, uint32& a, uint32& b) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, "
        "h;}"
        : "=r"(a), "=r"(b)
        : "r"(codes));
  }
  static FV_DEVICE void decode_far(uint32 codes, uint32& a, uint32& b) {
    decode_near(__byte_perm(codes, 0, 0x3120), a, b);
  }
#else
  // Moved into an FP16's fields, a code is its value times 2^-8, and the NaN
  // code would read as 480. The factor 144 * 2^8 keeps all finite codes exact
  // (four significant bits times 9) and below 65504, and sends the NaN codes to
  // infinity; an infinity becomes NaN where scores and outputs are finished.
  static constexpr float kScale = 144.0f;
  static constexpr bool kNearIsNative = false;
  static FV_DEVICE uint32 rescale(uint32 x) {
    uint32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(0x78807880u));  // 36864
    return r;
  }
  static FV_DEVICE void decode_far(uint32 codes, uint32& a, uint32& b) {
    a = rescale(((codes << 8) & 0x80008000u) | ((codes << 7) & 0x3f803f80u));
    b = rescale((codes & 0x80008000u) | ((codes >> 1) & 0x3f803f80u));
  }
#endif
  static FV_DEVICE bool is_finite_quad(uint32 codes) {
    return (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) == 0;
  }
  static FV_DEVICE bool is_finite(const unsigned char* p) { return (*p & 0x7f) != 0x7f; }
};

// The high byte of an FP16, infinities and NaNs included.
struct E5m2 {
  static constexpr int kBytes = 1;
  static constexpr bool kBfloat = false;
  static constexpr float kScale = 1.0f;
  static constexpr bool kNearIsNative = true;
  static FV_DEVICE void decode_near(uint32 codes, uint32& a, uint32& b) {
    a = __byte_perm(codes, 0, 0x1404);
    b = __byte_perm(codes, 0, 0x3424);
  }
  static FV_DEVICE void decode_far(uint32 codes, uint32& a, uint32& b) {
    a = __byte_perm(codes, 0, 0x2404);
    b = __byte_perm(codes, 0, 0x3414);
  }
  static FV_DEVICE bool is_finite_quad(uint32 codes) {
    return (((codes & 0x7f7f7f7fu) + 0x04040404u) & 0x80808080u) == 0;
  }
  static FV_DEVICE bool is_finite(const unsigned char* p) { return (*p & 0x7c) != 0x7c; }
};

struct Half {
  static constexpr int kBytes = 2;
  static constexpr bool kBfloat = false;
  static constexpr float kScale = 1.0f;
  static constexpr bool kNearIsNative = true;
  static FV_DEVICE bool is_finite_quad(uint32 pair) {
    return (((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u) == 0;
  }
  static FV_DEVICE bool is_finite(const unsigned char* p) { return (p[1] & 0x7c) != 0x7c; }
};

struct Bfloat {
  static constexpr int kBytes = 2;
  static constexpr bool kBfloat = true;
  static constexpr float kScale = 1.0f;
  static constexpr bool kNearIsNative = true;
  static FV_DEVICE bool is_finite_quad(uint32 pair) {
    return (((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u) == 0;
  }
  static FV_DEVICE bool is_finite(const unsigned char* p) {
    return (*reinterpret_cast<const unsigned short*>(p) & 0x7f80) != 0x7f80;
  }
};

// Pairs of operands: the rounding of probabilities and queries.
template <class Kv>
FV_DEVICE uint32 pack_operand2(float low, float high) {
  return Kv::kBfloat ? pack_bfloat2(low, high) : pack_half2(low, high);
}
template <class Kv>
FV_DEVICE float2 unpack_operand2(uint32 v) {
  return Kv::kBfloat ? unpack_bfloat2(v) : unpack_half2(v);
}

// A tile of 64 tokens in shared memory: columns of 128 bytes (64 where a row is
// that short), their 16-byte chunks permuted by the row as the copy engine's
// swizzle does, so that eight rows of one chunk lie in eight different banks.
template <int kRowBytes>
FV_DEVICE uint32 tile_offset(int row, int chunk) {
  if constexpr (kRowBytes >= 128) {
    return (chunk >> 3) * 8192 + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  } else {
    return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
  }
}

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_ELEMENTS_CUH_
