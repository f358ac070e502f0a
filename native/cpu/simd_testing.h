// What the tests of the vector code share. Internal linkage, as that code has.
#ifndef FLASHVERIFY_NATIVE_CPU_SIMD_TESTING_H_
#define FLASHVERIFY_NATIVE_CPU_SIMD_TESTING_H_

#include <cmath>

#include "native/cpu/simd.h"

namespace flashverify::cpu {
namespace {

inline bool same_bits(float a, float b) { return float_bits(a) == float_bits(b); }

// Any NaN for a NaN; else the same bits, so that zeros keep their signs.
inline bool same_number(float a, float b) {
  return std::isnan(a) ? std::isnan(b) && std::signbit(a) == std::signbit(b) : same_bits(a, b);
}

struct Lanes {
  explicit Lanes(Vec vector) { store(value, vector); }
  float value[kLanes];
};

}  // namespace
}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_SIMD_TESTING_H_
