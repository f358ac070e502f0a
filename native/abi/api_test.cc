// The table, the odd calls that are valid, and the size of the workspace.

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/reference/number_format.h"
#include "native/testing/attention_case.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify {
namespace {

using reference::element;
using testing::AttentionCase;
using testing::AttentionOptions;
using testing::Random;

const fv_api& api() { return *fv_get_api(); }

void expect_ok(AttentionCase& c) {
  const fv_status status = api().paged_attention(&c.params);
  TRACE("%s", api().last_error());
  CHECK_EQ(status, FV_OK);
}

TEST(the_table_tells_what_it_is) {
  CHECK_EQ(api().struct_size, sizeof(fv_api));
  CHECK_EQ(api().abi_version, static_cast<uint32_t>(FLASHVERIFY_ABI_VERSION));
  CHECK_EQ(api().precision_revision, 4u);
  CHECK_EQ(std::strlen(api().build_id), size_t{16});
  CHECK_EQ(std::strspn(api().build_id, "0123456789abcdef"), size_t{16});
  CHECK_EQ(fv_get_api(), fv_get_api());
}

TEST(every_code_has_a_name_and_no_other) {
  for (int32_t status = FV_OK; status <= FV_ERROR_INTERNAL; ++status) {
    CHECK(api().status_name(status) != nullptr);
  }
  for (int32_t route = 0; route < FV_ROUTE_COUNT; ++route) {
    CHECK(api().route_name(route) != nullptr);
  }
  for (int32_t isa = FV_CPU_ISA_AUTO; isa <= FV_CPU_ISA_AVX512; ++isa) {
    CHECK(api().cpu_isa_name(isa) != nullptr);
  }
  CHECK_EQ(std::string(api().route_name(FV_ROUTE_GROUPED_FP32)), "grouped_fp32");
  CHECK_EQ(std::string(api().cpu_isa_name(FV_CPU_ISA_AVX512)), "avx512");
  for (const int32_t code : {-1, 100, INT32_MAX, INT32_MIN}) {
    CHECK(api().status_name(code) == nullptr);
    CHECK(api().route_name(code) == nullptr);
    CHECK(api().cpu_isa_name(code) == nullptr);
    CHECK_EQ(api().has_cpu_isa(code), 0);
  }
}

TEST(the_best_instruction_set_is_there_and_none_is_better) {
  const int32_t best = api().best_cpu_isa();
  CHECK_EQ(api().has_cpu_isa(best), 1);
  CHECK_EQ(api().has_cpu_isa(FV_CPU_ISA_PORTABLE), 1);
  for (int32_t isa = best + 1; isa <= FV_CPU_ISA_AVX512; ++isa) CHECK_EQ(api().has_cpu_isa(isa), 0);
}

TEST(a_call_reports_its_route_and_is_counted) {
  for (int32_t route = FV_ROUTE_GROUPED_FP32; route < FV_ROUTE_COUNT; ++route) {
    AttentionOptions options;
    options.route = route;
    options.query_lens = {1};
    Random random(1);
    AttentionCase c(options, random);
    c.plan(api());
    uint64_t before[FV_ROUTE_COUNT];
    uint64_t after[FV_ROUTE_COUNT];
    api().route_counts(before);
    expect_ok(c);
    api().route_counts(after);
    CHECK_EQ(c.params.ran_route, route);
    CHECK_EQ(c.params.ran_isa, api().best_cpu_isa());
    for (int32_t i = 0; i < FV_ROUTE_COUNT; ++i) {
      CHECK_EQ(after[i] - before[i], static_cast<uint64_t>(i == route ? 1 : 0));
    }
  }
}

TEST(messages_belong_to_their_thread) {
  CHECK_EQ(api().paged_attention(nullptr), FV_ERROR_INVALID_ARGUMENT);
  const std::string mine = api().last_error();
  CHECK(!mine.empty());
  std::string at_start = "unset";
  std::string theirs;
  std::thread other([&] {
    at_start = api().last_error();
    api().merge_states(nullptr);
    fv_merge_params params = {};
    api().merge_states(&params);
    theirs = api().last_error();
  });
  other.join();
  CHECK_EQ(at_start, "");
  CHECK_CONTAINS(theirs, "struct_size: ");
  CHECK_EQ(std::string(api().last_error()), mine);
}

// A caller of another age may have a shorter structure, here at the end of a page.
TEST(a_short_structure_is_not_read_past_its_size) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const memory =
      mmap(nullptr, 2 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  CHECK_EQ(mprotect(static_cast<char*>(memory) + page_bytes, page_bytes, PROT_NONE), 0);
  void* const end = static_cast<char*>(memory) + page_bytes - 8;
  *static_cast<uint32_t*>(end) = 8;
  size_t bytes = 0;
  for (const fv_status status :
       {api().paged_attention(static_cast<fv_attention_params*>(end)),
        api().attention_workspace_bytes(static_cast<fv_attention_params*>(end), &bytes),
        api().append_kv(static_cast<fv_append_params*>(end)),
        api().merge_states(static_cast<fv_merge_params*>(end))}) {
    CHECK_EQ(status, FV_ERROR_INVALID_ARGUMENT);
    CHECK_CONTAINS(api().last_error(), "struct_size: 8;");
  }
  munmap(memory, 2 * page_bytes);
}

TEST(calls_with_nothing_to_do_are_valid) {
  for (const bool equal_blocks : {false, true}) {
    AttentionOptions options;
    options.equal_blocks = equal_blocks;
    options.query_lens = {};
    options.seq_lens = {};
    Random random(1);
    AttentionCase no_requests(options, random);
    CHECK_EQ(no_requests.params.workspace_bytes, size_t{0});
    expect_ok(no_requests);
    CHECK_EQ(no_requests.params.ran_route, options.route);
    options.query_lens = {0, 0};
    options.seq_lens = {5, 0};
    AttentionCase no_rows(options, random);
    expect_ok(no_rows);
    // Nothing is read or written, so that nothing has to be there.
    no_rows.params.q.data = no_rows.params.out.data = no_rows.params.lse.data = nullptr;
    expect_ok(no_rows);
  }
}

TEST(rows_that_see_nothing_are_written) {
  AttentionOptions options;
  options.query_lens = {4, 2};
  options.seq_lens = {2, 0};
  options.sinks = true;
  for (int32_t route = FV_ROUTE_GROUPED_FP32; route <= FV_ROUTE_SCALAR_HALF; ++route) {
    options.route = route;
    Random random(1);
    AttentionCase c(options, random);
    c.plan(api());
    expect_ok(c);
    for (const int64_t token : {0, 1, 4, 5}) {
      for (int64_t head = 0; head < options.q_heads; ++head) {
        CHECK_EQ(element(c.params.lse, {token, head}), -HUGE_VAL);
        CHECK_EQ(element(c.params.out, {token, head, 7}), 0.0);
      }
    }
    CHECK(std::isfinite(element(c.params.lse, {2, 0})));
  }
}

TEST(an_empty_cache_serves_empty_requests) {
  AttentionOptions options;
  options.seq_lens = {0};
  Random random(1);
  AttentionCase c(options, random);
  c.params.k_cache.shape[0] = c.params.v_cache.shape[0] = 0;
  c.params.k_cache.data = c.params.v_cache.data = nullptr;
  c.plan(api());
  expect_ok(c);
  CHECK_EQ(element(c.params.out, {0, 0, 0}), 0.0);
  c.params.page_table.shape[1] = 0;
  c.params.page_table.data = nullptr;
  expect_ok(c);
}

TEST(axes_of_one_element_may_carry_any_stride) {
  AttentionOptions options;
  options.query_lens = {1};
  options.seq_lens = {1};
  options.kv_heads = options.q_heads = 1;
  options.page_size = 1;
  options.scales = 1;
  options.sinks = true;
  Random random(1);
  AttentionCase c(options, random);
  c.params.k_cache.shape[0] = c.params.v_cache.shape[0] = 1;
  static_cast<int32_t*>(c.params.page_table.data)[0] = 0;
  c.params.page_table.shape[1] = 1;
  for (fv_tensor* tensor : {&c.params.q, &c.params.k_cache, &c.params.v_cache, &c.params.page_table,
                            &c.params.seq_lens, &c.params.sinks, &c.params.k_dequant_scale,
                            &c.params.v_dequant_scale, &c.params.out, &c.params.lse}) {
    for (int32_t axis = 0; axis < tensor->rank; ++axis) {
      if (tensor->shape[axis] == 1) tensor->stride[axis] = INT64_MIN + axis;
    }
  }
  c.plan(api());
  expect_ok(c);
}

TEST(inputs_may_repeat_and_interleave_with_outputs) {
  AttentionOptions options;
  options.query_lens = {8};
  options.out_dtype = FV_DTYPE_FLOAT16;
  Random random(1);
  AttentionCase c(options, random);
  // One row of query for all, as expand() makes it; K as V.
  c.params.q.stride[0] = 0;
  c.params.v_cache = c.params.k_cache;
  c.plan(api());
  expect_ok(c);
  // q and out as the two halves of each row of one array.
  fv_tensor both = c.arena.tensor(FV_DTYPE_FLOAT16, {8, 2 * options.q_heads, options.head_dim});
  both.shape[1] = options.q_heads;
  std::memset(both.data, 0, static_cast<size_t>(2 * 8 * options.q_heads * options.head_dim * 2));
  c.params.q = c.params.out = both;
  c.params.out.data = static_cast<uint16_t*>(both.data) + options.q_heads * options.head_dim;
  expect_ok(c);
  CHECK_EQ(element(c.params.q, {7, 3, 63}), 0.0);
}

TEST(unused_table_entries_and_lengths_of_idle_requests_may_be_anything) {
  AttentionOptions options;
  options.query_lens = {2, 0, 1};
  options.seq_lens = {20, 30, 0};
  Random random(1);
  AttentionCase c(options, random);
  auto* table = static_cast<int32_t*>(c.params.page_table.data);
  // Request 1 has no rows, request 2 no keys.
  for (const int64_t request : {1, 2}) table[request * c.params.page_table.stride[0]] = INT32_MIN;
  c.plan(api());
  expect_ok(c);
}

// ---- The workspace's size ------------------------------------------------------

size_t bytes_of(const fv_attention_params& params) {
  size_t bytes = SIZE_MAX;
  const fv_status status = api().attention_workspace_bytes(&params, &bytes);
  TRACE("%s", api().last_error());
  CHECK_EQ(status, FV_OK);
  return bytes;
}

TEST(a_size_needs_no_memory_behind_the_tensors) {
  AttentionOptions options;
  options.query_lens = {3, 5};
  options.seq_lens = {3000, 40};
  options.sinks = true;
  options.scales = 2;
  Random random(1);
  AttentionCase c(options, random);
  const size_t exact = bytes_of(c.params);
  fv_attention_params shapes = c.params;
  // NULL, or nowhere and misaligned.
  for (const uintptr_t address : {0, 3}) {
    for (fv_tensor* tensor :
         {&shapes.q, &shapes.k_cache, &shapes.v_cache, &shapes.page_table, &shapes.sinks,
          &shapes.k_dequant_scale, &shapes.v_dequant_scale, &shapes.out, &shapes.lse}) {
      tensor->data = reinterpret_cast<void*>(address);
    }
    CHECK_EQ(bytes_of(shapes), exact);
  }
  shapes.page_table = {};
  CHECK_EQ(bytes_of(shapes), exact);
  CHECK_EQ(api().attention_workspace_bytes(&shapes, nullptr), FV_ERROR_INVALID_ARGUMENT);
  CHECK_CONTAINS(api().last_error(), "bytes: NULL");
}

TEST(a_capacity_serves_every_call_within_it) {
  for (int32_t route = FV_ROUTE_GROUPED_FP32; route < FV_ROUTE_COUNT; ++route) {
    const int32_t most = route == FV_ROUTE_XQA_HALF ? 1 : 7;
    AttentionOptions options;
    options.route = route;
    options.num_threads = 3;
    // 4 requests, 28 rows, 3000 keys each.
    options.query_lens = {most, most, most, most};
    options.seq_lens = {3000, 3000, 3000, 3000};
    Random random(1);
    AttentionCase largest(options, random);
    fv_attention_params capacity = largest.params;
    capacity.seq_lens = capacity.query_start_loc = {};
    capacity.page_table.data = nullptr;
    const size_t bytes = bytes_of(capacity);
    CHECK(bytes >= bytes_of(largest.params));
    // Smaller calls, in the same memory.
    fv_attention_params smaller = largest.params;
    auto* lengths = static_cast<int32_t*>(smaller.seq_lens.data);
    auto* offsets = static_cast<int32_t*>(smaller.query_start_loc.data);
    for (int i = 0; i < 500; ++i) {
      const int64_t batch = random.integer(1, 4);
      for (int64_t request = 0; request < batch; ++request) {
        lengths[request] = static_cast<int32_t>(random.integer(0, 3000));
        offsets[request + 1] = offsets[request] + static_cast<int32_t>(random.integer(0, most));
      }
      smaller.page_table.shape[0] = smaller.seq_lens.shape[0] = batch;
      smaller.query_start_loc.shape[0] = batch + 1;
      smaller.q.shape[0] = smaller.out.shape[0] = smaller.lse.shape[0] = offsets[batch];
      smaller.num_threads = static_cast<int32_t>(random.integer(1, 3));
      TRACE("route %d, call %d", route, i);
      CHECK(bytes_of(smaller) <= bytes);
    }
  }
}

TEST(devices_and_device_code_are_told) {
  CHECK(api().cuda_images() != nullptr);
  CHECK(api().cuda_images()[0] == nullptr);  // none in this program
  CHECK_EQ(api().cuda_device_count(nullptr), FV_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(api().cuda_device(0, nullptr), FV_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(api().cuda_faults(0, nullptr, nullptr), FV_ERROR_INVALID_ARGUMENT);
  fv_cuda_device device = {};
  device.struct_size = 12;
  CHECK_EQ(api().cuda_device(0, &device), FV_ERROR_INVALID_ARGUMENT);
  CHECK_CONTAINS(api().last_error(), "struct_size: 12;");
  device.struct_size = sizeof device;
  int32_t count = -1;
  if (api().cuda_device_count(&count) == FV_OK) return;  // this machine has a driver
  CHECK_EQ(count, -1);
  CHECK_CONTAINS(api().last_error(), "CUDA");
  CHECK_EQ(api().cuda_device(0, &device), FV_ERROR_DEVICE);
  uint32_t faults = 9;
  CHECK_EQ(api().cuda_faults(0, nullptr, &faults), FV_ERROR_DEVICE);
  CHECK_EQ(faults, 9u);
}

TEST(a_capacity_that_no_memory_holds_is_refused) {
  AttentionOptions options;
  options.query_lens = {1};
  options.seq_lens = {1};
  Random random(1);
  AttentionCase c(options, random);
  fv_attention_params p = c.params;
  p.seq_lens = p.query_start_loc = p.lse = {};
  p.q.shape[0] = p.out.shape[0] = INT32_MAX;
  p.page_table.data = nullptr;
  p.page_table.shape[1] = 1 << 30;
  size_t bytes = 5;
  CHECK_EQ(api().attention_workspace_bytes(&p, &bytes), FV_ERROR_OUT_OF_MEMORY);
  CHECK_CONTAINS(api().last_error(), "workspace: 2147483647 rows");
  CHECK_EQ(bytes, size_t{5});
  p.page_table = {};
  CHECK_EQ(api().attention_workspace_bytes(&p, &bytes), FV_ERROR_INVALID_ARGUMENT);
  CHECK_CONTAINS(api().last_error(), "page_table: absent, and seq_lens too");
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
