// Every check of an attention call's fields fires: with its status, naming the
// argument and the value found, and with nothing written.

#include <limits>
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
constexpr fv_status kUnsupported = FV_ERROR_UNSUPPORTED;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

template <typename T>
T* data(fv_tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

TEST(the_base_case_is_valid) {
  Random random(1);
  AttentionCase c(testing::small_valid_call(), random);
  c.plan(api());
  CHECK_EQ(api().paged_attention(&c.params), FV_OK);
}

TEST(header_fields) {
  CHECK_EQ(api().paged_attention(nullptr), kInvalid);
  CHECK_CONTAINS(api().last_error(), "params: NULL");
  expect_all_refused({
      {"older", kInvalid, "struct_size", {"8;"}, [](P& p) { p.struct_size = 8; }},
      {"newer", kInvalid, "struct_size", {}, [](P& p) { p.struct_size += 8; }},
      {"absurd", kInvalid, "struct_size", {"4294967295"}, [](P& p) { p.struct_size = UINT32_MAX; }},
      {"no route", kInvalid, "route", {"none", "grouped_fp32"}, [](P& p) { p.route = 0; }},
      {"negative route", kInvalid, "route", {"code -3"}, [](P& p) { p.route = -3; }},
      {"unknown route", kInvalid, "route", {"code 6"}, [](P& p) { p.route = FV_ROUTE_COUNT; }},
      {"unknown device", kInvalid, "device_type", {"code 77"}, [](P& p) { p.device_type = 77; }},
      {"device 1", kInvalid, "device_index", {"1;", "0"}, [](P& p) { p.device_index = 1; }},
      {"stream", kInvalid, "stream", {"NULL"}, [](P& p) { p.stream = &p; }},
      {"no threads", kInvalid, "num_threads", {"0;", "1 to 1024"}, [](P& p) { p.num_threads = 0; }},
      {"threads", kInvalid, "num_threads", {"1025"}, [](P& p) { p.num_threads = 1025; }},
      {"splits", kInvalid, "splits", {"1;", "0 on the CPU"}, [](P& p) { p.splits = 1; }},
      {"image", kInvalid, "cuda_image", {"sm_70;"}, [](P& p) { p.cuda_image = "sm_70"; }},
      {"isa", kInvalid, "cpu_isa", {"code 4"}, [](P& p) { p.cpu_isa = 4; }},
      {"negative isa", kInvalid, "cpu_isa", {"code -1"}, [](P& p) { p.cpu_isa = -1; }},
  });
}

void on_cuda(P& p) { p.device_type = FV_DEVICE_CUDA; }

// What the host can see of a call on CUDA is checked before any driver is asked.
TEST(fields_of_calls_on_cuda) {
  expect_all_refused({
      {"device -1",
       kInvalid,
       "device_index",
       {"-1;", "0 or more"},
       [](P& p) {
         on_cuda(p);
         p.device_index = -1;
       }},
      {"splits",
       kInvalid,
       "splits",
       {"3;", "powers of two up to 128"},
       [](P& p) {
         on_cuda(p);
         p.splits = 3;
       }},
      {"many splits",
       kInvalid,
       "splits",
       {"256;"},
       [](P& p) {
         on_cuda(p);
         p.splits = 256;
       }},
      {"rank",
       kInvalid,
       "q",
       {"rank 2"},
       [](P& p) {
         on_cuda(p);
         p.q.rank = 2;
       }},
  });
}

TEST(a_call_on_cuda_without_a_driver_or_code_says_so) {
  int32_t count = -1;
  const fv_status driver = api().cuda_device_count(&count);
  Random random(1);
  AttentionCase c(testing::small_valid_call(), random);
  on_cuda(c.params);
  const auto before = c.arena.snapshot();
  const fv_status status = api().paged_attention(&c.params);
  CHECK(c.arena.snapshot() == before);
  // This program carries no device code, so that it fails on a machine with a GPU too.
  CHECK_EQ(status, driver == FV_OK && count > 0 ? FV_ERROR_UNSUPPORTED
                   : driver == FV_OK            ? FV_ERROR_INVALID_ARGUMENT
                                                : FV_ERROR_DEVICE);
  size_t bytes = 7;
  CHECK(api().attention_workspace_bytes(&c.params, &bytes) != FV_OK);
  CHECK_EQ(bytes, size_t{7});
}

// A scale of rank 0 is a number, wherever the call runs.
TEST(numbers_as_scales) {
  Random random(1);
  AttentionCase c(testing::small_valid_call(), random);
  c.plan(api());
  float number = 0.5f;
  c.params.k_dequant_scale = {};
  c.params.k_dequant_scale.data = &number;
  c.params.k_dequant_scale.dtype = FV_DTYPE_FLOAT32;
  CHECK_EQ(api().paged_attention(&c.params), FV_OK);
  for (const float bad : {kNan, kInf, 0.0f, -1.0f}) {
    number = bad;
    for (const int32_t device : {FV_DEVICE_CPU, FV_DEVICE_CUDA}) {
      fv_attention_params p = c.params;
      p.device_type = device;
      CHECK_EQ(api().paged_attention(&p), kInvalid);
      CHECK_CONTAINS(api().last_error(), "k_dequant_scale: element 0 is");
    }
  }
}

TEST(an_instruction_set_that_the_cpu_lacks_is_refused_naming_the_best) {
  for (int32_t isa = FV_CPU_ISA_PORTABLE; isa <= FV_CPU_ISA_AVX512; ++isa) {
    if (api().has_cpu_isa(isa) != 0) continue;
    Random random(1);
    AttentionCase c(testing::small_valid_call(), random);
    c.plan(api());
    c.params.cpu_isa = isa;
    CHECK_EQ(api().paged_attention(&c.params), kUnsupported);
    CHECK_CONTAINS(api().last_error(), api().cpu_isa_name(api().best_cpu_isa()));
  }
}

TEST(numbers) {
  expect_all_refused({
      {"scale NaN", kInvalid, "scale", {"nan"}, [](P& p) { p.softmax_scale = kNan; }},
      {"scale inf", kInvalid, "scale", {"-inf"}, [](P& p) { p.softmax_scale = -kInf; }},
      {"softcap NaN", kInvalid, "softcap", {"nan"}, [](P& p) { p.softcap = kNan; }},
      {"softcap inf", kInvalid, "softcap", {"inf"}, [](P& p) { p.softcap = kInf; }},
      {"softcap < 0", kInvalid, "softcap", {"-1;"}, [](P& p) { p.softcap = -1; }},
      {"causal 2", kInvalid, "causal", {"2;", "0 or 1"}, [](P& p) { p.causal = 2; }},
      {"window < 0", kInvalid, "window", {"-5"}, [](P& p) { p.window = -5; }},
      {"k scale 0",
       kInvalid,
       "k_dequant_scale",
       {"element 1 is 0;", "above 0"},
       [](P& p) { data<float>(p.k_dequant_scale)[1] = 0; }},
      {"k scale < 0",
       kInvalid,
       "k_dequant_scale",
       {"element 0 is -0.5"},
       [](P& p) { data<float>(p.k_dequant_scale)[0] = -0.5f; }},
      {"v scale NaN",
       kInvalid,
       "v_dequant_scale",
       {"element 1 is", "nan"},
       [](P& p) { data<float>(p.v_dequant_scale)[1] = kNan; }},
      {"v scale inf",
       kInvalid,
       "v_dequant_scale",
       {"element 0 is inf"},
       [](P& p) { data<float>(p.v_dequant_scale)[0] = kInf; }},
      {"sink NaN",
       kInvalid,
       "sinks",
       {"element 3 is", "nan"},
       [](P& p) { data<float>(p.sinks)[3] = kNan; }},
      {"sink inf",
       kInvalid,
       "sinks",
       {"element 2 is inf"},
       [](P& p) { data<float>(p.sinks)[2] = kInf; }},
  });
}

TEST(dtypes) {
  expect_all_refused({
      {"q fp8",
       kInvalid,
       "q",
       {"float8_e4m3fn", "float32, float16 or bfloat16"},
       [](P& p) { p.q.dtype = FV_DTYPE_FLOAT8_E4M3; }},
      {"q absent", kInvalid, "q", {"absent"}, [](P& p) { p.q = {}; }},
      {"q unknown", kInvalid, "q", {"code 99"}, [](P& p) { p.q.dtype = 99; }},
      {"q negative", kInvalid, "q", {"code -1"}, [](P& p) { p.q.dtype = -1; }},
      {"q no dtype", kInvalid, "q", {"dtype none"}, [](P& p) { p.q.dtype = FV_DTYPE_NONE; }},
      {"k fp32",
       kInvalid,
       "k_cache",
       {"dtype float32"},
       [](P& p) { p.k_cache.dtype = FV_DTYPE_FLOAT32; }},
      {"v differs",
       kInvalid,
       "v_cache",
       {"float8_e5m2", "float8_e4m3fn (dtype of k_cache)"},
       [](P& p) { p.v_cache.dtype = FV_DTYPE_FLOAT8_E5M2; }},
      {"v absent", kInvalid, "v_cache", {"absent"}, [](P& p) { p.v_cache = {}; }},
      {"table int64",
       kInvalid,
       "page_table",
       {"int64", "int32"},
       [](P& p) { p.page_table.dtype = FV_DTYPE_INT64; }},
      {"table absent", kInvalid, "page_table", {"absent"}, [](P& p) { p.page_table = {}; }},
      {"lengths int64",
       kInvalid,
       "seq_lens",
       {"int64"},
       [](P& p) { p.seq_lens.dtype = FV_DTYPE_INT64; }},
      {"offsets float",
       kInvalid,
       "query_start_loc",
       {"float32"},
       [](P& p) { p.query_start_loc.dtype = FV_DTYPE_FLOAT32; }},
      {"sinks half",
       kInvalid,
       "sinks",
       {"float16"},
       [](P& p) { p.sinks.dtype = FV_DTYPE_FLOAT16; }},
      {"k scale int",
       kInvalid,
       "k_dequant_scale",
       {"int32"},
       [](P& p) { p.k_dequant_scale.dtype = FV_DTYPE_INT32; }},
      {"v scale none",
       kInvalid,
       "v_dequant_scale",
       {"none"},
       [](P& p) { p.v_dequant_scale.dtype = FV_DTYPE_NONE; }},
      {"out fp8",
       kInvalid,
       "out",
       {"float8_e4m3fn"},
       [](P& p) { p.out.dtype = FV_DTYPE_FLOAT8_E4M3; }},
      {"out absent", kInvalid, "out", {"absent"}, [](P& p) { p.out = {}; }},
      {"lse half", kInvalid, "lse", {"float16"}, [](P& p) { p.lse.dtype = FV_DTYPE_FLOAT16; }},
  });
}

TEST(ranks_and_shapes) {
  expect_all_refused({
      {"q rank", kInvalid, "q", {"rank 2", "3"}, [](P& p) { p.q.rank = 2; }},
      {"q rank 100", kInvalid, "q", {"rank 100"}, [](P& p) { p.q.rank = 100; }},
      {"q rank -1", kInvalid, "q", {"rank -1"}, [](P& p) { p.q.rank = -1; }},
      {"k rank", kInvalid, "k_cache", {"rank 3"}, [](P& p) { p.k_cache.rank = 3; }},
      {"negative", kInvalid, "q", {"axis 0 has -5"}, [](P& p) { p.q.shape[0] = -5; }},
      {"no heads", kInvalid, "q", {"axis 1 (q_heads)"}, [](P& p) { p.q.shape[1] = 0; }},
      {"group",
       kInvalid,
       "q",
       {"3 elements", "multiples of 2 (kv_heads"},
       [](P& p) { p.q.shape[1] = 3; }},
      {"head_dim",
       kInvalid,
       "q",
       {"axis 2 has 63", "64 (head_dim of k_cache)"},
       [](P& p) { p.q.shape[2] = 63; }},
      {"page_size 0", kInvalid, "k_cache", {"page_size"}, [](P& p) { p.k_cache.shape[1] = 0; }},
      {"page_size 65537",
       kInvalid,
       "k_cache",
       {"65537", "1 to 65536"},
       [](P& p) { p.k_cache.shape[1] = 65537; }},
      {"kv_heads 0", kInvalid, "k_cache", {"kv_heads"}, [](P& p) { p.k_cache.shape[2] = 0; }},
      {"head_dim 0", kInvalid, "k_cache", {"head_dim"}, [](P& p) { p.k_cache.shape[3] = 0; }},
      {"v pages",
       kInvalid,
       "v_cache",
       {"axis 0", "pages of k_cache"},
       [](P& p) { p.v_cache.shape[0] -= 1; }},
      {"v page_size",
       kInvalid,
       "v_cache",
       {"axis 1 has 8", "16 (page_size"},
       [](P& p) { p.v_cache.shape[1] = 8; }},
      {"v heads", kInvalid, "v_cache", {"axis 2 has 1"}, [](P& p) { p.v_cache.shape[2] = 1; }},
      {"v dim", kInvalid, "v_cache", {"axis 3 has 32"}, [](P& p) { p.v_cache.shape[3] = 32; }},
      {"batch",
       kInvalid,
       "seq_lens",
       {"axis 0 has 1", "2 (batch of page_table)"},
       [](P& p) { p.seq_lens.shape[0] = 1; }},
      {"offsets",
       kInvalid,
       "query_start_loc",
       {"axis 0 has 2", "3 (batch + 1)"},
       [](P& p) { p.query_start_loc.shape[0] = 2; }},
      {"rows",
       kInvalid,
       "q",
       {"5 rows for a batch of 2", "query_start_loc"},
       [](P& p) { p.query_start_loc = {}; }},
      {"sinks",
       kInvalid,
       "sinks",
       {"axis 0 has 2", "4 (q_heads of q)"},
       [](P& p) { p.sinks.shape[0] = 2; }},
      {"k scale",
       kInvalid,
       "k_dequant_scale",
       {"3 elements", "1 or 2 (kv_heads)"},
       [](P& p) { p.k_dequant_scale.shape[0] = 3; }},
      {"v scale rank",
       kInvalid,
       "v_dequant_scale",
       {"rank 2", "1"},
       [](P& p) { p.v_dequant_scale.rank = 2; }},
      {"out rows",
       kInvalid,
       "out",
       {"axis 0 has 4", "5 (rows of q)"},
       [](P& p) { p.out.shape[0] = 4; }},
      {"out heads", kInvalid, "out", {"axis 1 has 2"}, [](P& p) { p.out.shape[1] = 2; }},
      {"out dim", kInvalid, "out", {"axis 2 has 32"}, [](P& p) { p.out.shape[2] = 32; }},
      {"lse rows", kInvalid, "lse", {"axis 0 has 6"}, [](P& p) { p.lse.shape[0] = 6; }},
      {"lse heads", kInvalid, "lse", {"axis 1 has 3"}, [](P& p) { p.lse.shape[1] = 3; }},
  });
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
