// The cache write below the ABI's checks: every pair of types, strides, slots.

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "native/cpu/cpu.h"
#include "native/state/small_float.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify::cpu {
namespace {

using testing::Random;

constexpr fv_dtype kSources[] = {FV_DTYPE_FLOAT32, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16};
constexpr fv_dtype kTargets[] = {FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT8_E5M2, FV_DTYPE_FLOAT16,
                                 FV_DTYPE_BFLOAT16};

size_t bytes_of(fv_dtype dtype) {
  switch (dtype) {
    case FV_DTYPE_FLOAT8_E4M3:
    case FV_DTYPE_FLOAT8_E5M2:
      return 1;
    case FV_DTYPE_FLOAT32:
      return 4;
    default:
      return 2;
  }
}

float load_source(const std::vector<uint8_t>& data, int64_t index, fv_dtype dtype) {
  if (dtype == FV_DTYPE_FLOAT32) {
    float value;
    std::memcpy(&value, &data[static_cast<size_t>(index) * 4], 4);
    return value;
  }
  uint16_t code;
  std::memcpy(&code, &data[static_cast<size_t>(index) * 2], 2);
  return dtype == FV_DTYPE_FLOAT16 ? Half::decode(code) : BFloat::decode(code);
}

// FP8 saturates; FP16 and BF16 overflow to infinity.
uint32_t encode(float value, fv_dtype dtype) {
  switch (dtype) {
    case FV_DTYPE_FLOAT8_E4M3:
      return E4M3::encode<true>(value);
    case FV_DTYPE_FLOAT8_E5M2:
      return E5M2::encode<true>(value);
    case FV_DTYPE_FLOAT16:
      return Half::encode<false>(value);
    default:
      return BFloat::encode<false>(value);
  }
}

// K or V: its rows, the cache that run_append writes, and the cache as it should be.
struct Side {
  std::vector<uint8_t> source;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  CacheView view;
  std::vector<uint8_t> cache;
  std::vector<uint8_t> expected;
  std::vector<float> scales;

  ScaleView scale() const {
    return {scales.empty() ? nullptr : scales.data(), scales.size() > 1 ? 1 : 0};
  }
};

struct Case {
  Case(fv_dtype source_type, fv_dtype target_type, Random& random) {
    problem.src_dtype = source_type;
    problem.kv_dtype = target_type;
    problem.tokens = random.integer(0, 100);
    problem.kv_heads = random.integer(1, 3);
    problem.head_dim = random.integer(1, 70);
    problem.page_size = random.pick<int64_t>({1, 2, 7, 16, 64});
    pages = problem.tokens / problem.page_size + 2;
    problem.slots_are_int64 = random.chance(50);
    problem.slot_stride = random.integer(1, 3);
    draw_slots(random);
    for (Side* side : {&k, &v}) make_side(*side, random);
    problem.key_token_stride = k.token_stride;
    problem.key_head_stride = k.head_stride;
    problem.value_token_stride = v.token_stride;
    problem.value_head_stride = v.head_stride;
    for (int64_t i = 0; i < problem.tokens; ++i) {
      if (slots[static_cast<size_t>(i)] >= 0) expect_token(i);
    }
  }

  // Distinct ones in any order, some negative.
  void draw_slots(Random& random) {
    for (int64_t slot = 0; slot < pages * problem.page_size; ++slot) slots.push_back(slot);
    random.shuffle(slots);
    slots.resize(static_cast<size_t>(problem.tokens));
    for (int64_t& slot : slots) {
      if (random.chance(15)) slot = random.pick<int64_t>({-1, -2, INT32_MIN});
    }
    slots64.resize(slots.size() * static_cast<size_t>(problem.slot_stride), INT64_MAX);
    slots32.resize(slots64.size(), INT32_MAX);
    for (size_t i = 0; i < slots.size(); ++i) {
      slots64[i * static_cast<size_t>(problem.slot_stride)] = slots[i];
      slots32[i * static_cast<size_t>(problem.slot_stride)] = static_cast<int32_t>(slots[i]);
    }
  }

