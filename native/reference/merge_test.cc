// The library's merge of partial results against the oracle, and its algebra.

#include <cmath>
#include <cstring>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/reference/number_format.h"
#include "native/reference/reference.h"
#include "native/testing/arena.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify::reference {
namespace {

using testing::Arena;
using testing::Random;

const fv_api& api() { return *fv_get_api(); }

struct MergeCase {
  Arena arena;
  fv_merge_params params = {};

  MergeCase(int64_t states, int64_t rows, int64_t heads, int64_t head_dim, Random& random) {
    params.struct_size = sizeof params;
    params.device_type = FV_DEVICE_CPU;
    params.num_threads = static_cast<int32_t>(random.integer(1, 3));
    const std::vector<int32_t> order =
        random.chance(50) ? std::vector<int32_t>{0, 1, 2, 3} : std::vector<int32_t>{2, 1, 0, 3};
    params.outs = arena.tensor(FV_DTYPE_FLOAT32, {states, rows, heads, head_dim}, order,
                               random.integer(0, 5));
    params.lses = arena.tensor(FV_DTYPE_FLOAT32, {states, rows, heads}, {2, 0, 1});
    params.out =
        arena.tensor(FV_DTYPE_FLOAT32, {rows, heads, head_dim}, {1, 0, 2}, random.integer(0, 5));
    params.out_lse = arena.tensor(FV_DTYPE_FLOAT32, {rows, heads}, {1, 0});
    for (int64_t s = 0; s < states; ++s) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t head = 0; head < heads; ++head) {
          // A state that has seen nothing keeps its poisoned output.
          const bool empty = random.chance(25);
          set_lse(s, r, head, empty ? -HUGE_VAL : 6 * random.normal());
          for (int64_t d = 0; !empty && d < head_dim; ++d) {
            store(params.outs.data, element_offset(params.outs, {s, r, head, d}), FV_DTYPE_FLOAT32,
                  random.normal());
          }
        }
      }
    }
  }

  void set_lse(int64_t state, int64_t row, int64_t head, double value) {
    store(params.lses.data, element_offset(params.lses, {state, row, head}), FV_DTYPE_FLOAT32,
          value);
  }
};

void check_case(MergeCase& c) {
  const std::vector<Row> expected = merge(c.params);
  const auto before = c.arena.snapshot();
  const fv_status status = api().merge_states(&c.params);
  TRACE("%s", api().last_error());
  CHECK_EQ(status, FV_OK);
  const fv_tensor& out = c.params.out;
  for (int64_t r = 0; r < out.shape[0]; ++r) {
    for (int64_t head = 0; head < out.shape[1]; ++head) {
      TRACE("row %d, head %d", static_cast<int>(r), static_cast<int>(head));
      const Row& row = expected[static_cast<size_t>(r * out.shape[1] + head)];
      // A weight's exponent carries the rounding of its lse; a tree of depth
      // log2(n) adds a few roundings a level.
      const double u = 0x1p-24;
      const double depth = std::ceil(std::log2(static_cast<double>(row.keys) + 1)) + 1;
      const double relative = u * (8 * row.largest_score + 16 * depth);
      for (int64_t d = 0; d < out.shape[2]; ++d) {
        const auto i = static_cast<size_t>(d);
        CHECK_NEAR(element(out, {r, head, d}), row.out[i],
                   relative * row.out_terms[i] + u * std::fabs(row.out[i]));
      }
      CHECK_NEAR(element(c.params.out_lse, {r, head}), row.lse,
                 relative + 4 * u * std::fabs(row.lse));
    }
  }
  // Nothing but the outputs' elements was written.
  for (int64_t r = 0; r < out.shape[0]; ++r) {
    for (int64_t head = 0; head < out.shape[1]; ++head) {
      std::memset(static_cast<float*>(out.data) + element_offset(out, {r, head}), 0xFF,
                  static_cast<size_t>(out.shape[2]) * sizeof(float));
      std::memset(
          static_cast<float*>(c.params.out_lse.data) + element_offset(c.params.out_lse, {r, head}),
          0xFF, sizeof(float));
    }
  }
  CHECK(c.arena.snapshot() == before);
}

