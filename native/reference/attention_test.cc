// The library's attention against the oracle, row by row and element by element.

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/reference/number_format.h"
#include "native/reference/reference.h"
#include "native/testing/attention_case.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify::reference {
namespace {

using testing::AttentionCase;
using testing::AttentionOptions;
using testing::CacheLayout;
using testing::Random;

const fv_api& api() { return *fv_get_api(); }

bool is_half(int32_t route) { return route >= FV_ROUTE_GROUPED_HALF; }

double unit_roundoff(int32_t dtype) {
  switch (dtype) {
    case FV_DTYPE_FLOAT16:
      return 0x1p-11;
    case FV_DTYPE_BFLOAT16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}

// How far FP32 arithmetic in any order may take a row from the exact result.
//
// A sum of n terms with FP32 roundings is off by at most 8 sqrt(n) units of the
// sum of its terms' magnitudes, but for a chance of 2 exp(-32) (Higham and Mary,
// 2019, lambda = 8). A score takes that for its head_dim products and a few
// roundings more; its error is a relative error of its probability.
struct Bound {
  double relative;  // of out_terms
  double absolute;  // of the largest value
  double lse;

  Bound(const Row& row, const AttentionOptions& options) {
    const double u = 0x1p-24;
    const auto dims = static_cast<double>(options.head_dim);
    const auto keys = static_cast<double>(row.keys);
    const double score = u * ((8 * std::sqrt(dims) + 8) * row.largest_products +
                              16 * row.largest_score + 8 * static_cast<double>(options.softcap));
    const double sum = 8 * std::sqrt(keys) * u;
    // Once in the numerator and once in the sum that it is divided by.
    relative = 2 * (score + sum + 16 * u);
    absolute = 0x1p-126;
    lse = score + sum + 16 * u + 4 * u * std::fabs(row.lse);
    if (is_half(options.route)) {
      // P and the partial output are each rounded to FP16 once, whose steps end
      // at 2^-24; the sum may have been taken before or after P's rounding.
      relative += 3 * 0x1p-11;
      absolute += 0x1p-24 * (keys / row.probability_sum + 1);
      lse += 0x1p-11;
    }
  }
};

void poison_outputs(AttentionCase& c) {
  const fv_attention_params& p = c.params;
  const auto item = static_cast<size_t>(testing::item_bytes(p.out.dtype));
  for (int64_t row = 0; row < p.out.shape[0]; ++row) {
    for (int64_t head = 0; head < p.out.shape[1]; ++head) {
      auto* out = static_cast<uint8_t*>(p.out.data);
      std::memset(out + static_cast<size_t>(element_offset(p.out, {row, head})) * item, 0xFF,
                  static_cast<size_t>(p.out.shape[2]) * item);
      if (p.lse.data == nullptr) continue;
      std::memset(static_cast<float*>(p.lse.data) + element_offset(p.lse, {row, head}), 0xFF,
                  sizeof(float));
    }
  }
  std::memset(p.workspace, 0xFF, p.workspace_bytes);
}

// Runs the case and checks every element, and that nothing else was written.
void check_case(AttentionCase& c, const AttentionOptions& options) {
  c.plan(api());
  const auto before = c.arena.snapshot();
  const std::vector<Row> expected = attention(c.params);
  {
    const fv_status status = api().paged_attention(&c.params);
    TRACE("%s", api().last_error());
    CHECK_EQ(status, FV_OK);
  }
  CHECK_EQ(c.params.ran_route, options.route);
  CHECK(c.params.ran_isa != FV_CPU_ISA_AUTO);

  for (int64_t token = 0; token < c.params.q.shape[0]; ++token) {
    for (int64_t head = 0; head < options.q_heads; ++head) {
      TRACE("token %d, head %d", static_cast<int>(token), static_cast<int>(head));
      const Row& row = expected[static_cast<size_t>(token * options.q_heads + head)];
      const Bound bound(row, options);
      double squared_error = 0;
      double squared_allowance = 0;
      for (int64_t d = 0; d < options.head_dim; ++d) {
        TRACE("dim %d", static_cast<int>(d));
        const auto i = static_cast<size_t>(d);
        const double tolerance = bound.relative * row.out_terms[i] +
                                 bound.absolute * row.largest_value +
                                 unit_roundoff(options.out_dtype) * std::fabs(row.out[i]) +
                                 (options.out_dtype == FV_DTYPE_FLOAT16 ? 0x1p-25 : 0);
        const double found = element(c.params.out, {token, head, d});
        if (row.keys == 0) {
          CHECK_EQ(found, 0.0);
          CHECK(!std::signbit(found));
        }
        CHECK_NEAR(found, row.out[i], tolerance);
        squared_error += std::pow(found - row.out[i], 2);
        squared_allowance += tolerance * tolerance;
      }
      // Errors of many elements do not all reach their bounds at once: uniform
      // ones have a third of the squares. A NaN has been compared above.
      if (options.head_dim >= 32) CHECK(!(squared_error > squared_allowance / 2));
      if (options.lse) CHECK_NEAR(element(c.params.lse, {token, head}), row.lse, bound.lse);
    }
  }

  poison_outputs(c);
  CHECK(c.arena.snapshot() == before);
}

TEST(random_calls_match_the_oracle) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const AttentionOptions options = testing::random_options(random);
    TRACE("seed %d: %s", static_cast<int>(seed), options.describe().c_str());
    AttentionCase c(options, random);
    check_case(c, options);
  }
}

