// The vectors of one instruction set. Compiled once for each, as the kernels are.

#include "native/cpu/simd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "native/cpu/item.h"
#include "native/cpu/simd_testing.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

#if defined(__AVX2__)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

// Takes values to a function of vectors, kLanes at a time, and gives each
// (input, output) to `check`. The last vector is filled up with `filler`.
template <class Function, class Check>
void for_each_lane(const std::vector<float>& inputs, float filler, Function&& function,
                   Check&& check) {
  for (size_t first = 0; first < inputs.size(); first += kLanes) {
    float in[kLanes];
    for (size_t i = 0; i < kLanes; ++i) {
      in[i] = first + i < inputs.size() ? inputs[first + i] : filler;
    }
    const Lanes out(function(load(in)));
    for (size_t i = 0; i < kLanes; ++i) check(in[i], out.value[i]);
  }
}

// Every FP32 number that a 16-bit format holds, halfway points, and neighbours.
template <class Format>
std::vector<float> rounding_boundaries() {
  std::vector<float> values = {std::numeric_limits<float>::max(), std::numeric_limits<float>::min(),
                               std::numeric_limits<float>::denorm_min(), kInf};
  for (uint32_t code = 0; code < Format::kSpecial; ++code) {
    const float value = Format::decode(code);
    // Beyond the largest value, where the next one would be.
    const double step =
        static_cast<double>(code + 1 < Format::kSpecial ? Format::decode(code + 1) - value
                                                        : value - Format::decode(code - 1));
    const auto middle = static_cast<float>(static_cast<double>(value) + step / 2);
    for (const float at : {value, middle}) {
      values.push_back(at);
      values.push_back(std::nextafter(at, kInf));
      values.push_back(std::nextafter(at, -kInf));
    }
  }
  const size_t positive = values.size();
  for (size_t i = 0; i < positive; ++i) values.push_back(-values[i]);
  return values;
}

// ---- Functions -----------------------------------------------------------------

// The bound of the relative error, in u = 2^-24. 2^f = 1 + f q(f) with |f| <= 1/2 is
// rounded once, by u / 2 below 1 and by u above. q < 0.83 carries its own last
// rounding, u / 2, and an eighth and less of that from the Horner steps before:
// 0.58 u, of which f passes on half. The worst is at f = -1/2: (0.5 + 0.29) u / 0.707
// = 1.12 u, and near f = 0 it is 1.02 u. The fit adds 0.05 u. Unfused, f q is rounded
// as well, by u / 4, and so are the products before it: another 0.41 u.
constexpr long double kExp2Bound = (kFused ? 1.2L : 1.6L) * 0x1p-24L;

TEST(exp2_is_within_its_bound_everywhere) {
  std::vector<float> inputs;
  for (int n = 0; n <= 126; ++n) {
    for (const float fraction : {0.0f, 0.25f, 0.5f, 0.75f}) {  // about the nearest integer's change
      const float x = -static_cast<float>(n) - fraction;
      for (const float at : {std::nextafter(x, 0.0f), x, std::nextafter(x, -kInf)}) {
        if (at >= -126.0f) inputs.push_back(at);
      }
    }
  }
  const uint32_t last = float_bits(126.0f);
  for (uint32_t bits = 0; bits <= last; bits += 1999) inputs.push_back(-bits_float(bits));
  testing::Random random(6);
  for (int i = 0; i < 300000; ++i) {
    inputs.push_back(static_cast<float>(-126.0 * random.uniform() * random.uniform()));
  }
  long double largest = 0;
  for_each_lane(
      inputs, 0.0f, [](Vec x) { return exp2(x); },
      [&](float x, float y) {
        const long double exact = exp2l(static_cast<long double>(x));
        const long double error = fabsl(static_cast<long double>(y) - exact) / exact;
        largest = std::max(largest, error);
        if (!(error <= kExp2Bound)) {
          TRACE("exp2(%a) = %a", static_cast<double>(x), static_cast<double>(y));
          CHECK(error <= kExp2Bound);
        }
      });
  std::printf("largest relative error %.3Lf * 2^-24\n", largest * 0x1p24L);
}

