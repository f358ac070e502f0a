#include "native/testing/attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "native/reference/number_format.h"
#include "native/testing/check.h"

namespace flashverify::testing {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of normal numbers of one dtype, as stretches of one random sequence:
// drawing and rounding every element anew took most of the tests' time.
class NormalRows {
 public:
  NormalRows(int32_t dtype, Random& random)
      : item_(testing::item_bytes(dtype)), codes_(static_cast<size_t>(kElements * item_)) {
    for (int64_t i = 0; i < kElements; ++i) {
      reference::store(codes_.data(), i, dtype, random.normal());
    }
  }

  // Fills `dims` elements from element `at` of `data` on.
  void fill(void* data, int64_t at, int64_t dims, Random& random) const {
    const int64_t from = random.integer(0, kElements - dims);
    std::memcpy(static_cast<uint8_t*>(data) + at * item_, codes_.data() + from * item_,
                static_cast<size_t>(dims * item_));
  }

 private:
  static constexpr int64_t kElements = 10007;
  int64_t item_;
  std::vector<uint8_t> codes_;
};

std::vector<float> random_scales(int count, int64_t heads, Random& random) {
  std::vector<float> scales(static_cast<size_t>(count == 1 ? 1 : heads));
  for (float& scale : scales) scale = static_cast<float>(0.25 + random.uniform());
  return scales;
}

std::string join(const std::vector<int32_t>& values) {
  std::string text;
  for (const int32_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

}  // namespace

const char* layout_name(CacheLayout layout) {
  static constexpr const char* kNames[kCacheLayouts] = {"nhd",    "hnd",    "pair_nhd",  "pair_hnd",
                                                        "packed", "padded", "page_inner"};
  return kNames[static_cast<int>(layout)];
}

std::string AttentionOptions::describe() const {
  char text[512];
  std::snprintf(
      text, sizeof text,
      "route %d, q %s, lengths %s, heads %d/%d, dim %d, page %d, dtypes q %d kv %d out %d, "
      "layout %s%s%s, causal %d, window %d, softcap %g, sinks %d, scales %d, lse %d, "
      "threads %d, isa %d",
      route, join(query_lens).c_str(), join(seq_lens).c_str(), static_cast<int>(q_heads),
      static_cast<int>(kv_heads), static_cast<int>(head_dim), static_cast<int>(page_size), q_dtype,
      kv_dtype, out_dtype, layout_name(layout), q_transposed ? ", q transposed" : "",
      equal_blocks ? ", equal blocks" : "", causal, static_cast<int>(window),
      static_cast<double>(softcap), sinks, scales, lse, num_threads, cpu_isa);
  return text;
}

AttentionOptions random_options(Random& random) {
  AttentionOptions options;
  options.route = static_cast<int32_t>(random.integer(FV_ROUTE_GROUPED_FP32, FV_ROUTE_XQA_HALF));
  const bool scalar =
      options.route == FV_ROUTE_SCALAR_FP32 || options.route == FV_ROUTE_SCALAR_HALF;
  const bool xqa = options.route == FV_ROUTE_XQA_HALF;
  options.kv_heads = random.integer(1, 3);
  options.q_heads = options.kv_heads * random.integer(1, 6);
  options.head_dim = scalar && random.chance(50)
                         ? random.integer(1, 160)
                         : random.pick<int64_t>({64, 80, 96, 112, 128, 192, 256, 512});
  options.page_size = random.pick<int64_t>({1, 7, 16, 64, 100, 784, 1024, 1568, 3296});
  options.q_dtype = random.pick({FV_DTYPE_FLOAT32, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16});
  options.out_dtype = random.pick({FV_DTYPE_FLOAT32, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16});
  options.kv_dtype = random.pick(
      {FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT8_E5M2, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16});
  options.layout = static_cast<CacheLayout>(random.integer(0, kCacheLayouts - 1));
  options.q_transposed = random.chance(25);
  options.equal_blocks = random.chance(25);
  options.causal = random.chance(70);
  if (random.chance(30)) options.window = random.integer(1, 1500);
  if (random.chance(25)) options.softcap = random.pick({0.5f, 5.0f, 30.0f});
  options.sinks = random.chance(25);
  options.scales = static_cast<int>(random.integer(0, 2));
  options.lse = random.chance(75);
  options.num_threads = static_cast<int32_t>(random.integer(1, 3));

  const int64_t batch = random.integer(1, 3);
  const int64_t most_queries = xqa ? 1 : random.pick<int64_t>({1, 3, 8, 8, 17, 64});
  options.query_lens.clear();
  options.seq_lens.clear();
  for (int64_t i = 0; i < batch; ++i) {
    const bool repeat = options.equal_blocks && i > 0;
    options.query_lens.push_back(repeat ? options.query_lens[0]
                                        : static_cast<int32_t>(random.integer(0, most_queries)));
    // Lengths near tile and split boundaries as often as anywhere else, but no
    // more work than the oracle does in a fraction of a second.
    int64_t length =
        random.chance(50)
            ? random.integer(0, 2200)
            : random.pick<int64_t>({0, 1, 63, 64, 65, 128, 1023, 1024, 1025, 2048, 2049, 3000});
    const int64_t work_per_key =
        (options.query_lens.back() + 2) * options.q_heads * options.head_dim;
    length = std::min<int64_t>(length, 12'000'000 / work_per_key);
    options.seq_lens.push_back(static_cast<int32_t>(length));
  }
  return options;
}

void make_caches(Arena& arena, CacheLayout layout, int32_t dtype, int64_t pages, int64_t page_size,
                 int64_t kv_heads, int64_t head_dim, fv_tensor* k_cache, fv_tensor* v_cache) {
  const std::initializer_list<int64_t> shape = {pages, page_size, kv_heads, head_dim};
  // Views of one array: K is a cache with room for V beside it.
  const auto half_of = [&](fv_tensor both, int32_t axis, int64_t v_offset) {
    both.shape[axis] /= 2;
    *k_cache = *v_cache = both;
    v_cache->data = static_cast<uint8_t*>(both.data) + v_offset * item_bytes(dtype);
  };
  switch (layout) {
    case CacheLayout::kNhd:
      *k_cache = arena.tensor(dtype, shape);
      *v_cache = arena.tensor(dtype, shape);
      return;
    case CacheLayout::kHnd:
      *k_cache = arena.tensor(dtype, shape, {0, 2, 1, 3});
      *v_cache = arena.tensor(dtype, shape, {0, 2, 1, 3});
      return;
    case CacheLayout::kPadded:
      *k_cache = arena.tensor(dtype, shape, {0, 1, 2, 3}, 16);
      *v_cache = arena.tensor(dtype, shape, {0, 1, 2, 3}, 3);
      return;
    case CacheLayout::kPageInner:
      *k_cache = arena.tensor(dtype, shape, {1, 0, 2, 3});
      *v_cache = arena.tensor(dtype, shape, {1, 2, 0, 3});
      return;
    case CacheLayout::kPairNhd:
      half_of(arena.tensor(dtype, {pages, 2 * page_size, kv_heads, head_dim}), 1,
              page_size * kv_heads * head_dim);
      return;
    case CacheLayout::kPairHnd:
      half_of(arena.tensor(dtype, {pages, page_size, 2 * kv_heads, head_dim}, {0, 2, 1, 3}), 2,
              kv_heads * page_size * head_dim);
      return;
    case CacheLayout::kPacked:
      half_of(arena.tensor(dtype, {pages, page_size, kv_heads, 2 * head_dim}), 3, head_dim);
      return;
  }
}

AttentionCase::AttentionCase(const AttentionOptions& options, Random& random) : params{} {
  const auto batch = static_cast<int64_t>(options.query_lens.size());
  const int64_t rows =
      std::accumulate(options.query_lens.begin(), options.query_lens.end(), int64_t{0});
  const std::vector<int32_t> q_order = {options.q_transposed ? 1 : 0, options.q_transposed ? 0 : 1,
                                        2};

  params.struct_size = sizeof params;
  params.route = options.route;
  params.device_type = FV_DEVICE_CPU;
  params.softmax_scale = 1 / std::sqrt(static_cast<float>(options.head_dim));
  params.softcap = options.softcap;
  params.causal = options.causal ? 1 : 0;
  params.cpu_isa = options.cpu_isa;
  params.window = options.window;
  params.num_threads = options.num_threads;

  params.q = arena.tensor(options.q_dtype, {rows, options.q_heads, options.head_dim}, q_order);
  const NormalRows query_rows(options.q_dtype, random);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < options.q_heads; ++head) {
      query_rows.fill(params.q.data, reference::element_offset(params.q, {row, head}),
                      options.head_dim, random);
    }
  }
  params.out = arena.tensor(options.out_dtype, {rows, options.q_heads, options.head_dim}, q_order,
                            options.q_transposed ? 8 : 0);
  if (options.lse) params.lse = arena.tensor(FV_DTYPE_FLOAT32, {rows, options.q_heads}, {1, 0});