TEST(every_route_matches_on_every_instruction_set_and_cache_dtype) {
  for (const int32_t isa : {FV_CPU_ISA_PORTABLE, FV_CPU_ISA_AVX2, FV_CPU_ISA_AVX512}) {
    if (api().has_cpu_isa(isa) == 0) {
      std::printf("this CPU lacks %s\n", api().cpu_isa_name(isa));
      continue;
    }
    for (int32_t route = FV_ROUTE_GROUPED_FP32; route < FV_ROUTE_COUNT; ++route) {
      for (const int32_t dtype :
           {FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT8_E5M2, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16}) {
        AttentionOptions options;
        options.route = route;
        options.query_lens = {route == FV_ROUTE_XQA_HALF ? 1 : 8, 1};
        options.seq_lens = {1500, 77};
        options.head_dim = 128;
        options.kv_dtype = dtype;
        options.out_dtype = FV_DTYPE_FLOAT32;
        options.scales = 2;
        options.cpu_isa = isa;
        TRACE("%s", options.describe().c_str());
        Random random(7);
        AttentionCase c(options, random);
        check_case(c, options);
        CHECK_EQ(c.params.ran_isa, isa);
      }
    }
  }
}

TEST(every_layout_gives_the_same_bits) {
  std::vector<double> first;
  for (int layout = 0; layout < testing::kCacheLayouts; ++layout) {
    AttentionOptions options;
    options.route = FV_ROUTE_GROUPED_FP32;
    options.seq_lens = {1300};
    options.layout = static_cast<CacheLayout>(layout);
    options.q_transposed = layout % 2 == 1;
    Random random(3);
    AttentionCase c(options, random);
    TRACE("%s", options.describe().c_str());
    c.plan(api());
    CHECK_EQ(api().paged_attention(&c.params), FV_OK);
    std::vector<double> found;
    for (int64_t token = 0; token < 8; ++token) {
      for (int64_t head = 0; head < options.q_heads; ++head) {
        found.push_back(element(c.params.lse, {token, head}));
        for (int64_t d = 0; d < options.head_dim; ++d) {
          found.push_back(element(c.params.out, {token, head, d}));
        }
      }
    }
    if (first.empty()) first = found;
    CHECK(found == first);
  }
}