TEST(exp2_is_exact_at_integers) {
  for (int n = 0; n <= 126; ++n) {
    CHECK_EQ(exp2_scalar(-static_cast<float>(n)), std::ldexp(1.0f, -n));
  }
  CHECK_EQ(exp2_scalar(-0.0f), 1.0f);
}

TEST(exp2_has_no_subnormals_and_keeps_nan) {
  for (const float x : {std::nextafter(-126.0f, -kInf), -126.5f, -127.0f, -150.0f, -1e10f,
                        -std::numeric_limits<float>::max(), -kInf}) {
    CHECK(same_bits(exp2_scalar(x), 0.0f));
  }
  CHECK(std::isnan(exp2_scalar(kNan)));
  CHECK(std::isnan(exp2_scalar(-kNan)));
  // Lanes do not touch each other.
  float in[kLanes];
  for (int i = 0; i < kLanes; ++i) in[i] = i % 4 == 0 ? kNan : i % 4 == 1 ? -kInf : 0.0f;
  const Lanes out(exp2(load(in)));
  for (int i = 0; i < kLanes; ++i) {
    CHECK(i % 4 == 0 ? std::isnan(out.value[i]) : out.value[i] == (i % 4 == 1 ? 0.0f : 1.0f));
  }
}

// The weights of a merge must not grow as a state gets older.
TEST(exp2_does_not_decrease) {
  for (int n = 0; n < 126; ++n) {
    const float at = -static_cast<float>(n) - 0.5f;  // where the reduction changes
    float x = at;
    for (int i = 0; i < 200; ++i) x = std::nextafter(x, -kInf);
    float before = 0.0f;
    for (int i = 0; i < 400; ++i, x = std::nextafter(x, 0.0f)) {
      const float y = exp2_scalar(x);
      // Within the rounding errors of both.
      CHECK(y >= before * (1 - 2 * static_cast<float>(kExp2Bound)));
      before = y;
    }
  }
}

// In u again. Below 0.625 the polynomial's part is at most 0.13 of the result
// and carries three roundings; with the last one, 1.5 u. Beyond, at 0.625, where
// it is worst: t = e^-1.25 = 0.29 is off by 1.2 u of its own (1.6 u unfused), and
// by 1.25 * 2 u from its rounded argument; 2 t / (1 + t) = 0.45 by 0.78 times that,
// and by 2 u of its own; the difference from 1 by u / 2: 2.7 u, of 0.55.
constexpr long double kTanhBound = 6 * 0x1p-24L;

TEST(tanh_is_within_its_bound_everywhere) {
  std::vector<float> inputs = {0.625f, std::nextafter(0.625f, 0.0f), std::nextafter(0.625f, 1.0f),
                               std::numeric_limits<float>::max()};
  const uint32_t last = float_bits(20.0f);
  for (uint32_t bits = float_bits(0x1p-100f); bits <= last; bits += 1499) {
    inputs.push_back(bits_float(bits));
    inputs.push_back(-bits_float(bits));
  }
  for (uint32_t bits = float_bits(0.3f); bits <= last; bits += 199) {
    inputs.push_back(bits_float(bits));
  }
  long double largest = 0;
  for_each_lane(
      inputs, 1.0f, [](Vec x) { return tanh(x); },
      [&](float x, float y) {
        const long double exact = tanhl(static_cast<long double>(x));
        const long double error = fabsl((static_cast<long double>(y) - exact) / exact);
        largest = std::max(largest, error);
        if (!(error <= kTanhBound)) {
          TRACE("tanh(%a) = %a", static_cast<double>(x), static_cast<double>(y));
          CHECK(error <= kTanhBound);
        }
      });
  std::printf("largest relative error %.3Lf * 2^-24\n", largest * 0x1p24L);
}

