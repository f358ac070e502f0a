// The vector decoders against the scalar codecs. Compiled once for each
// instruction set, as the kernels are.

#include "native/cpu/decode.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "native/cpu/simd_testing.h"
#include "native/testing/check.h"

namespace flashverify::cpu {
namespace {

template <class Format>
using CodeOf = std::conditional_t<Decoder<Format>::kBytes == 1, uint8_t, uint16_t>;

template <class Format>
constexpr uint32_t kCodes = 2 * Format::kSign;

// The vector decoders promise finite codes, and BF16's others; see SpecialWatch.
template <class Format>
bool decodes(uint32_t code, float value) {
  const bool promised = Format::kBias == BFloat::kBias || std::isfinite(Format::decode(code));
  return !promised || same_number(Format::decode(code), value);
}

// Every code in every lane.
template <class Format>
void check_from_row() {
  for (uint32_t first = 0; first < kCodes<Format>; ++first) {
    CodeOf<Format> row[kLanes];
    for (uint32_t i = 0; i < kLanes; ++i) row[i] = static_cast<CodeOf<Format>>(first + i);
    const Lanes out(Decoder<Format>::from_row(row));
    for (uint32_t i = 0; i < kLanes; ++i) {
      if (decodes<Format>(row[i], out.value[i])) continue;
      TRACE("lane %u, code 0x%x: %a", i, row[i], static_cast<double>(out.value[i]));
      CHECK(decodes<Format>(row[i], out.value[i]));
    }
  }
}

// Every code at every place of a unit, its neighbours all ones.
template <class Format>
void check_from_unit() {
  using D = Decoder<Format>;
  for (int index = 0; index < D::kPerUnit; ++index) {
    const int shift = D::kBits * index;
    const uint32_t others = ~((kCodes<Format> - 1) << shift);
    for (uint32_t first = 0; first < kCodes<Format>; ++first) {
      UintVec units{};
      uint32_t codes[kLanes];
      for (uint32_t i = 0; i < kLanes; ++i) {
        codes[i] = (first + i) % kCodes<Format>;
        units[static_cast<int>(i)] = others | codes[i] << shift;
      }
      const Lanes out(D::from_unit(units, index));
      for (uint32_t i = 0; i < kLanes; ++i) {
        if (decodes<Format>(codes[i], out.value[i])) continue;
        TRACE("index %d, lane %u, code 0x%x: %a", index, i, codes[i],
              static_cast<double>(out.value[i]));
        CHECK(decodes<Format>(codes[i], out.value[i]));
      }
    }
  }
}

template <class Format>
bool watch_sees(const std::vector<CodeOf<Format>>& codes) {
  SpecialWatch<Format> watch;
  for (size_t first = 0; first < codes.size(); first += kVectorBytes / sizeof(codes[0])) {
    watch.see(load_as<UintVec>(&codes[first]));
  }
  return watch.seen();
}

// Among finite codes of either sign, before and after.
template <class Format>
void check_watch() {
  constexpr size_t kPerVector = kVectorBytes / sizeof(CodeOf<Format>);
  std::vector<CodeOf<Format>> codes(3 * kPerVector);
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<CodeOf<Format>>(i % 2 == 0 ? Format::kLargest : Format::kSign | 1u);
  }
  CHECK(!watch_sees<Format>(codes));
  for (size_t lane = kPerVector; lane < 2 * kPerVector; ++lane) {
    const CodeOf<Format> finite = codes[lane];
    for (uint32_t code = 0; code < kCodes<Format>; ++code) {
      codes[lane] = static_cast<CodeOf<Format>>(code);
      const bool seen = watch_sees<Format>(codes);
      const bool special = !std::isfinite(Format::decode(code));
      if (seen == special) continue;
      TRACE("lane %zu, code 0x%x", lane - kPerVector, code);
      CHECK_EQ(seen, special);
    }
    codes[lane] = finite;
  }
}

// Before the first vector, and with a single special code in any vector.
template <class Format>
void check_watch_in_any_vector() {
  constexpr size_t kPerVector = kVectorBytes / sizeof(CodeOf<Format>);
  CHECK(!SpecialWatch<Format>().seen());
  for (size_t at = 0; at < 3 * kPerVector; ++at) {
    std::vector<CodeOf<Format>> codes(3 * kPerVector);
    codes[at] = static_cast<CodeOf<Format>>(Format::kSign | Format::kSpecial);
    CHECK(watch_sees<Format>(codes));
  }
}

template <class Format>
void check_decode_one() {
  std::vector<CodeOf<Format>> row(kCodes<Format>);
  for (uint32_t code = 0; code < kCodes<Format>; ++code) {
    row[code] = static_cast<CodeOf<Format>>(code);
  }
  for (uint32_t code = 0; code < kCodes<Format>; ++code) {
    CHECK(same_bits(decode_one<Format>(row.data(), code), Format::decode(code)));
  }
}

#define FV_FOR_EACH_FORMAT(check) \
  do {                            \
    check<E4M3>();                \
    check<E5M2>();                \
    check<Half>();                \
    check<BFloat>();              \
  } while (false)

TEST(from_row_decodes_every_code_in_every_lane) { FV_FOR_EACH_FORMAT(check_from_row); }

TEST(from_unit_decodes_every_code_at_every_place) { FV_FOR_EACH_FORMAT(check_from_unit); }

TEST(the_watch_sees_exactly_the_codes_that_are_not_finite) { FV_FOR_EACH_FORMAT(check_watch); }

TEST(the_watch_looks_at_every_vector) { FV_FOR_EACH_FORMAT(check_watch_in_any_vector); }

TEST(decode_one_decodes_every_code) { FV_FOR_EACH_FORMAT(check_decode_one); }

TEST(load_units_reads_what_exists_and_zeros) {
  char row[kVectorBytes];
  for (int i = 0; i < kVectorBytes; ++i) row[i] = static_cast<char>(i + 1);
  for (int bytes = 16; bytes <= kVectorBytes + 16; bytes += 16) {
    // Exactly so many bytes: a sanitizer sees a read past them.
    const int exist = std::min(bytes, kVectorBytes);
    const std::vector<char> memory(row, row + exist);
    char loaded[kVectorBytes];
    store_as(loaded, load_units(memory.data(), bytes));
    for (int i = 0; i < kVectorBytes; ++i) CHECK_EQ(loaded[i], i < exist ? row[i] : char{0});
  }
}

}  // namespace
}  // namespace flashverify::cpu

TEST_MAIN()