double relative_l2(const AttentionCase& c, const std::vector<Row>& expected) {
  double error = 0;
  double norm = 0;
  const fv_tensor& out = c.params.out;
  for (int64_t token = 0; token < out.shape[0]; ++token) {
    for (int64_t head = 0; head < out.shape[1]; ++head) {
      const Row& row = expected[static_cast<size_t>(token * out.shape[1] + head)];
      for (int64_t d = 0; d < out.shape[2]; ++d) {
        const double exact = row.out[static_cast<size_t>(d)];
        error += std::pow(element(out, {token, head, d}) - exact, 2);
        norm += exact * exact;
      }
    }
  }
  return std::sqrt(error / norm);
}

// The half routes round: a half route that kept FP32, or an FP32 route that
// rounded on the way, would be seen here. One rounding to FP16 alone costs about
// 2e-4, FP32 arithmetic about 1e-6.
TEST(half_routes_round_and_fp32_routes_do_not) {
  for (int32_t route = FV_ROUTE_GROUPED_FP32; route < FV_ROUTE_COUNT; ++route) {
    AttentionOptions options;
    options.route = route;
    options.query_lens = {1};
    options.seq_lens = {3000};
    options.out_dtype = FV_DTYPE_FLOAT32;
    TRACE("%s", options.describe().c_str());
    Random random(11);
    AttentionCase c(options, random);
    c.plan(api());
    CHECK_EQ(api().paged_attention(&c.params), FV_OK);
    const double error = relative_l2(c, attention(c.params));
    TRACE("relative L2 error %g", error);
    if (is_half(route)) {
      CHECK(error > 1e-4 && error < 1e-3);
    } else {
      CHECK(error < 1e-5);
    }
  }
}

TEST(a_nan_key_makes_exactly_the_rows_that_see_it_nan) {
  for (int32_t route = FV_ROUTE_GROUPED_FP32; route < FV_ROUTE_COUNT; ++route) {
    AttentionOptions options;
    options.route = route;
    options.query_lens = {route == FV_ROUTE_XQA_HALF ? 1 : 4};
    options.seq_lens = {70};
    options.out_dtype = FV_DTYPE_FLOAT32;
    Random random(5);
    AttentionCase c(options, random);
    TRACE("%s", options.describe().c_str());
    // The last key but one, of the second KV head: rows 0 and 1 do not see it.
    const fv_tensor& k = c.params.k_cache;
    const int64_t page = static_cast<const int32_t*>(c.params.page_table.data)[68 / 16];
    static_cast<uint8_t*>(k.data)[element_offset(k, {page, 68 % 16, 1, 5})] = 0x7F;
    c.plan(api());
    CHECK_EQ(api().paged_attention(&c.params), FV_OK);
    const int64_t rows = options.query_lens[0];
    for (int64_t token = 0; token < rows; ++token) {
      for (int64_t head = 0; head < options.q_heads; ++head) {
        const bool sees = head >= 2 && 70 - rows + token >= 68;
        CHECK_EQ(std::isnan(element(c.params.lse, {token, head})), sees);
        for (int64_t d = 0; d < options.head_dim; ++d) {
          CHECK_EQ(std::isnan(element(c.params.out, {token, head, d})), sees);
        }
      }
    }
  }
}