  void make_side(Side& side, Random& random) {
    side.head_stride = problem.head_dim + random.integer(0, 3);
    side.token_stride = problem.kv_heads * side.head_stride + random.integer(0, 3);
    const size_t elements = static_cast<size_t>(problem.tokens * side.token_stride);
    side.source.resize(elements * bytes_of(problem.src_dtype));
    // Any bits at all: NaNs, infinities, subnormals and overflow among them.
    for (uint8_t& byte : side.source) byte = static_cast<uint8_t>(random.bits());

    const int64_t row = problem.head_dim + random.integer(0, 3);
    if (random.chance(50)) {  // heads inside a page's tokens, or outside
      side.view.head_stride = row;
      side.view.token_stride = problem.kv_heads * row;
    } else {
      side.view.token_stride = row;
      side.view.head_stride = problem.page_size * row;
    }
    side.view.page_stride = problem.page_size * problem.kv_heads * row + random.integer(0, 5);
    side.cache.assign(
        static_cast<size_t>(pages * side.view.page_stride) * bytes_of(problem.kv_dtype),
        uint8_t{0xA5});
    side.expected = side.cache;
    const int64_t count = random.pick<int64_t>({0, 1, problem.kv_heads});
    for (int64_t i = 0; i < count; ++i) {
      side.scales.push_back(static_cast<float>(0.01 + random.uniform()));
    }
  }

  void expect_token(int64_t token) {
    const int64_t slot = slots[static_cast<size_t>(token)];
    for (Side* side : {&k, &v}) {
      for (int64_t head = 0; head < problem.kv_heads; ++head) {
        const size_t scale = side->scales.size() > 1 ? static_cast<size_t>(head) : 0;
        for (int64_t d = 0; d < problem.head_dim; ++d) {
          const int64_t from = token * side->token_stride + head * side->head_stride + d;
          const int64_t to = slot / problem.page_size * side->view.page_stride +
                             slot % problem.page_size * side->view.token_stride +
                             head * side->view.head_stride + d;
          float value = load_source(side->source, from, problem.src_dtype);
          if (!side->scales.empty()) value /= side->scales[scale];
          const uint32_t code = encode(value, problem.kv_dtype);
          const size_t bytes = bytes_of(problem.kv_dtype);
          std::memcpy(&side->expected[static_cast<size_t>(to) * bytes], &code, bytes);
        }
      }
    }
  }

  void run(int num_threads) {
    problem.key = k.source.data();
    problem.value = v.source.data();
    problem.k = k.view;
    problem.v = v.view;
    problem.k.data = k.cache.data();
    problem.v.data = v.cache.data();
    problem.k_scale = k.scale();
    problem.v_scale = v.scale();
    problem.slots = problem.slots_are_int64 ? static_cast<const void*>(slots64.data())
                                            : static_cast<const void*>(slots32.data());
    run_append(problem, num_threads);
  }

