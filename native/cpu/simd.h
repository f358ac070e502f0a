// Vectors of one instruction set: what differs between AVX-512, AVX2 and
// portable C++, and nothing else. The compiler's vector extensions give the
// arithmetic and integer operators; fused multiply-add is always named, since
// contraction is off and bits must not depend on the optimiser.
//
// FV_CPU_ISA names the namespace; the build compiles kernels.cc once for each.
#ifndef FLASHVERIFY_NATIVE_CPU_SIMD_H_
#define FLASHVERIFY_NATIVE_CPU_SIMD_H_

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
// GCC 12's own header initialises its undefined vectors with themselves.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include <type_traits>
#include <utility>

#include "native/state/small_float.h"

#define FV_INLINE inline __attribute__((always_inline))
#define FV_LAMBDA_INLINE __attribute__((always_inline))

namespace flashverify::cpu {
// Internal linkage, as in small_float.h.
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

constexpr int kVectorBytes = 4 * kLanes;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UintVec __attribute__((vector_size(kVectorBytes)));
typedef uint8_t ByteVec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t WordVec __attribute__((vector_size(kVectorBytes)));

template <class T>
FV_INLINE T load_as(const void* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
FV_INLINE void store_as(void* to, T value) {
  memcpy(to, &value, sizeof(T));
}

FV_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

FV_INLINE Vec load(const float* from) { return load_as<Vec>(from); }
FV_INLINE void store(float* to, Vec value) { store_as(to, value); }
FV_INLINE Vec splat(float value) { return value - Vec{}; }
FV_INLINE IntVec splat_int(int32_t value) { return value - IntVec{}; }
FV_INLINE IntVec as_int(Vec value) { return reinterpret_cast<IntVec>(value); }
FV_INLINE Vec as_float(IntVec value) { return reinterpret_cast<Vec>(value); }

// kLanes signed bytes or 16-bit words, each in a lane. Named instructions: GCC 12
// takes __builtin_convertvector apart into scalars.
FV_INLINE IntVec widen_bytes(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#else
  IntVec wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<const int8_t*>(from)[i];
  return wide;
#endif
}

FV_INLINE IntVec widen_words(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_cvtepi16_epi32(load_as<__m256i>(from)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(_mm256_cvtepi16_epi32(load_as<__m128i>(from)));
#else
  int16_t words[kLanes];
  memcpy(words, from, sizeof(words));
  IntVec wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = words[i];
  return wide;
#endif
}

// The low 16 bits of each lane.
FV_INLINE void store_words(uint16_t* to, UintVec value) {
#if defined(__AVX512F__)
  store_as(to, _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(value)));
#elif defined(__AVX2__)
  const __m256i low = _mm256_and_si256(reinterpret_cast<__m256i>(value), _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  store_as(to, _mm256_castsi256_si128(packed));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint16_t>(value[i]);
#endif
}

FV_INLINE Vec select(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }

// a * b + c: rounded once, or, in portable code, twice.
FV_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger one; b where either is a NaN.
FV_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}

FV_INLINE float max_of_lanes(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      // As in max(): a NaN in the upper half wins.
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
  }
  return lanes[0];
}

FV_INLINE float sum_of_lanes(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Each lane rounded to FP16 (nearest, ties to even) and back.
FV_INLINE Vec through_half(Vec v) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) lanes[i] = Half::decode(Half::encode<false>(lanes[i]));
  return load(lanes);
#endif
}

// 2^x for x <= 0, to about one unit in the last place: exactly 1 at 0, exactly
// 0 below -126 (and so no subnormals), NaN for a NaN. The polynomial is the
// minimax fit of (2^f - 1) / f on [-1/2, 1/2], each coefficient rounded to FP32 in
// turn and the others fitted again: relative error 3e-9 (4e-8 when all are rounded
// at once). The constant term is exact, so that 2^0 = 1.
FV_INLINE Vec exp2(Vec x) {
  const IntVec underflow = x < splat(-126.0f);
  const Vec clamped = select(underflow, splat(-126.0f), x);
  // The low bits of x + magic hold the nearest integer in two's complement.
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
  const Vec biased = clamped + magic;
  const Vec f = clamped - (biased - magic);
  Vec p = splat(0.000153264642f);
  p = fma(p, f, splat(0.00133908063f));
  p = fma(p, f, splat(0.00961850584f));
  p = fma(p, f, splat(0.0555035993f));
  p = fma(p, f, splat(0.240226477f));
  p = fma(p, f, splat(0.693147182f));
  p = fma(p, f, splat(1.0f));
  const IntVec exponent = as_int(biased) << 23;
  const Vec result = p * as_float(exponent + splat_int(127 << 23));
  return select(underflow, Vec{}, result);
}