  // The pages in use are scattered over twice as many.
  int64_t max_pages = 1;
  int64_t used_pages = 0;
  for (const int32_t length : options.seq_lens) {
    max_pages = std::max(max_pages, ceil_div(length, options.page_size));
    used_pages += ceil_div(length, options.page_size);
  }
  const int64_t pages = used_pages + std::min<int64_t>(used_pages, 3) + 1;
  std::vector<int32_t> free_pages(static_cast<size_t>(pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  random.shuffle(free_pages);

  make_caches(arena, options.layout, options.kv_dtype, pages, options.page_size, options.kv_heads,
              options.head_dim, &params.k_cache, &params.v_cache);
  params.page_table = arena.tensor(FV_DTYPE_INT32, {batch, max_pages + 2});
  auto* table = static_cast<int32_t*>(params.page_table.data);
  const NormalRows cache_rows(options.kv_dtype, random);
  for (int64_t request = 0; request < batch; ++request) {
    int32_t* entries = table + request * params.page_table.stride[0];
    for (int64_t t = 0; t < options.seq_lens[static_cast<size_t>(request)]; ++t) {
      if (t % options.page_size == 0) {
        entries[t / options.page_size] = free_pages.back();
        free_pages.pop_back();
      }
      const int64_t page = entries[t / options.page_size];
      for (const fv_tensor* cache : {&params.k_cache, &params.v_cache}) {
        for (int64_t head = 0; head < options.kv_heads; ++head) {
          const int64_t at = reference::element_offset(*cache, {page, t % options.page_size, head});
          cache_rows.fill(cache->data, at, options.head_dim, random);
        }
      }
    }
  }

  params.seq_lens = arena.vector(FV_DTYPE_INT32, options.seq_lens);
  if (!options.equal_blocks) {
    std::vector<int32_t> offsets = {0};
    for (const int32_t length : options.query_lens) offsets.push_back(offsets.back() + length);
    params.query_start_loc = arena.vector(FV_DTYPE_INT32, offsets);
  }
  if (options.sinks) {
    std::vector<float> sinks;
    for (int64_t head = 0; head < options.q_heads; ++head) {
      sinks.push_back(random.chance(20) ? -INFINITY : static_cast<float>(random.normal() * 2));
    }
    params.sinks = arena.vector(FV_DTYPE_FLOAT32, sinks);
  }
  if (options.scales > 0) {
    params.k_dequant_scale =
        arena.vector(FV_DTYPE_FLOAT32, random_scales(options.scales, options.kv_heads, random));
    params.v_dequant_scale =
        arena.vector(FV_DTYPE_FLOAT32, random_scales(options.scales, options.kv_heads, random));
  }
}

void AttentionCase::plan(const fv_api& api) {
  size_t bytes = 0;
  const fv_status status = api.attention_workspace_bytes(&params, &bytes);
  TRACE("%s", api.last_error());
  CHECK_EQ(status, FV_OK);
  params.workspace = arena.allocate(bytes);
  params.workspace_bytes = bytes;
}

}  // namespace flashverify::testing
