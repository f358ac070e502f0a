// One element of a cache to FP32 and back, on every architecture.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_CACHE_CODEC_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_CACHE_CODEC_CUH_

#include "native/cuda/device/ptx.cuh"

namespace flashverify::cuda {

// FP8 by way of the FP16 that has the same exponent width (E5M2), or of one that
// is 2^8 too small (E4M3, whose only non-finite code is NaN).
struct E4m3Codec {
  static constexpr int kBytes = 1;
  static FV_DEVICE float decode(unsigned char code) {
    if ((code & 0x7f) == 0x7f) return __int_as_float(0x7fffffff);
    const uint32 half = (code & 0x80u) << 8 | (code & 0x7fu) << 7;
    return from_half(static_cast<unsigned short>(half)) * 256.0f;
  }
  // To nearest even; finite and infinite values saturate at 448; NaN stays NaN.
  static FV_DEVICE unsigned char encode(float v) {
    const unsigned char sign = static_cast<unsigned char>(__float_as_uint(v) >> 24 & 0x80u);
    const float a = fabsf(v);
    if (!(a == a)) return sign | 0x7f;
    if (a >= 448.0f) return sign | 0x7e;
    if (a < 0.015625f) {  // below 2^-6: steps of 2^-9
      return sign | static_cast<unsigned char>(__float2int_rn(a * 512.0f));
    }
    const uint32 bits = __float_as_uint(a);
    const uint32 rounded = bits + 0x7ffffu + (bits >> 20 & 1u);
    return sign | static_cast<unsigned char>((rounded >> 20) - (120u << 3));
  }
  static FV_DEVICE float load(const unsigned char* row, int d) { return decode(row[d]); }
  static FV_DEVICE void store(unsigned char* row, int d, float v) { row[d] = encode(v); }
};

struct E5m2Codec {
  static constexpr int kBytes = 1;
  static FV_DEVICE float decode(unsigned char code) {
    return from_half(static_cast<unsigned short>(code << 8));
  }
  // As above; the largest finite value is 57344, also for infinities.
  static FV_DEVICE unsigned char encode(float v) {
    const unsigned char sign = static_cast<unsigned char>(__float_as_uint(v) >> 24 & 0x80u);
    const float a = fabsf(v);
    if (!(a == a)) return sign | 0x7f;
    if (a >= 57344.0f) return sign | 0x7b;
    if (a < 6.103515625e-05f) {  // below 2^-14: steps of 2^-16
      return sign | static_cast<unsigned char>(__float2int_rn(a * 65536.0f));
    }
    const uint32 bits = __float_as_uint(a);
    const uint32 rounded = bits + 0xfffffu + (bits >> 21 & 1u);
    return sign | static_cast<unsigned char>((rounded >> 21) - (112u << 2));
  }
  static FV_DEVICE float load(const unsigned char* row, int d) { return decode(row[d]); }
  static FV_DEVICE void store(unsigned char* row, int d, float v) { row[d] = encode(v); }
};

struct HalfCodec {
  static constexpr int kBytes = 2;
  static FV_DEVICE float load(const unsigned char* row, int d) {
    return from_half(reinterpret_cast<const unsigned short*>(row)[d]);
  }
  static FV_DEVICE void store(unsigned char* row, int d, float v) {
    reinterpret_cast<unsigned short*>(row)[d] = to_half(v);
  }
};

struct BfloatCodec {
  static constexpr int kBytes = 2;
  static FV_DEVICE float load(const unsigned char* row, int d) {
    return from_bfloat(reinterpret_cast<const unsigned short*>(row)[d]);
  }
  static FV_DEVICE void store(unsigned char* row, int d, float v) {
    reinterpret_cast<unsigned short*>(row)[d] = to_bfloat(v);
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_CACHE_CODEC_CUH_
