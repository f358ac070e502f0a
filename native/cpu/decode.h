// Cache elements to FP32 vectors, for one instruction set.
//
// Keys go to the dot products transposed: lanes are keys. A block of kLanes keys
// is loaded in 32-bit units, transposed as such, and each unit then decodes to
// as many dimensions as it holds elements. Values stay as they lie: lanes are
// dimensions.
//
// Decoding is a shift, a mask and an exact product by a power of two, correct
// for every finite code. Codes that are not finite are only noticed, through the
// largest magnitude met, and left to the caller (see grouped.h): on a tile
// without them, which is nearly every tile, that costs two instructions a vector.
#ifndef FLASHVERIFY_NATIVE_CPU_DECODE_H_
#define FLASHVERIFY_NATIVE_CPU_DECODE_H_

#include "native/cpu/simd.h"
#include "native/plan/plan.h"

namespace flashverify::cpu {
namespace {

template <class Format>
struct Decoder {
  static constexpr int kBits = 1 + Format::kExponent + Format::kMantissa;
  static constexpr int kBytes = kBits / 8;
  static constexpr int kPerUnit = 32 / kBits;
  // From the top of a 32-bit lane to where FP32 has its exponent.
  static constexpr int kShift = 8 - Format::kExponent;
  static constexpr uint32_t kMask = 0x80000000u | (Format::kMagnitude << (32 - kBits - kShift));

  FV_INLINE static Vec scaled(IntVec bits) {
    const Vec value = as_float(bits & splat_int(static_cast<int32_t>(kMask)));
    if (Format::kBias == 127) return value;
    return value * splat(bits_float(static_cast<uint32_t>(254 - Format::kBias) << 23));
  }

  // Element `index` (a constant) of each lane's unit.
  FV_INLINE static Vec from_unit(UintVec unit, int index) {
    const UintVec top = unit << (32 - kBits * (index + 1));
    return scaled(reinterpret_cast<IntVec>(top) >> kShift);
  }

  // kLanes neighbouring elements.
  FV_INLINE static Vec from_row(const void* row) {
    return scaled((kBytes == 1 ? widen_bytes(row) : widen_words(row)) << (32 - kBits - kShift));
  }
};

// Watches for codes that are not finite.
template <class Format>
class SpecialWatch {
  using Codes = std::conditional_t<Decoder<Format>::kBytes == 1, ByteVec, WordVec>;

 public:
  // BF16 keys need no watch: their NaNs and infinities decode as they are.
  FV_INLINE void see(UintVec units) {
    const Codes magnitude = reinterpret_cast<Codes>(units) & static_cast<Code>(Format::kMagnitude);
    largest_ = magnitude > largest_ ? magnitude : largest_;
  }

  FV_INLINE bool seen() const {
    const Codes special = largest_ >= static_cast<Code>(Format::kSpecial);
    uint64_t words[kVectorBytes / 8];
    store_as(words, special);
    uint64_t any = 0;
    for (uint64_t word : words) any |= word;
    return any != 0;
  }

 private:
  using Code = std::conditional_t<Decoder<Format>::kBytes == 1, uint8_t, uint16_t>;
  Codes largest_{};
};

// One element, any code.
template <class Format>
FV_INLINE float decode_one(const void* row, int64_t index) {
  if constexpr (Decoder<Format>::kBytes == 1) {
    return Format::decode(static_cast<const uint8_t*>(row)[index]);
  } else {
    return Format::decode(load_as<uint16_t>(static_cast<const char*>(row) + 2 * index));
  }
}

// A register's worth of a row, of which `bytes` exist, a multiple of 16; the rest
// reads as zero.
FV_INLINE UintVec load_units(const char* row, int64_t bytes) {
  if (bytes >= kVectorBytes) return load_as<UintVec>(row);
  char units[kVectorBytes] = {};
  for (int64_t i = 0; i < bytes; i += 16) memcpy(units + i, row + i, 16);
  return load_as<UintVec>(units);
}

}  // namespace
}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_DECODE_H_