  AppendProblem problem;
  int64_t pages = 0;
  std::vector<int64_t> slots;
  std::vector<int64_t> slots64;
  std::vector<int32_t> slots32;
  Side k, v;
};

// Every byte of both caches, those that no slot names included.
TEST(rows_are_written_to_their_slots_and_nothing_else) {
  Random random(1);
  for (const fv_dtype source : kSources) {
    for (const fv_dtype target : kTargets) {
      for (int round = 0; round < 40; ++round) {
        TRACE("from dtype %d to %d, round %d", source, target, round);
        Case test(source, target, random);
        test.run(static_cast<int>(random.integer(1, 9)));
        CHECK(test.k.cache == test.k.expected);
        CHECK(test.v.cache == test.v.expected);
      }
    }
  }
}

// One token of one head, each of its dimensions through the whole path.
std::vector<uint8_t> append_row(const std::vector<float>& row, fv_dtype target, float scale) {
  std::vector<uint8_t> k_cache(row.size() * bytes_of(target));
  std::vector<uint8_t> v_cache(k_cache.size());
  const int64_t slot = 0;
  AppendProblem problem;
  problem.tokens = problem.kv_heads = problem.page_size = 1;
  problem.head_dim = static_cast<int64_t>(row.size());
  problem.src_dtype = FV_DTYPE_FLOAT32;
  problem.key = problem.value = row.data();
  problem.kv_dtype = target;
  problem.k.data = k_cache.data();
  problem.v.data = v_cache.data();
  problem.k_scale.data = problem.v_scale.data = &scale;
  problem.slots = &slot;
  run_append(problem, 1);
  CHECK(k_cache == v_cache);
  return k_cache;
}

TEST(values_are_divided_by_the_scale_and_then_rounded) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // 17 / 0.5 lies halfway between 32 and 36.
  const std::vector<float> row = {1, -1, 0.0f, -0.0f, 10, 17, 1e30f, -1e30f, inf, -inf, nan, -nan};
  CHECK(append_row(row, FV_DTYPE_FLOAT8_E4M3, 0.5f) ==
        std::vector<uint8_t>(
            {0x40, 0xC0, 0x00, 0x80, 0x5A, 0x60, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0xFF}));
  CHECK(append_row({1e30f, inf, -inf, 1}, FV_DTYPE_FLOAT8_E5M2, 1.0f) ==
        std::vector<uint8_t>({0x7B, 0x7B, 0xFB, 0x3C}));
  // A scale that makes the quotient overflow in FP32 itself.
  CHECK(append_row({1e10f, -1e10f}, FV_DTYPE_FLOAT8_E4M3, 1e-35f) ==
        std::vector<uint8_t>({0x7E, 0xFE}));
  CHECK(append_row({0.0f}, FV_DTYPE_FLOAT8_E4M3, nan) == std::vector<uint8_t>({0x7F}));
}

TEST(an_append_of_nothing_writes_nothing) {
  AppendProblem problem;
  problem.page_size = problem.kv_heads = problem.head_dim = 1;
  problem.src_dtype = FV_DTYPE_FLOAT32;
  problem.kv_dtype = FV_DTYPE_FLOAT8_E4M3;
  run_append(problem, 4);  // every pointer null
}

// Slots whose bytes lie beyond 4 GiB, in memory that is mostly never touched.
TEST(offsets_are_64_bit) {
  constexpr size_t kBytes = size_t{5} << 30;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  const float row[2] = {1.0f, -2.0f};
  const int64_t page_stride = 0x9000001;  // elements; page 15 begins past 4 GiB
  const int64_t slot = 15 * 16 + 3;
  AppendProblem problem;
  problem.tokens = problem.kv_heads = 1;
  problem.head_dim = 2;
  problem.page_size = 16;
  problem.src_dtype = FV_DTYPE_FLOAT32;
  problem.key = problem.value = row;
  problem.kv_dtype = FV_DTYPE_FLOAT16;
  problem.k = {memory, page_stride, 2, 32};
  problem.v = {static_cast<char*>(memory) + 1024, page_stride, 2, 32};
  problem.slots = &slot;
  run_append(problem, 1);
  const size_t at = static_cast<size_t>(15 * page_stride + 3 * 2) * 2;
  CHECK(at > (size_t{1} << 32));
  uint16_t found[2][2];
  std::memcpy(found[0], static_cast<const char*>(memory) + at, 4);
  std::memcpy(found[1], static_cast<const char*>(memory) + 1024 + at, 4);
  for (const auto& codes : found) {
    CHECK_EQ(codes[0], 0x3C00);
    CHECK_EQ(codes[1], 0xC000);
  }
  munmap(memory, kBytes);
}

}  // namespace
}  // namespace flashverify::cpu

TEST_MAIN()
