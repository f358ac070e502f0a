// The scalar codecs against the formats' definitions: every code, and every
// boundary at which rounding changes its mind.

#include "native/state/small_float.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A format as its definition says it: nothing here is shared with the codec but
// the numbers of bits.
struct Definition {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  bool finite;  // the largest exponent holds numbers, and one NaN

  uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  uint32_t largest() const { return finite ? sign() - 2 : infinity() - 1; }
  bool is_nan(uint32_t code) const {
    const uint32_t magnitude = code & (sign() - 1);
    return finite ? magnitude == sign() - 1 : magnitude > infinity();
  }
  bool is_infinite(uint32_t code) const { return !finite && (code & (sign() - 1)) == infinity(); }

  // The value of a magnitude, as if no code were special.
  double magnitude_value(uint32_t magnitude) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    const double fraction = std::ldexp(magnitude & ((1u << mantissa_bits) - 1), -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias)
                         : std::ldexp(1 + fraction, exponent - bias);
  }
};

constexpr Definition kE4M3 = {"e4m3", 4, 3, true};
constexpr Definition kE5M2 = {"e5m2", 5, 2, false};
constexpr Definition kHalf = {"half", 5, 10, false};
constexpr Definition kBFloat = {"bfloat", 8, 7, false};

// Rounds by search among all values.
class Rounding {
 public:
  explicit Rounding(const Definition& format) : format_(format) {
    // One more than exists: what lies halfway to it or beyond overflows.
    for (uint32_t code = 0; code <= format.largest() + 1; ++code) {
      values_.push_back(format.magnitude_value(code));
    }
  }

  uint32_t encode(float value, bool saturate) const {
    const uint32_t sign = std::signbit(value) ? format_.sign() : 0;
    // The one NaN of a format without infinities has their place.
    const uint32_t overflow = saturate         ? format_.largest()
                              : format_.finite ? format_.sign() - 1
                                               : format_.infinity();
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= values_.back()) return sign | overflow;
    uint32_t below = 0;
    for (uint32_t above = format_.largest() + 1; above - below > 1;) {
      const uint32_t middle = (below + above) / 2;
      (values_[middle] <= magnitude ? below : above) = middle;
    }
    const double to_below = magnitude - values_[below];
    const double to_above = values_[below + 1] - magnitude;
    const bool up = to_above < to_below || (to_above == to_below && below % 2 == 1);
    const uint32_t code = up ? below + 1 : below;
    return sign | (code > format_.largest() ? overflow : code);
  }

  const std::vector<double>& values() const { return values_; }

 private:
  Definition format_;
  std::vector<double> values_;
};

template <class Format>
void check_encoding(const Rounding& rounding, float value) {
  for (const float x : {value, -value}) {
    const uint32_t saturated = Format::template encode<true>(x);
    const uint32_t other = Format::template encode<false>(x);
    if (saturated == rounding.encode(x, true) && other == rounding.encode(x, false)) continue;
    TRACE("x = %a", static_cast<double>(x));
    CHECK_EQ(saturated, rounding.encode(x, true));
    CHECK_EQ(other, rounding.encode(x, false));
  }
}

template <class Format>
void check_decode(const Definition& definition) {
  TRACE("format %s", definition.name);
  for (uint32_t code = 0; code < 2 * definition.sign(); ++code) {
    const float value = Format::decode(code);
    const bool negative = (code & definition.sign()) != 0;
    const double magnitude = definition.is_infinite(code)
                                 ? static_cast<double>(kInfinity)
                                 : definition.magnitude_value(code & (definition.sign() - 1));
    const bool right =
        std::signbit(value) == negative &&
        (definition.is_nan(code) ? std::isnan(value)
                                 : std::fabs(static_cast<double>(value)) == magnitude);
    if (right) continue;
    TRACE("code 0x%x: %a", code, static_cast<double>(value));
    CHECK(right);
  }
}

// encode(decode(code)) is code; a NaN keeps its sign, and gets the one payload.
template <class Format>
void check_round_trip(const Definition& definition) {
  TRACE("format %s", definition.name);
  for (uint32_t code = 0; code < 2 * definition.sign(); ++code) {
    const uint32_t expected =
        definition.is_nan(code) ? (code & definition.sign()) | Format::kNan : code;
    CHECK_EQ(Format::template encode<false>(Format::decode(code)), expected);
    const uint32_t saturated = Format::template encode<true>(Format::decode(code));
    CHECK_EQ(saturated, definition.is_infinite(code) ? code - 1 : expected);
  }
  CHECK(definition.is_nan(Format::kNan));
}

// Every value, every midpoint between neighbours, and the FP32 numbers next to
// those: the only places where the answer can change.
template <class Format>
void check_boundaries(const Definition& definition) {
  TRACE("format %s", definition.name);
  const Rounding rounding(definition);
  const std::vector<double>& values = rounding.values();
  for (size_t code = 0; code + 1 < values.size(); ++code) {
    for (const double at : {values[code], (values[code] + values[code + 1]) / 2}) {
      const float value = static_cast<float>(at);
      CHECK_EQ(static_cast<double>(value), at);
      check_encoding<Format>(rounding, value);
      check_encoding<Format>(rounding, std::nextafter(value, kInfinity));
      check_encoding<Format>(rounding, std::nextafter(value, -kInfinity));
    }
  }
  for (const float value :
       {std::numeric_limits<float>::max(), kInfinity, std::numeric_limits<float>::min(),
        std::numeric_limits<float>::denorm_min()}) {
    check_encoding<Format>(rounding, value);
  }
}

