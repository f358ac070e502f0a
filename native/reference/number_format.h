// The small floating-point formats, from their definition: a table of every
// code's value, and rounding by search in that table. Shares nothing with the
// library's own codecs, and is slow where those are clever.
#ifndef FLASHVERIFY_NATIVE_REFERENCE_NUMBER_FORMAT_H_
#define FLASHVERIFY_NATIVE_REFERENCE_NUMBER_FORMAT_H_

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "flashverify/flashverify.h"

namespace flashverify::reference {

class NumberFormat {
 public:
  // What the codes with the largest exponent field mean.
  enum class TopExponent {
    kInfinityAndNan,   // as in IEEE 754
    kNumbersAndOneNan  // "fn": finite, but for the all-ones mantissa
  };
  enum class Overflow { kInfinity, kLargestFinite };

  NumberFormat(int exponent_bits, int mantissa_bits, TopExponent top_exponent);

  uint32_t code_count() const { return 2 * sign_; }
  double decode(uint32_t code) const { return values_[code]; }

  // The code of the nearest value, ties to the even code. NaN gives a NaN code.
  // kLargestFinite holds for infinite values as well.
  uint32_t encode(double value, Overflow overflow) const;

  double largest_finite() const { return values_[largest_finite_code_]; }

 private:
  uint32_t sign_;  // the sign's bit
  uint32_t largest_finite_code_;
  uint32_t infinity_code_;
  uint32_t nan_code_;
  std::vector<double> values_;  // by code
};

const NumberFormat& float8_e4m3();
const NumberFormat& float8_e5m2();
const NumberFormat& float16();
const NumberFormat& bfloat16();

// Element access for every floating-point fv_dtype. `index` counts elements.
double load(const void* data, int64_t index, int32_t dtype);
// Rounds once. FP8 saturates; the others overflow to infinity.
void store(void* data, int64_t index, int32_t dtype, double value);

// The element of a tensor at these indices.
double element(const fv_tensor& tensor, std::initializer_list<int64_t> indices);
int64_t element_offset(const fv_tensor& tensor, std::initializer_list<int64_t> indices);

}  // namespace flashverify::reference

#endif  // FLASHVERIFY_NATIVE_REFERENCE_NUMBER_FORMAT_H_
