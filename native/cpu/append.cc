// The quantising cache write.

#include <cstring>
#include <type_traits>

#include "native/cpu/cpu.h"
#include "native/cpu/threads.h"
#include "native/plan/schedule.h"
#include "native/state/small_float.h"

namespace flashverify::cpu {
namespace {

// Tokens that one work item writes: some 10 us of work at 8 heads of 128.
constexpr int64_t kTokensPerItem = 16;

template <class Format>
struct Float16Bits {
  using Storage = uint16_t;
  static float load(uint16_t code) { return Format::decode(code); }
};
struct Float32Bits {
  using Storage = float;
  static float load(float value) { return value; }
};

template <class Source, class Format>
void write_row(const void* from, int64_t from_offset, void* to, int64_t to_offset, int64_t dims,
               float scale) {
  constexpr int kBits = 1 + Format::kExponent + Format::kMantissa;
  using Code = std::conditional_t<kBits == 8, uint8_t, uint16_t>;
  const auto* source = static_cast<const typename Source::Storage*>(from) + from_offset;
  auto* target = static_cast<Code*>(to) + to_offset;
  for (int64_t d = 0; d < dims; ++d) {
    const float value = Source::load(source[d]) / scale;
    target[d] = static_cast<Code>(Format::template encode<kBits == 8>(value));
  }
}

using WriteRow = void (*)(const void*, int64_t, void*, int64_t, int64_t, float);

template <class Source>
WriteRow writer_to(fv_dtype kv_dtype) {
  switch (kv_dtype) {
    case FV_DTYPE_FLOAT8_E4M3:
      return write_row<Source, E4M3>;
    case FV_DTYPE_FLOAT8_E5M2:
      return write_row<Source, E5M2>;
    case FV_DTYPE_FLOAT16:
      return write_row<Source, Half>;
    default:
      return write_row<Source, BFloat>;
  }
}

WriteRow writer(fv_dtype source, fv_dtype kv_dtype) {
  switch (source) {
    case FV_DTYPE_FLOAT16:
      return writer_to<Float16Bits<Half>>(kv_dtype);
    case FV_DTYPE_BFLOAT16:
      return writer_to<Float16Bits<BFloat>>(kv_dtype);
    default:
      return writer_to<Float32Bits>(kv_dtype);
  }
}

void write_token(const AppendProblem& problem, int64_t token, WriteRow write) {
  const int64_t at = token * problem.slot_stride;
  const int64_t slot = problem.slots_are_int64 ? static_cast<const int64_t*>(problem.slots)[at]
                                               : static_cast<const int32_t*>(problem.slots)[at];
  if (slot < 0) return;
  const int64_t page = slot / problem.page_size;
  const int64_t offset = slot - page * problem.page_size;
  for (int64_t head = 0; head < problem.kv_heads; ++head) {
    write(problem.key, token * problem.key_token_stride + head * problem.key_head_stride,
          const_cast<void*>(problem.k.data),
          page * problem.k.page_stride + offset * problem.k.token_stride +
              head * problem.k.head_stride,
          problem.head_dim, problem.k_scale.at(head));
    write(problem.value, token * problem.value_token_stride + head * problem.value_head_stride,
          const_cast<void*>(problem.v.data),
          page * problem.v.page_stride + offset * problem.v.token_stride +
              head * problem.v.head_stride,
          problem.head_dim, problem.v_scale.at(head));
  }
}

}  // namespace

void run_append(const AppendProblem& problem, int num_threads) {
  const WriteRow write = writer(problem.src_dtype, problem.kv_dtype);
  for_each_index(ceil_div(problem.tokens, kTokensPerItem), num_threads, [&](int64_t item, int) {
    const int64_t begin = item * kTokensPerItem;
    for (int64_t i = begin; i < begin + kTokensPerItem && i < problem.tokens; ++i) {
      write_token(problem, i, write);
    }
  });
}

}  // namespace flashverify::cpu