FV_INLINE float exp2_scalar(float x) {
  float lanes[kLanes];
  store(lanes, exp2(splat(x)));
  return lanes[0];
}

// tanh(x), to a few units in the last place: an odd minimax polynomial for
// |x| < 0.625 (relative error 5e-9), 1 - 2t / (1 + t) with t = e^(-2|x|) beyond.
FV_INLINE Vec tanh(Vec x) {
  const Vec z = x * x;
  Vec p = splat(-0.0057170447f);
  p = fma(p, z, splat(0.0206505861f));
  p = fma(p, z, splat(-0.0537434965f));
  p = fma(p, z, splat(0.133314908f));
  p = fma(p, z, splat(-0.333332837f));
  const Vec small = fma(x * z, p, x);

  const IntVec sign = as_int(x) & splat_int(INT32_MIN);
  const Vec magnitude = as_float(as_int(x) & splat_int(INT32_MAX));
  const Vec t = exp2(magnitude * splat(-2.88539008f));  // -2 log2(e)
  const Vec large = splat(1.0f) - (t + t) / (splat(1.0f) + t);
  const Vec signed_large = as_float(as_int(large) | sign);
  return select(magnitude < splat(0.625f), small, signed_large);
}

// Lane i of the result is lane Index::at(i) of a followed by b.
template <class Index, int... kLane>
FV_INLINE UintVec shuffle_lanes(UintVec a, UintVec b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, Index::at(kLane)...);
}

template <class Index>
FV_INLINE UintVec shuffle(UintVec a, UintVec b) {
  return shuffle_lanes<Index>(a, b, std::make_integer_sequence<int, kLanes>{});
}

// Within each 128-bit block: 32-bit lanes of the lower or upper half, of a and b
// in turn; the same for 64-bit lanes.
template <int kUpper>
struct Interleave32 {
  static constexpr int at(int i) { return i % 2 * kLanes + i / 4 * 4 + kUpper * 2 + i % 4 / 2; }
};
template <int kUpper>
struct Interleave64 {
  static constexpr int at(int i) { return i % 4 / 2 * kLanes + i / 4 * 4 + kUpper * 2 + i % 2; }
};
// The even or odd 128-bit blocks of a, then those of b.
template <int kOdd>
struct Blocks {
  static constexpr int at(int i) { return (2 * (i / 4) + kOdd) * 4 + i % 4; }
};

// Transposes a kLanes x kLanes block of 32-bit units, in registers.
FV_INLINE void transpose(UintVec (&m)[kLanes]) {
  UintVec t[kLanes];
  for (int i = 0; i < kLanes; i += 4) {
    const UintVec ab_lower = shuffle<Interleave32<0>>(m[i], m[i + 1]);
    const UintVec ab_upper = shuffle<Interleave32<1>>(m[i], m[i + 1]);
    const UintVec cd_lower = shuffle<Interleave32<0>>(m[i + 2], m[i + 3]);
    const UintVec cd_upper = shuffle<Interleave32<1>>(m[i + 2], m[i + 3]);
    t[i] = shuffle<Interleave64<0>>(ab_lower, cd_lower);
    t[i + 1] = shuffle<Interleave64<1>>(ab_lower, cd_lower);
    t[i + 2] = shuffle<Interleave64<0>>(ab_upper, cd_upper);
    t[i + 3] = shuffle<Interleave64<1>>(ab_upper, cd_upper);
  }
  // Block b of t[4 g + j] now holds column 4 b + j of rows 4 g .. 4 g + 3.
  for (int j = 0; j < 4; ++j) {
    if constexpr (kLanes == 16) {
      const UintVec ab_even = shuffle<Blocks<0>>(t[j], t[4 + j]);
      const UintVec ab_odd = shuffle<Blocks<1>>(t[j], t[4 + j]);
      const UintVec cd_even = shuffle<Blocks<0>>(t[8 + j], t[12 + j]);
      const UintVec cd_odd = shuffle<Blocks<1>>(t[8 + j], t[12 + j]);
      m[j] = shuffle<Blocks<0>>(ab_even, cd_even);
      m[4 + j] = shuffle<Blocks<0>>(ab_odd, cd_odd);
      m[8 + j] = shuffle<Blocks<1>>(ab_even, cd_even);
      m[12 + j] = shuffle<Blocks<1>>(ab_odd, cd_odd);
    } else if constexpr (kLanes == 8) {
      m[j] = shuffle<Blocks<0>>(t[j], t[4 + j]);
      m[4 + j] = shuffle<Blocks<1>>(t[j], t[4 + j]);
    } else {
      m[j] = t[j];
    }
  }
}

}  // namespace
}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_SIMD_H_
