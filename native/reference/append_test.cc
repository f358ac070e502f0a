// The library's cache write against the oracle, byte by byte.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/reference/number_format.h"
#include "native/reference/reference.h"
#include "native/testing/attention_case.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify::reference {
namespace {

using testing::Arena;
using testing::CacheLayout;
using testing::Random;

const fv_api& api() { return *fv_get_api(); }

struct AppendOptions {
  int64_t tokens = 9;
  int64_t pages = 5;
  int64_t page_size = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 64;
  int32_t src_dtype = FV_DTYPE_FLOAT16;
  int32_t kv_dtype = FV_DTYPE_FLOAT8_E4M3;
  CacheLayout layout = CacheLayout::kNhd;
  bool wide_slots = true;
  int scales = 0;
  int32_t num_threads = 1;
};

struct AppendCase {
  Arena arena;
  fv_append_params params = {};

  AppendCase(const AppendOptions& options, Random& random) {
    params.struct_size = sizeof params;
    params.device_type = FV_DEVICE_CPU;
    params.num_threads = options.num_threads;
    const std::initializer_list<int64_t> shape = {options.tokens, options.kv_heads,
                                                  options.head_dim};
    params.key = arena.tensor(options.src_dtype, shape);
    params.value = arena.tensor(options.src_dtype, shape, {1, 0, 2}, 5);
    for (const fv_tensor* source : {&params.key, &params.value}) {
      for (int64_t t = 0; t < options.tokens; ++t) {
        for (int64_t head = 0; head < options.kv_heads; ++head) {
          for (int64_t d = 0; d < options.head_dim; ++d) {
            // From the smallest subnormals to overflow, and now and then NaN.
            double value = random.normal() * std::exp2(random.integer(-22, 18));
            if (random.chance(2)) value = std::numeric_limits<double>::quiet_NaN();
            if (random.chance(2)) value = random.pick({HUGE_VAL, -HUGE_VAL, 0.0, -0.0});
            store(source->data, element_offset(*source, {t, head, d}), source->dtype, value);
          }
        }
      }
    }
    testing::make_caches(arena, options.layout, options.kv_dtype, options.pages, options.page_size,
                         options.kv_heads, options.head_dim, &params.k_cache, &params.v_cache);
    std::vector<int64_t> slots;
    for (int64_t slot = 0; slot < options.pages * options.page_size; ++slot) slots.push_back(slot);
    random.shuffle(slots);
    slots.resize(static_cast<size_t>(options.tokens));
    for (int64_t& slot : slots) {
      if (random.chance(20)) slot = -random.integer(1, 1000);
    }
    if (options.wide_slots) {
      params.slot_mapping = arena.vector(FV_DTYPE_INT64, slots);
    } else {
      params.slot_mapping =
          arena.vector(FV_DTYPE_INT32, std::vector<int32_t>(slots.begin(), slots.end()));
    }
    if (options.scales > 0) {
      std::vector<float> scales(options.scales == 1 ? 1 : static_cast<size_t>(options.kv_heads));
      for (float& scale : scales) scale = static_cast<float>(0.01 + random.uniform() * 3);
      params.k_dequant_scale = arena.vector(FV_DTYPE_FLOAT32, scales);
      for (float& scale : scales) scale = static_cast<float>(0.01 + random.uniform() * 3);
      params.v_dequant_scale = arena.vector(FV_DTYPE_FLOAT32, scales);
    }
  }
};

template <typename Visit>
void for_each_element(const fv_tensor& cache, const Visit& visit) {
  for (int64_t page = 0; page < cache.shape[0]; ++page) {
    for (int64_t offset = 0; offset < cache.shape[1]; ++offset) {
      for (int64_t head = 0; head < cache.shape[2]; ++head) {
        for (int64_t d = 0; d < cache.shape[3]; ++d) {
          visit(element_offset(cache, {page, offset, head, d}));
        }
      }
    }
  }
}

// Makes all NaNs alike: which NaN is written is not promised.
void unify_nans(const fv_append_params& params) {
  for (const fv_tensor* cache : {&params.k_cache, &params.v_cache}) {
    const auto item = static_cast<size_t>(testing::item_bytes(cache->dtype));
    for_each_element(*cache, [&](int64_t at) {
      if (!std::isnan(load(cache->data, at, cache->dtype))) return;
      std::memset(static_cast<uint8_t*>(cache->data) + static_cast<size_t>(at) * item, 0xFF, item);
    });
  }
}

// Runs both on the same memory, one after the other, and compares all of it.
void check_case(const AppendCase& c) {
  // What is there before is no NaN, so that a NaN which is not written shows.
  for (const fv_tensor* cache : {&c.params.k_cache, &c.params.v_cache}) {
    for_each_element(*cache, [&](int64_t at) { store(cache->data, at, cache->dtype, 1); });
  }
  const auto before = c.arena.snapshot();
  append(c.params);
  unify_nans(c.params);
  const auto expected = c.arena.snapshot();
  c.arena.restore(before);
  const fv_status status = api().append_kv(&c.params);
  TRACE("%s", api().last_error());
  CHECK_EQ(status, FV_OK);
  unify_nans(c.params);
  CHECK(c.arena.snapshot() == expected);
}

TEST(random_writes_match_the_oracle) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    AppendOptions options;
    options.pages = random.integer(1, 6);
    options.page_size = random.pick<int64_t>({1, 3, 16, 100});
    options.tokens = random.integer(0, std::min<int64_t>(options.pages * options.page_size, 80));
    options.kv_heads = random.integer(1, 4);
    options.head_dim =
        random.chance(50) ? random.integer(1, 300) : random.pick<int64_t>({64, 80, 128, 256, 1000});
    options.src_dtype = random.pick({FV_DTYPE_FLOAT32, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16});
    options.kv_dtype = random.pick(
        {FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT8_E5M2, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16});
    options.layout = static_cast<CacheLayout>(random.integer(0, testing::kCacheLayouts - 1));
    options.wide_slots = random.chance(50);
    options.scales = static_cast<int>(random.integer(0, 2));
    options.num_threads = static_cast<int32_t>(random.integer(1, 4));
    TRACE("seed %d: %d tokens, dtypes %d to %d, heads %d, dim %d, layout %s, scales %d",
          static_cast<int>(seed), static_cast<int>(options.tokens), options.src_dtype,
          options.kv_dtype, static_cast<int>(options.kv_heads), static_cast<int>(options.head_dim),
          testing::layout_name(options.layout), options.scales);
    const AppendCase c(options, random);
    check_case(c);
  }
}

// Every 16-bit source code, through a page of one token each.
TEST(every_half_precision_value_is_written_right) {
  for (const int32_t src_dtype : {FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16}) {
    for (const int32_t kv_dtype :
         {FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT8_E5M2, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16}) {
      TRACE("dtype %d to %d", src_dtype, kv_dtype);
      AppendOptions options;
      options.tokens = 256;
      options.pages = 256;
      options.page_size = 1;
      options.kv_heads = 1;
      options.head_dim = 256;
      options.src_dtype = src_dtype;
      options.kv_dtype = kv_dtype;
      Random random(1);
      const AppendCase c(options, random);
      auto* codes = static_cast<uint16_t*>(c.params.key.data);
      for (int code = 0; code < 65536; ++code) codes[code] = static_cast<uint16_t>(code);
      check_case(c);
    }
  }
}

}  // namespace
}  // namespace flashverify::reference

TEST_MAIN()
