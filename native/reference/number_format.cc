#include "native/reference/number_format.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace flashverify::reference {

NumberFormat::NumberFormat(int exponent_bits, int mantissa_bits, TopExponent top_exponent)
    : sign_(1u << (exponent_bits + mantissa_bits)) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa_codes = 1u << mantissa_bits;
  const uint32_t top = (1u << exponent_bits) - 1;
  values_.resize(2 * sign_);
  for (uint32_t code = 0; code < sign_; ++code) {
    const uint32_t exponent = code / mantissa_codes;
    const uint32_t mantissa = code % mantissa_codes;
    double value;
    if (exponent == top && top_exponent == TopExponent::kInfinityAndNan) {
      value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                            : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == top && mantissa == mantissa_codes - 1) {
      value = std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
      value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
      value =
          std::ldexp(mantissa_codes + mantissa, static_cast<int>(exponent) - bias - mantissa_bits);
    }
    values_[code] = value;
    values_[code + sign_] = -value;
  }
  nan_code_ = sign_ - 1;
  // Without infinities, what would be one is NaN.
  infinity_code_ = top_exponent == TopExponent::kInfinityAndNan ? top * mantissa_codes : nan_code_;
  largest_finite_code_ = infinity_code_ - 1;
}

uint32_t NumberFormat::encode(double value, Overflow overflow) const {
  if (std::isnan(value)) return nan_code_;
  const uint32_t sign = std::signbit(value) ? sign_ : 0;
  const double magnitude = std::fabs(value);
  // The positive finite values ascend with their codes.
  const double* begin = values_.data();
  const double* end = begin + largest_finite_code_ + 1;
  const double* above = std::upper_bound(begin, end, magnitude);
  const auto below = static_cast<uint32_t>(above - begin) - 1;
  if (above == end) {
    const double step = begin[below] - begin[below - 1];
    const bool overflows = magnitude >= begin[below] + step / 2;
    return sign | (overflows && overflow == Overflow::kInfinity ? infinity_code_ : below);
  }
  const double middle = (begin[below] + *above) / 2;
  const bool up = magnitude > middle || (magnitude == middle && below % 2 == 1);
  return sign | (up ? below + 1 : below);
}

const NumberFormat& float8_e4m3() {
  static const NumberFormat format(4, 3, NumberFormat::TopExponent::kNumbersAndOneNan);
  return format;
}

const NumberFormat& float8_e5m2() {
  static const NumberFormat format(5, 2, NumberFormat::TopExponent::kInfinityAndNan);
  return format;
}

const NumberFormat& float16() {
  static const NumberFormat format(5, 10, NumberFormat::TopExponent::kInfinityAndNan);
  return format;
}

const NumberFormat& bfloat16() {
  static const NumberFormat format(8, 7, NumberFormat::TopExponent::kInfinityAndNan);
  return format;
}

double load(const void* data, int64_t index, int32_t dtype) {
  switch (dtype) {
    case FV_DTYPE_FLOAT32:
      return static_cast<const float*>(data)[index];
    case FV_DTYPE_FLOAT16:
      return float16().decode(static_cast<const uint16_t*>(data)[index]);
    case FV_DTYPE_BFLOAT16:
      return bfloat16().decode(static_cast<const uint16_t*>(data)[index]);
    case FV_DTYPE_FLOAT8_E4M3:
      return float8_e4m3().decode(static_cast<const uint8_t*>(data)[index]);
    case FV_DTYPE_FLOAT8_E5M2:
      return float8_e5m2().decode(static_cast<const uint8_t*>(data)[index]);
    default:
      throw std::invalid_argument("not a floating-point dtype");
  }
}

void store(void* data, int64_t index, int32_t dtype, double value) {
  using Overflow = NumberFormat::Overflow;
  switch (dtype) {
    case FV_DTYPE_FLOAT32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case FV_DTYPE_FLOAT16:
      static_cast<uint16_t*>(data)[index] =
          static_cast<uint16_t>(float16().encode(value, Overflow::kInfinity));
      return;
    case FV_DTYPE_BFLOAT16:
      static_cast<uint16_t*>(data)[index] =
          static_cast<uint16_t>(bfloat16().encode(value, Overflow::kInfinity));
      return;
    case FV_DTYPE_FLOAT8_E4M3:
      static_cast<uint8_t*>(data)[index] =
          static_cast<uint8_t>(float8_e4m3().encode(value, Overflow::kLargestFinite));
      return;
    case FV_DTYPE_FLOAT8_E5M2:
      static_cast<uint8_t*>(data)[index] =
          static_cast<uint8_t>(float8_e5m2().encode(value, Overflow::kLargestFinite));
      return;
    default:
      throw std::invalid_argument("not a floating-point dtype");
  }
}

int64_t element_offset(const fv_tensor& tensor, std::initializer_list<int64_t> indices) {
  int64_t offset = 0;
  const int64_t* stride = tensor.stride;
  for (const int64_t index : indices) offset += index * *stride++;
  return offset;
}

double element(const fv_tensor& tensor, std::initializer_list<int64_t> indices) {
  return load(tensor.data, element_offset(tensor, indices), tensor.dtype);
}

}  // namespace flashverify::reference