// Values that the callers really convert: all of both 16-bit formats.
template <class Format>
void check_all_16_bit_values(const Definition& definition) {
  TRACE("format %s", definition.name);
  const Rounding rounding(definition);
  for (uint32_t code = 0; code < 0x8000; ++code) {
    if (!kHalf.is_nan(code)) check_encoding<Format>(rounding, Half::decode(code));
    if (!kBFloat.is_nan(code)) check_encoding<Format>(rounding, BFloat::decode(code));
  }
}

template <class Format>
void check_fp32_samples(const Definition& definition) {
  TRACE("format %s", definition.name);
  const Rounding rounding(definition);
  for (uint64_t bits = 0; bits < 0x7f800000u; bits += 9973) {  // every exponent, subnormals too
    check_encoding<Format>(rounding, bits_float(static_cast<uint32_t>(bits)));
  }
  testing::Random random(1);
  for (int i = 0; i < 100000; ++i) {
    const auto bits = static_cast<uint32_t>(random.bits() & 0x7fffffffu);
    if (bits < 0x7f800000u) check_encoding<Format>(rounding, bits_float(bits));
  }
}

template <class Format>
void check_nans() {
  for (const uint32_t payload : {0x7f800001u, 0x7f801000u, 0x7fa00000u, 0x7fc00000u, 0x7fffffffu}) {
    const float positive = bits_float(payload);
    const float negative = bits_float(payload | 0x80000000u);
    CHECK_EQ(Format::template encode<true>(positive), Format::kNan);
    CHECK_EQ(Format::template encode<false>(positive), Format::kNan);
    CHECK_EQ(Format::template encode<true>(negative), Format::kSign | Format::kNan);
    CHECK_EQ(Format::template encode<false>(negative), Format::kSign | Format::kNan);
  }
}

#define FV_FOR_EACH_FORMAT(check) \
  do {                            \
    check<E4M3>(kE4M3);           \
    check<E5M2>(kE5M2);           \
    check<Half>(kHalf);           \
    check<BFloat>(kBFloat);       \
  } while (false)

TEST(every_code_decodes_to_the_value_of_its_definition) { FV_FOR_EACH_FORMAT(check_decode); }

TEST(every_code_survives_decoding_and_encoding) { FV_FOR_EACH_FORMAT(check_round_trip); }

TEST(encoding_is_right_at_every_rounding_boundary) { FV_FOR_EACH_FORMAT(check_boundaries); }

TEST(encoding_is_right_for_every_16_bit_value) { FV_FOR_EACH_FORMAT(check_all_16_bit_values); }

TEST(encoding_is_right_all_over_the_range_of_fp32) { FV_FOR_EACH_FORMAT(check_fp32_samples); }

TEST(nans_stay_nans_and_keep_their_sign) {
  check_nans<E4M3>();
  check_nans<E5M2>();
  check_nans<Half>();
  check_nans<BFloat>();
}

// Known numbers, so that the definition above is not the only witness.
TEST(landmarks) {
  CHECK_EQ(E4M3::decode(0x01), 0x1p-9f);
  CHECK_EQ(E4M3::decode(0x38), 1.0f);
  CHECK_EQ(E4M3::decode(0x7e), 448.0f);
  CHECK_EQ(E5M2::decode(0x01), 0x1p-16f);
  CHECK_EQ(E5M2::decode(0x7b), 57344.0f);
  CHECK_EQ(Half::decode(0x0001), 0x1p-24f);
  CHECK_EQ(Half::decode(0x7bff), 65504.0f);
  CHECK_EQ(BFloat::decode(0x0001), 0x1p-133f);
  CHECK_EQ(BFloat::decode(0x3f80), 1.0f);

  CHECK_EQ(E4M3::encode<true>(464.0f), 0x7eu);  // a tie, to the even code
  CHECK_EQ(E4M3::encode<false>(464.0f), 0x7eu);
  CHECK_EQ(E4M3::encode<true>(465.0f), 0x7eu);
  CHECK_EQ(E4M3::encode<false>(465.0f), 0x7fu);  // no infinity to overflow to
  CHECK_EQ(E4M3::encode<true>(-kInfinity), 0xfeu);
  CHECK_EQ(E5M2::encode<true>(61440.0f), 0x7bu);
  CHECK_EQ(E5M2::encode<false>(61440.0f), 0x7cu);  // a tie, to the even code
  CHECK_EQ(Half::encode<false>(65519.0f), 0x7bffu);
  CHECK_EQ(Half::encode<false>(65520.0f), 0x7c00u);
  CHECK_EQ(Half::encode<false>(-0x1p-25f), 0x8000u);
  CHECK_EQ(BFloat::encode<false>(std::numeric_limits<float>::max()), 0x7f80u);
  CHECK_EQ(BFloat::encode<true>(std::numeric_limits<float>::max()), 0x7f7fu);
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
