// The oracle's number formats against values known from their definitions.

#include "native/reference/number_format.h"

#include <cmath>
#include <limits>

#include "native/testing/check.h"

namespace flashverify::reference {
namespace {

using Overflow = NumberFormat::Overflow;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

int count_nans(const NumberFormat& format) {
  int nans = 0;
  for (uint32_t code = 0; code < format.code_count(); ++code) {
    nans += std::isnan(format.decode(code)) ? 1 : 0;
  }
  return nans;
}

TEST(e4m3_has_the_values_of_its_definition) {
  const NumberFormat& e4m3 = float8_e4m3();
  CHECK_EQ(e4m3.code_count(), 256u);
  CHECK_EQ(e4m3.decode(0x00), 0.0);
  CHECK(std::signbit(e4m3.decode(0x80)));
  CHECK_EQ(e4m3.decode(0x01), std::ldexp(1, -9));
  CHECK_EQ(e4m3.decode(0x07), std::ldexp(7, -9));
  CHECK_EQ(e4m3.decode(0x08), std::ldexp(1, -6));
  CHECK_EQ(e4m3.decode(0x38), 1.0);
  CHECK_EQ(e4m3.decode(0xB9), -1.125);
  CHECK_EQ(e4m3.decode(0x7E), 448.0);
  CHECK(std::isnan(e4m3.decode(0x7F)));
  CHECK(std::isnan(e4m3.decode(0xFF)));
  CHECK_EQ(count_nans(e4m3), 2);
}

TEST(e5m2_has_the_values_of_its_definition) {
  const NumberFormat& e5m2 = float8_e5m2();
  CHECK_EQ(e5m2.decode(0x01), std::ldexp(1, -16));
  CHECK_EQ(e5m2.decode(0x04), std::ldexp(1, -14));
  CHECK_EQ(e5m2.decode(0x3C), 1.0);
  CHECK_EQ(e5m2.decode(0x7B), 57344.0);
  CHECK_EQ(e5m2.decode(0x7C), kInfinity);
  CHECK_EQ(e5m2.decode(0xFC), -kInfinity);
  CHECK_EQ(count_nans(e5m2), 6);
}

TEST(half_formats_have_the_values_of_their_definitions) {
  CHECK_EQ(float16().decode(0x0001), std::ldexp(1, -24));
  CHECK_EQ(float16().decode(0x3C01), 1 + std::ldexp(1, -10));
  CHECK_EQ(float16().largest_finite(), 65504.0);
  CHECK_EQ(bfloat16().decode(0x3F80), 1.0);
  CHECK_EQ(bfloat16().decode(0x7F80), kInfinity);
  CHECK_EQ(bfloat16().largest_finite(), std::ldexp(255, 120));
}

TEST(every_code_encodes_to_itself) {
  for (const NumberFormat* format : {&float8_e4m3(), &float8_e5m2(), &float16(), &bfloat16()}) {
    for (uint32_t code = 0; code < format->code_count(); ++code) {
      const double value = format->decode(code);
      if (std::isnan(value)) {
        CHECK(std::isnan(format->decode(format->encode(value, Overflow::kLargestFinite))));
      } else {
        CHECK_EQ(format->encode(value, Overflow::kInfinity), code);
      }
    }
  }
}

TEST(encoding_rounds_to_nearest_and_ties_to_even) {
  for (const NumberFormat* format : {&float8_e4m3(), &float8_e5m2(), &float16(), &bfloat16()}) {
    for (uint32_t code = 0; format->decode(code) < format->largest_finite(); ++code) {
      const double low = format->decode(code);
      const double high = format->decode(code + 1);
      const double middle = (low + high) / 2;
      const uint32_t even = code % 2 == 0 ? code : code + 1;
      CHECK_EQ(format->encode(middle, Overflow::kInfinity), even);
      CHECK_EQ(format->encode(std::nextafter(middle, low), Overflow::kInfinity), code);
      CHECK_EQ(format->encode(std::nextafter(middle, high), Overflow::kInfinity), code + 1);
    }
  }
}

TEST(overflow_saturates_or_gives_infinity) {
  const NumberFormat& e4m3 = float8_e4m3();
  for (const double value : {449.0, 1e30, kInfinity}) {
    CHECK_EQ(e4m3.encode(value, Overflow::kLargestFinite), 0x7Eu);
    CHECK_EQ(e4m3.encode(-value, Overflow::kLargestFinite), 0xFEu);
  }
  const NumberFormat& half = float16();
  CHECK_EQ(half.encode(65519.0, Overflow::kInfinity), 0x7BFFu);
  CHECK_EQ(half.encode(65520.0, Overflow::kInfinity), 0x7C00u);  // a tie, to the even code
  CHECK_EQ(half.encode(-kInfinity, Overflow::kInfinity), 0xFC00u);
}

}  // namespace
}  // namespace flashverify::reference

TEST_MAIN()