TEST(random_states_match_the_oracle) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int64_t states = random.chance(80) ? random.integer(1, 12) : random.integer(13, 70);
    const int64_t rows = random.integer(0, 5);
    const int64_t heads = random.integer(1, 5);
    const int64_t head_dim = random.chance(50) ? random.integer(1, 300) : 128;
    TRACE("seed %d: %d states, %d rows, %d heads, dim %d", static_cast<int>(seed),
          static_cast<int>(states), static_cast<int>(rows), static_cast<int>(heads),
          static_cast<int>(head_dim));
    MergeCase c(states, rows, heads, head_dim, random);
    check_case(c);
  }
}

TEST(merging_identities_gives_the_identity) {
  for (const int64_t states : {1, 2, 3, 8}) {
    TRACE("%d states", static_cast<int>(states));
    Random random(1);
    MergeCase c(states, 2, 2, 40, random);
    for (int64_t s = 0; s < states; ++s) {
      for (int64_t r = 0; r < 2; ++r) {
        for (int64_t head = 0; head < 2; ++head) c.set_lse(s, r, head, -HUGE_VAL);
      }
    }
    CHECK_EQ(api().merge_states(&c.params), FV_OK);
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t head = 0; head < 2; ++head) {
        CHECK_EQ(element(c.params.out_lse, {r, head}), -HUGE_VAL);
        for (int64_t d = 0; d < 40; ++d) CHECK_EQ(element(c.params.out, {r, head, d}), 0.0);
      }
    }
  }
}

TEST(an_identity_changes_no_bit) {
  Random random(2);
  for (int64_t place = 0; place < 5; ++place) {
    TRACE("the only state is number %d", static_cast<int>(place));
    MergeCase c(5, 1, 1, 64, random);
    for (int64_t s = 0; s < 5; ++s) c.set_lse(s, 0, 0, -HUGE_VAL);
    c.set_lse(place, 0, 0, 3.7);
    for (int64_t d = 0; d < 64; ++d) {
      store(c.params.outs.data, element_offset(c.params.outs, {place, 0, 0, d}), FV_DTYPE_FLOAT32,
            random.normal());
    }
    CHECK_EQ(api().merge_states(&c.params), FV_OK);
    CHECK_EQ(element(c.params.out_lse, {0, 0}), element(c.params.lses, {place, 0, 0}));
    for (int64_t d = 0; d < 64; ++d) {
      CHECK_EQ(element(c.params.out, {0, 0, d}), element(c.params.outs, {place, 0, 0, d}));
    }
  }
}

TEST(nan_stays_in_its_row) {
  Random random(3);
  MergeCase c(3, 2, 1, 16, random);
  for (int64_t s = 0; s < 3; ++s) {
    for (int64_t r = 0; r < 2; ++r) {
      c.set_lse(s, r, 0, s == 1 && r == 1 ? std::nan("") : 1.0);
      for (int64_t d = 0; d < 16; ++d) {
        store(c.params.outs.data, element_offset(c.params.outs, {s, r, 0, d}), FV_DTYPE_FLOAT32, 1);
      }
    }
  }
  CHECK_EQ(api().merge_states(&c.params), FV_OK);
  for (int64_t r = 0; r < 2; ++r) {
    CHECK_EQ(std::isnan(element(c.params.out_lse, {r, 0})), r == 1);
    for (int64_t d = 0; d < 16; ++d) {
      CHECK_EQ(std::isnan(element(c.params.out, {r, 0, d})), r == 1);
    }
  }
}

}  // namespace
}  // namespace flashverify::reference

TEST_MAIN()
