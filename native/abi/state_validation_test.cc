// Every check of append_kv and merge_states fires: with its status, naming the
// argument and the value found, and with nothing written.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/testing/arena.h"
#include "native/testing/attention_case.h"
#include "native/testing/check.h"
#include "native/testing/random.h"
#include "native/testing/refusal.h"

namespace flashverify {
namespace {

using testing::Arena;
using testing::CacheLayout;
using testing::Refusal;

const fv_api& api() { return *fv_get_api(); }

constexpr fv_status kInvalid = FV_ERROR_INVALID_ARGUMENT;
constexpr fv_status kRange = FV_ERROR_OUT_OF_RANGE;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <typename T>
T* data(const fv_tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

void zero(const fv_tensor& tensor, size_t bytes) { std::memset(tensor.data, 0, bytes); }

// 6 tokens of 2 heads of 32 into 4 pages of 4.
struct AppendCase {
  Arena arena;
  fv_append_params params = {};

  explicit AppendCase(CacheLayout layout = CacheLayout::kNhd) {
    params.struct_size = sizeof params;
    params.device_type = FV_DEVICE_CPU;
    params.num_threads = 1;
    params.key = arena.tensor(FV_DTYPE_FLOAT16, {6, 2, 32});
    params.value = arena.tensor(FV_DTYPE_FLOAT16, {6, 2, 32});
    zero(params.key, 6 * 2 * 32 * 2);
    zero(params.value, 6 * 2 * 32 * 2);
    testing::make_caches(arena, layout, FV_DTYPE_FLOAT8_E4M3, 4, 4, 2, 32, &params.k_cache,
                         &params.v_cache);
    params.slot_mapping = arena.vector(FV_DTYPE_INT64, std::vector<int64_t>{15, 3, -1, 0, -1, 4});
    params.k_dequant_scale = arena.vector(FV_DTYPE_FLOAT32, std::vector<float>{0.5f, 2.0f});
    params.v_dequant_scale = arena.vector(FV_DTYPE_FLOAT32, std::vector<float>{1.0f});
  }

  fv_status call() const { return api().append_kv(&params); }
};

// 3 states of 2 rows of 2 heads of 8.
struct MergeCase {
  Arena arena;
  fv_merge_params params = {};

  MergeCase() {
    params.struct_size = sizeof params;
    params.device_type = FV_DEVICE_CPU;
    params.num_threads = 1;
    params.outs = arena.tensor(FV_DTYPE_FLOAT32, {3, 2, 2, 8});
    params.lses = arena.tensor(FV_DTYPE_FLOAT32, {3, 2, 2});
    params.out = arena.tensor(FV_DTYPE_FLOAT32, {2, 2, 8});
    params.out_lse = arena.tensor(FV_DTYPE_FLOAT32, {2, 2});
  }

  fv_status call() const { return api().merge_states(&params); }
};

// In the form that expect_refused() takes.
fv_status call(fv_append_params* params) { return api().append_kv(params); }
fv_status call(fv_merge_params* params) { return api().merge_states(params); }

template <typename Case, typename Params>
void expect_all_refused(const std::vector<Refusal<Params>>& refusals) {
  for (const Refusal<Params>& refusal : refusals) {
    const Case c;
    testing::expect_refused<Params>(refusal, c.params, c.arena, &call);
  }
}

TEST(append_base_cases_are_valid) {
  for (int layout = 0; layout < testing::kCacheLayouts; ++layout) {
    const AppendCase c(static_cast<CacheLayout>(layout));
    const fv_status status = c.call();
    TRACE("%s: %s", testing::layout_name(static_cast<CacheLayout>(layout)), api().last_error());
    CHECK_EQ(status, FV_OK);
  }
  AppendCase nothing;
  nothing.params.key.shape[0] = nothing.params.value.shape[0] = 0;
  nothing.params.slot_mapping.shape[0] = 0;
  nothing.params.key.data = nothing.params.value.data = nothing.params.slot_mapping.data = nullptr;
  const auto memory = nothing.arena.snapshot();
  CHECK_EQ(nothing.call(), FV_OK);
  CHECK(nothing.arena.snapshot() == memory);
}

TEST(append_fields) {
  using P = fv_append_params;
  CHECK_EQ(api().append_kv(nullptr), kInvalid);
  CHECK_CONTAINS(api().last_error(), "params: NULL");
  expect_all_refused<AppendCase, P>({
      {"size", kInvalid, "struct_size", {"12;"}, [](P& p) { p.struct_size = 12; }},
      {"image", kInvalid, "cuda_image", {"sm_70;"}, [](P& p) { p.cuda_image = "sm_70"; }},
      {"device", kInvalid, "device_type", {"code 0"}, [](P& p) { p.device_type = 0; }},
      {"index", kInvalid, "device_index", {"-1"}, [](P& p) { p.device_index = -1; }},
      {"threads", kInvalid, "num_threads", {"-2"}, [](P& p) { p.num_threads = -2; }},
      {"stream", kInvalid, "stream", {"NULL"}, [](P& p) { p.stream = &p; }},
      {"key dtype",
       kInvalid,
       "key",
       {"float8_e4m3fn"},
       [](P& p) { p.key.dtype = FV_DTYPE_FLOAT8_E4M3; }},
      {"key absent", kInvalid, "key", {"absent"}, [](P& p) { p.key = {}; }},
      {"key rank", kInvalid, "key", {"rank 4"}, [](P& p) { p.key.rank = 4; }},
      {"key heads",
       kInvalid,
       "key",
       {"axis 1 has 1", "2 (kv_heads of k_cache)"},
       [](P& p) { p.key.shape[1] = 1; }},
      {"key dim",
       kInvalid,
       "key",
       {"axis 2 has 16", "32 (head_dim"},
       [](P& p) { p.key.shape[2] = 16; }},
      {"key stride",
       kInvalid,
       "key",
       {"last axis has stride 2"},
       [](P& p) { p.key.stride[2] = 2; }},
      {"key NULL", kInvalid, "key", {"NULL"}, [](P& p) { p.key.data = nullptr; }},
      {"value tokens",
       kInvalid,
       "value",
       {"axis 0 has 5", "6 (tokens of key)"},
       [](P& p) { p.value.shape[0] = 5; }},
      {"value dtype",
       kInvalid,
       "value",
       {"bfloat16", "float16 (dtype of key)"},
       [](P& p) { p.value.dtype = FV_DTYPE_BFLOAT16; }},
      {"value odd",
       kInvalid,
       "value",
       {"misaligned"},
       [](P& p) { p.value.data = static_cast<char*>(p.value.data) + 1; }},
      {"k dtype",
       kInvalid,
       "k_cache",
       {"float32"},
       [](P& p) { p.k_cache.dtype = FV_DTYPE_FLOAT32; }},
      {"v dtype",
       kInvalid,
       "v_cache",
       {"float8_e5m2"},
       [](P& p) { p.v_cache.dtype = FV_DTYPE_FLOAT8_E5M2; }},
      {"k NULL", kInvalid, "k_cache", {"NULL"}, [](P& p) { p.k_cache.data = nullptr; }},
      {"slots dtype",
       kInvalid,
       "slot_mapping",
       {"float32", "int32 or int64"},
       [](P& p) { p.slot_mapping.dtype = FV_DTYPE_FLOAT32; }},
      {"slots",
       kInvalid,
       "slot_mapping",
       {"axis 0 has 4", "6 (tokens of key)"},
       [](P& p) { p.slot_mapping.shape[0] = 4; }},
      {"slots odd",
       kInvalid,
       "slot_mapping",
       {"misaligned", "8 bytes for int64"},
       [](P& p) { p.slot_mapping.data = static_cast<char*>(p.slot_mapping.data) + 4; }},
      {"slot",
       kRange,
       "slot_mapping",
       {"element 2 is 16;", "less than 16"},
       [](P& p) { data<int64_t>(p.slot_mapping)[2] = 16; }},
      {"slot wraps",
       kRange,
       "slot_mapping",
       {"9223372036854775807"},
       [](P& p) { data<int64_t>(p.slot_mapping)[5] = INT64_MAX; }},
      {"twice",
       kInvalid,
       "slot_mapping",
       {"elements 1 and 5 are both 3;"},
       [](P& p) { data<int64_t>(p.slot_mapping)[5] = 3; }},
      {"repeated",
       kInvalid,
       "slot_mapping",
       {"elements 0 and 1 are both 15"},
       [](P& p) { p.slot_mapping.stride[0] = 0; }},
      {"scale",
       kInvalid,
       "k_dequant_scale",
       {"element 1 is 0"},
       [](P& p) { data<float>(p.k_dequant_scale)[1] = 0; }},
      {"scale NaN",
       kInvalid,
       "v_dequant_scale",
       {"nan"},
       [](P& p) { data<float>(p.v_dequant_scale)[0] = kNan; }},
  });
}

TEST(append_memory) {
  using P = fv_append_params;
  expect_all_refused<AppendCase, P>({
      {"k is v", kInvalid, "k_cache", {"overlaps v_cache "}, [](P& p) { p.v_cache = p.k_cache; }},
      {"v one byte into k",
       kInvalid,
       "k_cache",
       {"overlaps v_cache "},
       [](P& p) { p.v_cache.data = data<char>(p.k_cache) + 4 * 4 * 2 * 32 - 1; }},
      {"key in k",
       kInvalid,
       "k_cache",
       {"overlaps key "},
       [](P& p) { p.key.data = p.k_cache.data; }},
      {"value in v",
       kInvalid,
       "v_cache",
       {"overlaps value "},
       [](P& p) { p.value.data = p.v_cache.data; }},
      {"slots in v",
       kInvalid,
       "v_cache",
       {"overlaps slot_mapping "},
       [](P& p) { p.slot_mapping.data = p.v_cache.data; }},
      {"scale in k",
       kInvalid,
       "k_cache",
       {"overlaps k_dequant_scale "},
       [](P& p) {
         p.k_dequant_scale.data = p.k_cache.data;
         data<float>(p.k_dequant_scale)[0] = data<float>(p.k_dequant_scale)[1] = 1;
       }},
      {"pages meet",
       kInvalid,
       "k_cache",
       {"overlaps itself", "axis 0 has stride 0"},
       [](P& p) { p.k_cache.stride[0] = 0; }},
      {"heads meet",
       kInvalid,
       "v_cache",
       {"overlaps itself", "axis 2 has stride 31"},
       [](P& p) { p.v_cache.stride[2] = 31; }},
  });
}

TEST(a_duplicate_slot_is_found_among_many) {
  constexpr int64_t kTokens = 5000;
  Arena arena;
  AppendCase small;
  fv_append_params params = small.params;
  params.key = arena.tensor(FV_DTYPE_FLOAT16, {kTokens, 1, 1});
  params.value = params.key;
  testing::make_caches(arena, CacheLayout::kNhd, FV_DTYPE_FLOAT8_E4M3, 2 * kTokens, 1, 1, 1,
                       &params.k_cache, &params.v_cache);
  params.k_dequant_scale = params.v_dequant_scale = {};
  std::vector<int64_t> slots(2 * kTokens);
  std::iota(slots.begin(), slots.end(), 0);
  testing::Random random(1);
  for (int i = 0; i < 100; ++i) {
    random.shuffle(slots);
    params.slot_mapping = arena.vector(FV_DTYPE_INT64, slots);
    params.slot_mapping.shape[0] = kTokens;
    CHECK_EQ(api().append_kv(&params), FV_OK);
    const int64_t first = random.integer(0, kTokens - 2);
    const int64_t second = random.integer(first + 1, kTokens - 1);
    data<int64_t>(params.slot_mapping)[second] = data<int64_t>(params.slot_mapping)[first];
    CHECK_EQ(api().append_kv(&params), kInvalid);
    CHECK_CONTAINS(api().last_error(), "elements " + std::to_string(first) + " and " +
                                           std::to_string(second) + " are both ");
  }
}

TEST(more_tokens_than_slots_need_no_more_memory_than_the_slots) {
  AppendCase c;
  for (fv_tensor* source : {&c.params.key, &c.params.value}) {
    source->shape[0] = int64_t{1} << 20;
    source->stride[0] = 0;
  }
  std::vector<int32_t> slots(size_t{1} << 20, -1);
  std::iota(slots.end() - 16, slots.end(), 0);
  c.params.slot_mapping = c.arena.vector(FV_DTYPE_INT32, slots);
  CHECK_EQ(c.call(), FV_OK);
  std::fill(slots.begin(), slots.end() - 16, 15);
  c.params.slot_mapping = c.arena.vector(FV_DTYPE_INT32, slots);
  CHECK_EQ(c.call(), kInvalid);
  CHECK_CONTAINS(api().last_error(), "slot_mapping: elements 0 and 1 are both 15");
}

// AddressSanitizer ends the program where an allocation fails.
#ifndef __SANITIZE_ADDRESS__
TEST(a_host_without_memory_is_a_status) {
  constexpr int64_t kTokens = 1 << 22;
  Arena arena;
  AppendCase small;
  fv_append_params params = small.params;
  params.key = arena.tensor(FV_DTYPE_FLOAT16, {1, 1, 1});
  params.key.shape[0] = kTokens;
  params.key.stride[0] = 0;
  params.value = params.key;
  testing::make_caches(arena, CacheLayout::kNhd, FV_DTYPE_FLOAT8_E4M3, kTokens, 1, 1, 1,
                       &params.k_cache, &params.v_cache);
  params.k_dequant_scale = params.v_dequant_scale = {};
  std::vector<int64_t> slots(kTokens);
  std::iota(slots.begin(), slots.end(), 0);
  params.slot_mapping = arena.vector(FV_DTYPE_INT64, slots);
  const auto memory = arena.snapshot();

  // The address space as it is, and half of what the check for duplicates needs.
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit unlimited;
  CHECK_EQ(getrlimit(RLIMIT_AS, &unlimited), 0);
  rlimit tight = unlimited;
  tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + (64 << 20));
  CHECK_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  const fv_status status = api().append_kv(&params);
  CHECK_EQ(setrlimit(RLIMIT_AS, &unlimited), 0);
  CHECK_EQ(status, FV_ERROR_OUT_OF_MEMORY);
  CHECK_CONTAINS(api().last_error(), "memory: ");
  CHECK(arena.snapshot() == memory);
  CHECK_EQ(api().append_kv(&params), FV_OK);
}
#endif

TEST(merge_fields) {
  using P = fv_merge_params;
  CHECK_EQ(MergeCase().call(), FV_OK);
  CHECK_EQ(api().merge_states(nullptr), kInvalid);
  CHECK_CONTAINS(api().last_error(), "params: NULL");
  expect_all_refused<MergeCase, P>({
      {"size", kInvalid, "struct_size", {"0;"}, [](P& p) { p.struct_size = 0; }},
      {"image", kInvalid, "cuda_image", {"sm_70;"}, [](P& p) { p.cuda_image = "sm_70"; }},
      {"index", kInvalid, "device_index", {"3;"}, [](P& p) { p.device_index = 3; }},
      {"threads", kInvalid, "num_threads", {"5000"}, [](P& p) { p.num_threads = 5000; }},
      {"outs dtype",
       kInvalid,
       "outs",
       {"float16", "float32"},
       [](P& p) { p.outs.dtype = FV_DTYPE_FLOAT16; }},
      {"no states", kInvalid, "outs", {"axis 0 (states) has 0"}, [](P& p) { p.outs.shape[0] = 0; }},
      {"no heads", kInvalid, "outs", {"heads"}, [](P& p) { p.outs.shape[2] = 0; }},
      {"no dims", kInvalid, "outs", {"head_dim"}, [](P& p) { p.outs.shape[3] = 0; }},
      {"outs stride", kInvalid, "outs", {"stride 2"}, [](P& p) { p.outs.stride[3] = 2; }},
      {"lses dtype", kInvalid, "lses", {"int32"}, [](P& p) { p.lses.dtype = FV_DTYPE_INT32; }},
      {"lses states",
       kInvalid,
       "lses",
       {"axis 0 has 2", "3 (states of outs)"},
       [](P& p) { p.lses.shape[0] = 2; }},
      {"lses rows", kInvalid, "lses", {"axis 1 has 3"}, [](P& p) { p.lses.shape[1] = 3; }},
      {"lses heads", kInvalid, "lses", {"axis 2 has 1"}, [](P& p) { p.lses.shape[2] = 1; }},
      {"lses NULL", kInvalid, "lses", {"NULL"}, [](P& p) { p.lses.data = nullptr; }},
      {"out absent", kInvalid, "out", {"absent"}, [](P& p) { p.out = {}; }},
      {"out rows",
       kInvalid,
       "out",
       {"axis 0 has 1", "2 (rows of outs)"},
       [](P& p) { p.out.shape[0] = 1; }},
      {"out dim",
       kInvalid,
       "out",
       {"axis 2 has 7", "8 (head_dim of outs)"},
       [](P& p) { p.out.shape[2] = 7; }},
      {"out odd",
       kInvalid,
       "out",
       {"misaligned"},
       [](P& p) { p.out.data = static_cast<char*>(p.out.data) + 2; }},
      {"out_lse rank", kInvalid, "out_lse", {"rank 1"}, [](P& p) { p.out_lse.rank = 1; }},
      {"out_lse heads",
       kInvalid,
       "out_lse",
       {"axis 1 has 1"},
       [](P& p) { p.out_lse.shape[1] = 1; }},
      {"in place", kInvalid, "out", {"overlaps outs "}, [](P& p) { p.out.data = p.outs.data; }},
      {"lse in place",
       kInvalid,
       "out_lse",
       {"overlaps lses "},
       [](P& p) { p.out_lse.data = p.lses.data; }},
      {"both", kInvalid, "out", {"overlaps out_lse "}, [](P& p) { p.out_lse.data = p.out.data; }},
      {"rows meet", kInvalid, "out", {"overlaps itself"}, [](P& p) { p.out.stride[0] = 8; }},
      {"lse meets",
       kInvalid,
       "out_lse",
       {"overlaps itself"},
       [](P& p) { p.out_lse.stride[1] = 0; }},
  });
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