TEST(tanh_of_special_values) {
  const std::vector<float> inputs = {0.0f, -0.0f, kInf, -kInf, 30.0f, -30.0f};
  const auto check = [](float x, float y) {
    CHECK_EQ(y, x == 0.0f ? 0.0f : std::copysign(1.0f, x));
  };
  for_each_lane(inputs, 100.0f, [](Vec x) { return tanh(x); }, check);
  for_each_lane(
      {kNan}, -kNan, [](Vec x) { return tanh(x); }, [](float, float y) { CHECK(std::isnan(y)); });
}

TEST(fma_rounds_once_where_it_is_fused) {
  // (1 + e)^2 - (1 + 2 e) = e^2, which an intermediate rounding loses.
  const float e = 0x1p-20f;
  const Lanes out(fma(splat(1 + e), splat(1 + e), splat(-1 - 2 * e)));
  for (const float value : out.value) CHECK_EQ(value, kFused ? e * e : 0.0f);
}

TEST(through_half_is_rounding_to_half) {
  std::vector<float> inputs = rounding_boundaries<Half>();
  inputs.push_back(kNan);
  inputs.push_back(-kNan);
  for_each_lane(
      inputs, -0.0f, [](Vec x) { return through_half(x); },
      [](float x, float y) {
        const bool right = same_number(Half::decode(Half::encode<false>(x)), y);
        if (right) return;
        TRACE("x = %a gives %a", static_cast<double>(x), static_cast<double>(y));
        CHECK(right);
      });
}

// ---- 16-bit numbers ------------------------------------------------------------

template <class Format>
void check_widen() {
  for (uint32_t first = 0; first < 0x10000; first += kLanes) {
    uint16_t codes[kLanes];
    for (uint32_t i = 0; i < kLanes; ++i) codes[i] = static_cast<uint16_t>(first + i);
    const Lanes out(widen<Format>(codes));
    for (int i = 0; i < kLanes; ++i) CHECK(same_number(Format::decode(codes[i]), out.value[i]));
  }
}

template <class Format>
void check_narrow(float x, uint16_t code) {
  // A NaN keeps its sign; its payload is the instruction set's affair.
  const bool right = std::isnan(x) ? std::isnan(Format::decode(code)) &&
                                         std::signbit(x) == std::signbit(Format::decode(code))
                                   : code == Format::template encode<false>(x);
  if (right) return;
  TRACE("x = %a gives 0x%x", static_cast<double>(x), code);
  CHECK(right);
}

template <class Format>
void check_narrow_all() {
  std::vector<float> inputs = rounding_boundaries<Format>();
  for (const uint32_t nan : {0x7f800001u, 0x7f80ffffu, 0x7fa00000u, 0x7fc00000u, 0x7fffffffu}) {
    inputs.push_back(bits_float(nan));
    inputs.push_back(bits_float(nan | 0x80000000u));
  }
  inputs.resize((inputs.size() + kLanes - 1) / kLanes * kLanes, 1.0f);
  for (size_t first = 0; first < inputs.size(); first += kLanes) {
    uint16_t codes[kLanes + 2];
    std::fill(codes, codes + kLanes + 2, uint16_t{0xABCD});
    narrow<Format>(codes + 1, load(&inputs[first]));
    CHECK_EQ(codes[0], 0xABCD);
    CHECK_EQ(codes[kLanes + 1], 0xABCD);
    for (size_t i = 0; i < kLanes; ++i) check_narrow<Format>(inputs[first + i], codes[1 + i]);
  }
}

TEST(widen_decodes_every_code) {
  check_widen<Half>();
  check_widen<BFloat>();
}

TEST(narrow_rounds_as_the_codec) {
  check_narrow_all<Half>();
  check_narrow_all<BFloat>();
}

