// Every check of what an attention call's pointers lead to fires: strides,
// memory, and the contents of tables. As in attention_validation_test.cc.

#include <string>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/testing/attention_case.h"
#include "native/testing/attention_refusals.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify {
namespace {

using testing::AttentionCase;
using testing::AttentionOptions;
using testing::expect_all_refused;
using testing::Random;
using P = fv_attention_params;

const fv_api& api() { return *fv_get_api(); }

constexpr fv_status kInvalid = FV_ERROR_INVALID_ARGUMENT;
constexpr fv_status kRange = FV_ERROR_OUT_OF_RANGE;
constexpr fv_status kUnsupported = FV_ERROR_UNSUPPORTED;

template <typename T>
T* data(fv_tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

void move_bytes(fv_tensor& tensor, int64_t bytes) {
  tensor.data = static_cast<uint8_t*>(tensor.data) + bytes;
}

TEST(strides_and_pointers) {
  expect_all_refused({
      {"q last", kInvalid, "q", {"last axis has stride 2", "1"}, [](P& p) { p.q.stride[2] = 2; }},
      {"k last", kInvalid, "k_cache", {"stride 0"}, [](P& p) { p.k_cache.stride[3] = 0; }},
      {"v last", kInvalid, "v_cache", {"stride -1"}, [](P& p) { p.v_cache.stride[3] = -1; }},
      {"out last", kInvalid, "out", {"stride 3"}, [](P& p) { p.out.stride[2] = 3; }},
      {"table last",
       kInvalid,
       "page_table",
       {"stride 2"},
       [](P& p) { p.page_table.stride[1] = 2; }},
      {"lengths", kInvalid, "seq_lens", {"stride 2"}, [](P& p) { p.seq_lens.stride[0] = 2; }},
      {"offsets",
       kInvalid,
       "query_start_loc",
       {"stride 0"},
       [](P& p) { p.query_start_loc.stride[0] = 0; }},
      {"k negative",
       kInvalid,
       "k_cache",
       {"axis 0 has stride -64"},
       [](P& p) { p.k_cache.stride[0] = -64; }},
      {"q negative", kInvalid, "q", {"axis 1 has stride -1"}, [](P& p) { p.q.stride[1] = -1; }},
      {"lse negative",
       kInvalid,
       "lse",
       {"axis 0 has stride -9"},
       [](P& p) { p.lse.stride[0] = -9; }},
      {"overflow", kInvalid, "k_cache", {"2^60"}, [](P& p) { p.k_cache.stride[0] = INT64_MAX; }},
      {"sum overflows",
       kInvalid,
       "v_cache",
       {"2^60"},
       [](P& p) { p.v_cache.stride[0] = p.v_cache.stride[1] = INT64_MAX / 20; }},
      {"beyond 2^60", kInvalid, "q", {"2^60"}, [](P& p) { p.q.stride[0] = int64_t{1} << 57; }},
      {"q NULL", kInvalid, "q", {"NULL", "2560 bytes"}, [](P& p) { p.q.data = nullptr; }},
      {"k NULL", kInvalid, "k_cache", {"NULL"}, [](P& p) { p.k_cache.data = nullptr; }},
      {"v NULL", kInvalid, "v_cache", {"NULL"}, [](P& p) { p.v_cache.data = nullptr; }},
      {"table NULL", kInvalid, "page_table", {"NULL"}, [](P& p) { p.page_table.data = nullptr; }},
      {"lengths NULL", kInvalid, "seq_lens", {"NULL"}, [](P& p) { p.seq_lens.data = nullptr; }},
      {"offsets NULL",
       kInvalid,
       "query_start_loc",
       {"NULL"},
       [](P& p) { p.query_start_loc.data = nullptr; }},
      {"sinks NULL", kInvalid, "sinks", {"NULL"}, [](P& p) { p.sinks.data = nullptr; }},
      {"scale NULL",
       kInvalid,
       "k_dequant_scale",
       {"NULL"},
       [](P& p) { p.k_dequant_scale.data = nullptr; }},
      {"out NULL", kInvalid, "out", {"NULL"}, [](P& p) { p.out.data = nullptr; }},
      {"lse NULL", kInvalid, "lse", {"NULL"}, [](P& p) { p.lse.data = nullptr; }},
      {"q odd",
       kInvalid,
       "q",
       {"misaligned", "2 bytes for float16"},
       [](P& p) { move_bytes(p.q, 1); }},
      {"out odd", kInvalid, "out", {"misaligned"}, [](P& p) { move_bytes(p.out, 1); }},
      {"lse odd", kInvalid, "lse", {"misaligned", "4 bytes"}, [](P& p) { move_bytes(p.lse, 2); }},
      {"table odd",
       kInvalid,
       "page_table",
       {"misaligned"},
       [](P& p) { move_bytes(p.page_table, 2); }},
      {"lengths odd",
       kInvalid,
       "seq_lens",
       {"misaligned"},
       [](P& p) { move_bytes(p.seq_lens, 1); }},
      {"end of memory",
       kInvalid,
       "v_cache",
       {"end of memory"},
       [](P& p) { p.v_cache.data = reinterpret_cast<void*>(UINTPTR_MAX - 100); }},
  });
}

TEST(memory) {
  expect_all_refused({
      {"workspace NULL", kInvalid, "workspace", {"NULL"}, [](P& p) { p.workspace = nullptr; }},
      {"workspace odd",
       kInvalid,
       "workspace",
       {"misaligned", "64 bytes"},
       [](P& p) { p.workspace = static_cast<char*>(p.workspace) + 32; }},
      {"workspace small",
       FV_ERROR_WORKSPACE_TOO_SMALL,
       "workspace",
       {"or more for this call"},
       [](P& p) { p.workspace_bytes -= 1; }},
      {"workspace none",
       FV_ERROR_WORKSPACE_TOO_SMALL,
       "workspace",
       {"0 bytes"},
       [](P& p) { p.workspace_bytes = 0; }},
      {"workspace huge",
       kInvalid,
       "workspace",
       {"end of memory"},
       [](P& p) { p.workspace_bytes = SIZE_MAX; }},
      {"out is q", kInvalid, "out", {"overlaps q "}, [](P& p) { p.out = p.q; }},
      {"out in k",
       kInvalid,
       "out",
       {"overlaps k_cache "},
       [](P& p) { p.out.data = static_cast<char*>(p.k_cache.data) + 64; }},
      {"out in v",
       kInvalid,
       "out",
       {"overlaps v_cache "},
       [](P& p) { p.out.data = p.v_cache.data; }},
      {"out in workspace",
       kInvalid,
       "out",
       {"overlaps workspace "},
       [](P& p) { p.out.data = static_cast<char*>(p.workspace) + 128; }},
      {"lse in out",
       kInvalid,
       "out",
       {"overlaps lse "},
       [](P& p) { p.lse.data = static_cast<char*>(p.out.data) + 64; }},
      {"lse in q", kInvalid, "lse", {"overlaps q "}, [](P& p) { p.lse.data = p.q.data; }},
      {"lse in lengths",
       kInvalid,
       "lse",
       {"overlaps seq_lens "},
       [](P& p) { p.lse.data = p.seq_lens.data; }},
      {"lse in table",
       kInvalid,
       "lse",
       {"overlaps page_table "},
       [](P& p) { p.lse.data = p.page_table.data; }},
      {"lse in offsets",
       kInvalid,
       "lse",
       {"overlaps query_start_loc "},
       [](P& p) { p.lse.data = p.query_start_loc.data; }},
      {"lse in sinks",
       kInvalid,
       "lse",
       {"overlaps sinks "},
       [](P& p) { p.lse.data = p.sinks.data; }},
      {"lse in k scale",
       kInvalid,
       "lse",
       {"overlaps k_dequant_scale "},
       [](P& p) { p.lse.data = p.k_dequant_scale.data; }},
      {"lse in v scale",
       kInvalid,
       "lse",
       {"overlaps v_dequant_scale "},
       [](P& p) { p.lse.data = p.v_dequant_scale.data; }},
      {"workspace in k",
       kInvalid,
       "workspace",
       {"overlaps k_cache "},
       [](P& p) {
         p.k_cache.stride[0] = 1 << 20;
         p.k_cache.data = p.workspace;
       }},
      {"out rows meet",
       kInvalid,
       "out",
       {"overlaps itself", "axis 0 has stride 0"},
       [](P& p) { p.out.stride[0] = 0; }},
      {"out heads meet",
       kInvalid,
       "out",
       {"overlaps itself", "axis 1 has stride 63", "64 or more"},
       [](P& p) { p.out.stride[1] = 63; }},
      {"lse meets",
       kInvalid,
       "lse",
       {"overlaps itself"},
       [](P& p) { p.lse.stride[0] = p.lse.stride[1] = 1; }},
  });
}

TEST(routes_and_their_limits) {
  AttentionOptions options = testing::small_valid_call();
  options.head_dim = 100;
  using Damage = void (*)(P&);
  const auto to = [](int32_t route) {
    switch (route) {
      case FV_ROUTE_GROUPED_FP32:
        return Damage([](P& p) { p.route = FV_ROUTE_GROUPED_FP32; });
      case FV_ROUTE_GROUPED_HALF:
        return Damage([](P& p) { p.route = FV_ROUTE_GROUPED_HALF; });
      default:
        return Damage([](P& p) { p.route = FV_ROUTE_XQA_HALF; });
    }
  };
  expect_all_refused(
      {{"grouped_fp32",
        kUnsupported,
        "q",
        {"head_dim 100 for route grouped_fp32", "96, 112, 128", "scalar_fp32"},
        to(FV_ROUTE_GROUPED_FP32)},
       {"grouped_half",
        kUnsupported,
        "q",
        {"head_dim 100 for route grouped_half", "scalar_half"},
        to(FV_ROUTE_GROUPED_HALF)},
       {"xqa_half", kUnsupported, "q", {"head_dim 100 for route xqa_half"}, to(FV_ROUTE_XQA_HALF)}},
      options);
  expect_all_refused({{"xqa rows",
                       kUnsupported,
                       "query_start_loc",
                       {"request 0 has 3 query rows for route xqa_half", "0 to 1"},
                       to(FV_ROUTE_XQA_HALF)}});
  // These no route runs, so that they have no workspace to plan.
  options = testing::small_valid_call();
  options.head_dim = 513;
  Random random(1);
  AttentionCase wide(options, random);
  CHECK_EQ(api().paged_attention(&wide.params), kUnsupported);
  CHECK_CONTAINS(api().last_error(), "q: head_dim 513; accepted: 1 to 512");
  options = testing::small_valid_call();
  options.query_lens = {2, 65};
  AttentionCase many(options, random);
  CHECK_EQ(api().paged_attention(&many.params), kUnsupported);
  CHECK_CONTAINS(api().last_error(),
                 "query_start_loc: request 1 has 65 query rows for route scalar_fp32; accepted: 0 "
                 "to 64");
  options.equal_blocks = true;
  options.query_lens = {65, 65};
  AttentionCase equal(options, random);
  CHECK_EQ(api().paged_attention(&equal.params), kUnsupported);
  CHECK_CONTAINS(api().last_error(), "q: 65 query rows per request for route scalar_fp32");
}

TEST(lengths_offsets_and_pages) {
  expect_all_refused({
      {"length < 0",
       kRange,
       "seq_lens",
       {"element 1 is -1;", "0 to 80"},
       [](P& p) { data<int32_t>(p.seq_lens)[1] = -1; }},
      {"length",
       kRange,
       "seq_lens",
       {"element 0 is 81;", "0 to 80 (max_pages x page_size)"},
       [](P& p) { data<int32_t>(p.seq_lens)[0] = 81; }},
      {"huge",
       kRange,
       "seq_lens",
       {"2147483647"},
       [](P& p) { data<int32_t>(p.seq_lens)[1] = INT32_MAX; }},
      {"first offset",
       kRange,
       "query_start_loc",
       {"element 0 is 1;", "0"},
       [](P& p) { data<int32_t>(p.query_start_loc)[0] = 1; }},
      {"falling",
       kRange,
       "query_start_loc",
       {"element 2 is 2;", "3 (element 1) or more"},
       [](P& p) { data<int32_t>(p.query_start_loc)[2] = 2; }},
      {"negative",
       kRange,
       "query_start_loc",
       {"element 1 is -1"},
       [](P& p) { data<int32_t>(p.query_start_loc)[1] = -1; }},
      {"last",
       kRange,
       "query_start_loc",
       {"last element is 6;", "5 (rows of q)"},
       [](P& p) { data<int32_t>(p.query_start_loc)[2] = 6; }},
      {"page < 0",
       kRange,
       "page_table",
       {"element [0, 1] is -1;", "0 to "},
       [](P& p) { data<int32_t>(p.page_table)[1] = -1; }},
      {"page",
       kRange,
       "page_table",
       {"element [1, 1] is 9;", "0 to 8 (k_cache has 9 pages)"},
       [](P& p) {
         data<int32_t>(p.page_table)[p.page_table.stride[0] + 1] =
             static_cast<int32_t>(p.k_cache.shape[0]);
       }},
      {"extreme page",
       kRange,
       "page_table",
       {"element [0, 2] is -2147483648"},
       [](P& p) { data<int32_t>(p.page_table)[2] = INT32_MIN; }},
      {"no pages",
       kRange,
       "page_table",
       {"element [0, 0]", "0 pages"},
       [](P& p) { p.k_cache.shape[0] = p.v_cache.shape[0] = 0; }},
  });
}

TEST(a_bad_page_is_found_wherever_it_is) {
  AttentionOptions options;
  options.query_lens = {1};
  options.seq_lens = {200};
  options.page_size = 1;
  options.kv_heads = options.q_heads = 1;
  options.head_dim = 1;
  Random random(1);
  AttentionCase c(options, random);
  c.plan(api());
  int32_t* table = data<int32_t>(c.params.page_table);
  for (int i = 0; i < 200; ++i) {
    for (const int32_t bad : {-1, INT32_MIN, INT32_MAX, static_cast<int32_t>(204)}) {
      const int32_t good = table[i];
      table[i] = bad;
      CHECK_EQ(api().paged_attention(&c.params), kRange);
      CHECK_CONTAINS(api().last_error(),
                     "element [0, " + std::to_string(i) + "] is " + std::to_string(bad) + ";");
      table[i] = good;
    }
  }
  // Past the last used page anything goes.
  table[200] = INT32_MIN;
  table[201] = INT32_MAX;
  CHECK_EQ(api().paged_attention(&c.params), FV_OK);
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