TEST(infinite_values_and_scores_follow_ieee) {
  for (int32_t route = FV_ROUTE_GROUPED_FP32; route <= FV_ROUTE_SCALAR_FP32; ++route) {
    for (const int32_t dtype : {FV_DTYPE_FLOAT8_E5M2, FV_DTYPE_FLOAT16}) {
      AttentionOptions options;
      options.route = route;
      options.query_lens = {1};
      options.seq_lens = {30};
      options.kv_dtype = dtype;
      options.out_dtype = FV_DTYPE_FLOAT32;
      TRACE("%s", options.describe().c_str());
      Random random(9);
      AttentionCase c(options, random);
      const auto write = [&](const fv_tensor& cache, int64_t token, int64_t d, double value) {
        const int64_t page = static_cast<const int32_t*>(c.params.page_table.data)[token / 16];
        const int64_t at = element_offset(cache, {page, token % 16, 0, d});
        // store() saturates; an infinity has to be written as its code.
        if (dtype == FV_DTYPE_FLOAT16) {
          static_cast<uint16_t*>(cache.data)[at] = value > 0 ? 0x7C00 : 0xFC00;
        } else {
          static_cast<uint8_t*>(cache.data)[at] = value > 0 ? 0x7C : 0xFC;
        }
      };
      // An infinite value reaches its own dimension of the rows of its head.
      write(c.params.v_cache, 3, 17, -HUGE_VAL);
      // A score of -inf takes its key out.
      const double query = element(c.params.q, {0, 0, 2});
      write(c.params.k_cache, 8, 2, query > 0 ? -HUGE_VAL : HUGE_VAL);
      c.plan(api());
      const std::vector<Row> expected = attention(c.params);
      CHECK_EQ(api().paged_attention(&c.params), FV_OK);
      CHECK_EQ(element(c.params.out, {0, 0, 17}), -HUGE_VAL);
      for (int64_t d = 0; d < options.head_dim; ++d) {
        CHECK_NEAR(element(c.params.out, {0, 0, d}), expected[0].out[static_cast<size_t>(d)], 1e-5);
      }
      CHECK_NEAR(element(c.params.lse, {0, 0}), expected[0].lse, 1e-5);
    }
  }
}

TEST(negative_and_zero_scales_are_scales) {
  for (const float scale : {-0.3f, 0.0f}) {
    for (int32_t route = FV_ROUTE_GROUPED_FP32; route < FV_ROUTE_COUNT; ++route) {
      AttentionOptions options;
      options.route = route;
      options.query_lens = {1};
      options.seq_lens = {200};
      TRACE("scale %g, %s", static_cast<double>(scale), options.describe().c_str());
      Random random(2);
      AttentionCase c(options, random);
      c.params.softmax_scale = scale;
      check_case(c, options);
    }
  }
}

// Reserves address space without memory behind it.
class Reservation {
 public:
  explicit Reservation(size_t bytes)
      : bytes_(bytes),
        memory_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    CHECK(memory_ != MAP_FAILED);
  }
  ~Reservation() { munmap(memory_, bytes_); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  void* memory() const { return memory_; }

 private:
  size_t bytes_;
  void* memory_;
};

TEST(offsets_past_four_gibibytes_are_followed) {
  AttentionOptions options;
  options.query_lens = {2};
  options.seq_lens = {20};
  options.out_dtype = FV_DTYPE_FLOAT32;
  for (int32_t route = FV_ROUTE_GROUPED_FP32; route <= FV_ROUTE_SCALAR_HALF; ++route) {
    options.route = route;
    TRACE("%s", options.describe().c_str());
    Random random(4);
    AttentionCase c(options, random);
    // The same cache with its pages, and the same query with its rows, spread out.
    const Reservation far_cache(static_cast<size_t>(c.params.k_cache.shape[0] * 5) << 30);
    const Reservation far_query(size_t{6} << 30);
    for (fv_tensor* tensor : {&c.params.k_cache, &c.params.q}) {
      fv_tensor far = *tensor;
      far.data = tensor == &c.params.q ? far_query.memory() : far_cache.memory();
      far.stride[0] = (int64_t{5} << 30) / testing::item_bytes(far.dtype);
      const int64_t inner = tensor->stride[0] * testing::item_bytes(far.dtype);
      for (int64_t i = 0; i < far.shape[0]; ++i) {
        std::memcpy(static_cast<uint8_t*>(far.data) + (i * 5 << 30),
                    static_cast<uint8_t*>(tensor->data) + i * inner, static_cast<size_t>(inner));
      }
      *tensor = far;
    }
    check_case(c, options);
  }
}

}  // namespace
}  // namespace flashverify::reference

TEST_MAIN()
