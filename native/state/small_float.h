// Scalar codecs of the 8- and 16-bit floating-point formats, from their
// definitions alone. Host and device.
//
// Every format is sign, exponent, mantissa; value = 2^(e - bias) * 1.m, or
// 2^(1 - bias) * 0.m where e = 0. E4M3 (float8_e4m3fn) has no infinities and one
// NaN magnitude, 0x7f; E5M2, FP16 and BF16 follow IEEE 754.
#ifndef FLASHVERIFY_NATIVE_STATE_SMALL_FLOAT_H_
#define FLASHVERIFY_NATIVE_STATE_SMALL_FLOAT_H_

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define FV_HOST_DEVICE __host__ __device__
#else
#define FV_HOST_DEVICE
#endif

namespace flashverify {
// Internal linkage: these functions are compiled once per instruction set, and
// the linker must not pick the AVX-512 copy for a CPU without it.
namespace {

FV_HOST_DEVICE inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FV_HOST_DEVICE inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// A format of at most 16 bits.
template <int kExponentBits, int kMantissaBits, bool kFinite>
struct SmallFloat {
  static constexpr int kExponent = kExponentBits;
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kSign = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t kMagnitude = kSign - 1;
  // The smallest magnitude that is no finite number.
  static constexpr uint32_t kSpecial =
      kFinite ? kMagnitude : ((1u << kExponentBits) - 1) << kMantissaBits;
  static constexpr uint32_t kLargest = kSpecial - 1;
  static constexpr uint32_t kNan = kFinite ? kMagnitude : kSpecial | (1u << (kMantissaBits - 1));

  FV_HOST_DEVICE static inline float decode(uint32_t code) {
    const uint32_t sign = (code & kSign) << (31 - kExponentBits - kMantissaBits);
    const uint32_t magnitude = code & kMagnitude;
    if (magnitude >= kSpecial) {
      const bool infinite = !kFinite && magnitude == kSpecial;
      return bits_float(sign | (infinite ? 0x7f800000u : 0x7fc00000u));
    }
    if (kBias == 127) return bits_float(sign | (magnitude << (23 - kMantissaBits)));
    // A narrower exponent: the bits read as an FP32 number are too small by a
    // power of two, subnormals included, and the product is exact.
    const float scale = bits_float(static_cast<uint32_t>(127 + 127 - kBias) << 23);
    return bits_float(sign | float_bits(bits_float(magnitude << (23 - kMantissaBits)) * scale));
  }

  // Rounds to nearest, ties to even. Overflow saturates to the largest finite
  // code where kSaturate, infinities included; else it becomes infinity.
  template <bool kSaturate>
  FV_HOST_DEVICE static inline uint32_t encode(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 31) * kSign;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | kNan;
    const uint32_t overflow = kSaturate ? kLargest : kSpecial;
    if (magnitude == 0x7f800000u) return sign | overflow;

    constexpr int kShift = 23 - kMantissaBits;
    const int exponent = static_cast<int>(magnitude >> 23) - 127 + kBias;
    uint32_t significand;  // rounded off by `shift` bits
    int shift = kShift;
    if (exponent >= 1) {
      significand = (static_cast<uint32_t>(exponent) << 23) | (magnitude & 0x7fffffu);
    } else {
      // Subnormal here: 0.m in units of 2^(1 - bias).
      shift += 1 - exponent;
      if (shift > 25) return sign;  // below half of the smallest subnormal
      const bool fp32_normal = magnitude >= 0x800000u;
      if (!fp32_normal) {
        if (kBias != 127) return sign;
        shift = kShift;  // BF16 shares FP32's subnormal range
      }
      significand = (magnitude & 0x7fffffu) | (fp32_normal ? 0x800000u : 0u);
    }
    const uint32_t half = 1u << (shift - 1);
    const uint32_t odd = (significand >> shift) & 1u;
    const uint32_t code = (significand + half - 1 + odd) >> shift;
    return sign | (code >= kSpecial ? overflow : code);
  }
};

using E4M3 = SmallFloat<4, 3, true>;
using E5M2 = SmallFloat<5, 2, false>;
using Half = SmallFloat<5, 10, false>;
using BFloat = SmallFloat<8, 7, false>;

}  // namespace
}  // namespace flashverify

#endif  // FLASHVERIFY_NATIVE_STATE_SMALL_FLOAT_H_