TEST(integers_are_widened_with_their_sign) {
  for (int first = 0; first < 0x10000; first += kLanes) {
    int16_t words[kLanes];
    int8_t bytes[kLanes];
    for (int i = 0; i < kLanes; ++i) words[i] = static_cast<int16_t>(first + i);
    for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<int8_t>(first + i);
    const IntVec wide_words = widen_words(words);
    const IntVec wide_bytes = widen_bytes(bytes);
    for (int i = 0; i < kLanes; ++i) CHECK_EQ(wide_words[i], int32_t{words[i]});
    for (int i = 0; i < kLanes; ++i) CHECK_EQ(wide_bytes[i], int32_t{bytes[i]});
  }
}

TEST(store_words_keeps_the_low_halves) {
  testing::Random random(7);
  for (int round = 0; round < 1000; ++round) {
    UintVec value{};
    for (int i = 0; i < kLanes; ++i) value[i] = static_cast<uint32_t>(random.bits());
    uint16_t words[kLanes];
    store_words(words, value);
    for (int i = 0; i < kLanes; ++i) CHECK_EQ(words[i], static_cast<uint16_t>(value[i] & 0xffffu));
  }
}

// ---- Lanes ---------------------------------------------------------------------

TEST(splat_keeps_every_number) {
  for (const float value : {0.0f, -0.0f, 1.5f, -kInf, kInf, 0x1p-149f}) {
    for (const float lane : Lanes(splat(value)).value) CHECK(same_bits(lane, value));
  }
  for (const float lane : Lanes(splat(kNan)).value) CHECK(std::isnan(lane));
  for (int i = 0; i < kLanes; ++i) CHECK_EQ(splat_int(INT32_MIN)[i], INT32_MIN);
}

TEST(max_gives_its_second_operand_where_one_is_nan) {
  const auto max_of = [](float a, float b) { return Lanes(max(splat(a), splat(b))).value[0]; };
  CHECK_EQ(max_of(1.0f, 2.0f), 2.0f);
  CHECK_EQ(max_of(2.0f, 1.0f), 2.0f);
  CHECK_EQ(max_of(-kInf, -kInf), -kInf);
  CHECK_EQ(max_of(-kInf, kInf), kInf);
  CHECK_EQ(max_of(kNan, 1.0f), 1.0f);
  CHECK(std::isnan(max_of(1.0f, kNan)));
}

TEST(max_of_lanes_finds_the_maximum_in_any_lane) {
  for (int lane = 0; lane < kLanes; ++lane) {
    float values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = i == lane ? -1.0f : i % 2 == 0 ? -kInf : -2.0f;
    CHECK_EQ(max_of_lanes(load(values)), -1.0f);
    values[lane] = kInf;
    CHECK_EQ(max_of_lanes(load(values)), kInf);
  }
  CHECK_EQ(max_of_lanes(splat(-kInf)), -kInf);
}

TEST(sum_of_lanes_adds_every_lane_by_a_fixed_tree) {
  float powers[kLanes];
  for (int i = 0; i < kLanes; ++i) powers[i] = std::ldexp(1.0f, i);
  CHECK_EQ(sum_of_lanes(load(powers)), std::ldexp(1.0f, kLanes) - 1);

  // Rounded differently in any other order: halves are added, then quarters.
  testing::Random random(8);
  for (int round = 0; round < 2000; ++round) {
    std::vector<float> values;
    for (int i = 0; i < kLanes; ++i) values.push_back(static_cast<float>(random.normal()));
    const float sum = sum_of_lanes(load(values.data()));
    while (values.size() > 1) {
      const size_t half = values.size() / 2;
      for (size_t i = 0; i < half; ++i) values[i] += values[half + i];
      values.resize(half);
    }
    CHECK(same_bits(sum, values[0]));
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    powers[lane] = kNan;
    CHECK(std::isnan(sum_of_lanes(load(powers))));
  }
}

TEST(transpose_exchanges_rows_and_columns) {
  UintVec m[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) m[i][j] = static_cast<uint32_t>(1000 * i + j);
  }
  transpose(m);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) CHECK_EQ(m[i][j], static_cast<uint32_t>(1000 * j + i));
  }
}

}  // namespace
}  // namespace flashverify::cpu

TEST_MAIN()
