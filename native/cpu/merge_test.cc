// Merging normalised partial results, against the tree by its recursive
// definition (bit for bit) and against the formula in long double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "native/cpu/cpu.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify::cpu {
namespace {

using testing::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kUnwritten = -12345.5f;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// States with their arrays, and room between rows that nobody may write to.
struct Case {
  Case(int64_t states, int64_t rows, int64_t heads, int64_t head_dim, int64_t padding = 0) {
    problem.states = states;
    problem.rows = rows;
    problem.heads = heads;
    problem.head_dim = head_dim;
    const int64_t row = head_dim + padding;
    const int64_t strides[] = {rows * heads * row, heads * row, row};
    const int64_t lse_step = padding + 1;
    const int64_t lse_strides[] = {rows * heads * lse_step, heads * lse_step, lse_step};
    std::copy(strides, strides + 3, problem.outs_stride);
    std::copy(strides + 1, strides + 3, problem.out_stride);
    std::copy(lse_strides, lse_strides + 3, problem.lses_stride);
    std::copy(lse_strides + 1, lse_strides + 3, problem.out_lse_stride);
    outs.resize(static_cast<size_t>(states * strides[0]), kNan);
    lses.resize(static_cast<size_t>(states * lse_strides[0]), kNan);
    out.resize(static_cast<size_t>(strides[0]), kUnwritten);
    out_lse.resize(static_cast<size_t>(lse_strides[0]), kUnwritten);
  }

  void fill(Random& random, double lse_spread) {
    for (int64_t i = 0; i < problem.states; ++i) {
      for (int64_t r = 0; r < problem.rows; ++r) {
        for (int64_t h = 0; h < problem.heads; ++h) {
          lse_at(i, r, h) = static_cast<float>(5 + lse_spread * random.normal());
          for (int64_t d = 0; d < problem.head_dim; ++d) {
            out_at(i, r, h, d) = static_cast<float>(random.normal());
          }
        }
      }
    }
  }

  float& lse_at(int64_t i, int64_t r, int64_t h) {
    const int64_t* s = problem.lses_stride;
    return lses[static_cast<size_t>(i * s[0] + r * s[1] + h * s[2])];
  }
  float& out_at(int64_t i, int64_t r, int64_t h, int64_t d) {
    const int64_t* s = problem.outs_stride;
    return outs[static_cast<size_t>(i * s[0] + r * s[1] + h * s[2] + d)];
  }
  float result(int64_t r, int64_t h, int64_t d) const {
    const int64_t* s = problem.out_stride;
    return out[static_cast<size_t>(r * s[0] + h * s[1] + d)];
  }
  float result_lse(int64_t r, int64_t h) const {
    const int64_t* s = problem.out_lse_stride;
    return out_lse[static_cast<size_t>(r * s[0] + h * s[1])];
  }

  void run(int num_threads = 1) {
    problem.outs = outs.data();
    problem.lses = lses.data();
    problem.out = out.data();
    problem.out_lse = out_lse.data();
    run_merge(problem, num_threads);
  }

  MergeProblem problem;
  std::vector<float> outs, lses, out, out_lse;
};

// One dimension of a row, and its weight.
struct Sum {
  bool seen = false;
  float value = 0;
  float weight = 0;
};

// Node (level, index) of the perfect binary tree over the states. A state that
// saw nothing is the identity at its own place.
Sum tree(Case& test, int level, int64_t index, int64_t r, int64_t h, int64_t d, double largest) {
  if (index << level >= test.problem.states) return {};
  if (level == 0) {
    const float lse = test.lse_at(index, r, h);
    if (lse == -kInf) return {};
    const auto weight = static_cast<float>(std::exp(static_cast<double>(lse) - largest));
    return {true, weight * test.out_at(index, r, h, d), weight};
  }
  const Sum a = tree(test, level - 1, 2 * index, r, h, d, largest);
  const Sum b = tree(test, level - 1, 2 * index + 1, r, h, d, largest);
  if (!a.seen) return b;
  if (!b.seen) return a;
  return {true, a.value + b.value, a.weight + b.weight};
}

// Every row has a state that saw something, and no NaN.
void check_against_tree(Case& test) {
  const MergeProblem& problem = test.problem;
  int levels = 0;
  while (int64_t{1} << levels < problem.states) ++levels;
  for (int64_t r = 0; r < problem.rows; ++r) {
    for (int64_t h = 0; h < problem.heads; ++h) {
      float largest = -kInf;
      for (int64_t i = 0; i < problem.states; ++i) {
        largest = std::max(largest, test.lse_at(i, r, h));
      }
      TRACE("row %d, head %d", static_cast<int>(r), static_cast<int>(h));
      for (int64_t d = 0; d < problem.head_dim; ++d) {
        const Sum sum = tree(test, levels, 0, r, h, d, static_cast<double>(largest));
        CHECK_EQ(test.result(r, h, d), sum.value / sum.weight);
        if (d > 0) continue;
        const double lse = static_cast<double>(largest) + std::log(static_cast<double>(sum.weight));
        CHECK_EQ(test.result_lse(r, h), static_cast<float>(lse));
      }
    }
  }
}

TEST(one_state_comes_back_as_it_is) {
  Random random(1);
  Case test(1, 3, 2, 100);
  test.fill(random, 3);
  test.run();
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t h = 0; h < 2; ++h) {
      CHECK_EQ(test.result_lse(r, h), test.lse_at(0, r, h));
      for (int64_t d = 0; d < 100; ++d) CHECK_EQ(test.result(r, h, d), test.out_at(0, r, h, d));
    }
  }
}

TEST(states_are_merged_along_the_tree) {
  Random random(2);
  for (int64_t states = 1; states <= 40; ++states) {
    TRACE("states %d", static_cast<int>(states));
    Case test(states, 2, 2, random.pick<int64_t>({1, 2, 63, 64, 65, 130}));
    test.fill(random, random.pick({0.0, 1.0, 10.0}));
    test.run();
    check_against_tree(test);
  }
  Case many(4099, 1, 1, 3);
  many.fill(random, 1);
  many.run();
  check_against_tree(many);
}

TEST(merging_is_the_softmax_over_all_keys) {
  Random random(3);
  for (int round = 0; round < 50; ++round) {
    const int64_t states = random.integer(1, 60);
    Case test(states, 1, 1, 8);
    test.fill(random, random.pick({0.5, 5.0, 40.0}));
    test.run();
    long double largest = -1e30L;
    for (int64_t i = 0; i < states; ++i) {
      largest = std::max(largest, static_cast<long double>(test.lse_at(i, 0, 0)));
    }
    long double total = 0;
    for (int64_t i = 0; i < states; ++i) {
      total += expl(static_cast<long double>(test.lse_at(i, 0, 0)) - largest);
    }
    for (int64_t d = 0; d < 8; ++d) {
      long double sum = 0;
      long double scale = 0;
      for (int64_t i = 0; i < states; ++i) {
        const long double term = expl(static_cast<long double>(test.lse_at(i, 0, 0)) - largest) *
                                 static_cast<long double>(test.out_at(i, 0, 0, d));
        sum += term;
        scale += fabsl(term);
      }
      // Weight, product, a level of the tree each, the sum of weights likewise,
      // the quotient: at most 2 * 6 + 5 roundings of 2^-24.
      CHECK_NEAR(static_cast<double>(test.result(0, 0, d)), static_cast<double>(sum / total),
                 17 * 0x1p-24 * static_cast<double>(scale / total));
    }
    const auto lse = static_cast<double>(largest + logl(total));
    CHECK_NEAR(static_cast<double>(test.result_lse(0, 0)), lse, 0x1p-20 + 0x1p-23 * fabs(lse));
  }
}

// Leaves states out at random: the others must not move in the tree, and what
// the outputs of those that saw nothing hold must not matter.
TEST(states_that_saw_nothing_keep_their_place_in_the_tree) {
  Random random(4);
  for (int round = 0; round < 400; ++round) {
    const int64_t states = random.integer(2, 40);
    const int percent = random.pick({10, 50, 90});
    TRACE("round %d: %d states, %d %% empty", round, static_cast<int>(states), percent);
    Case test(states, 1, 2, 2);
    test.fill(random, 1);
    for (int64_t h = 0; h < 2; ++h) {
      const int64_t kept = random.integer(0, states - 1);
      for (int64_t i = 0; i < states; ++i) {
        if (i == kept || !random.chance(percent)) continue;
        test.lse_at(i, 0, h) = -kInf;
        test.out_at(i, 0, h, 0) = kNan;
        test.out_at(i, 0, h, 1) = kInf;
      }
    }
    test.run();
    check_against_tree(test);
  }
}

// Gaps in which siblings never meet: no state may be kept for each of them.
TEST(any_number_of_gaps_is_merged) {
  Random random(5);
  for (const int64_t states : {300, 2048, 5000}) {
    for (const int64_t period : {3, 4, 5, 8}) {
      TRACE("%d states, period %d", static_cast<int>(states), static_cast<int>(period));
      Case test(states, 1, 1, 1);
      test.fill(random, 1);
      for (int64_t i = 0; i < states; ++i) {
        if (i % period != 0 && i % period != period - 1) test.lse_at(i, 0, 0) = -kInf;
      }
      test.run();
      check_against_tree(test);
    }
  }
}

TEST(nothing_seen_gives_zero_and_minus_infinity) {
  for (const int64_t states : {1, 2, 9}) {
    Case test(states, 1, 1, 70);  // outputs NaN
    std::fill(test.lses.begin(), test.lses.end(), -kInf);
    test.run();
    CHECK_EQ(test.result_lse(0, 0), -kInf);
    for (int64_t d = 0; d < 70; ++d) CHECK_EQ(bits_of(test.result(0, 0, d)), 0u);
  }
}

TEST(a_nan_lse_makes_the_row_nan) {
  Random random(6);
  for (const int64_t states : {1, 2, 3, 8}) {
    for (int64_t nan = 0; nan < states; ++nan) {
      for (const bool others_empty : {false, true}) {
        TRACE("state %d of %d, others empty %d", static_cast<int>(nan), static_cast<int>(states),
              others_empty);
        Case test(states, 2, 1, 3);
        test.fill(random, 1);
        for (int64_t i = 0; i < states && others_empty; ++i) test.lse_at(i, 0, 0) = -kInf;
        test.lse_at(nan, 0, 0) = kNan;
        test.run();
        CHECK(std::isnan(test.result_lse(0, 0)));
        for (int64_t d = 0; d < 3; ++d) {
          CHECK(std::isnan(test.result(0, 0, d)));
          CHECK(!std::isnan(test.result(1, 0, d)));
        }
      }
    }
  }
}

TEST(a_nan_output_stays_in_its_dimension) {
  Random random(7);
  Case test(5, 1, 1, 130);
  test.fill(random, 1);
  test.out_at(3, 0, 0, 64) = kNan;
  test.lse_at(3, 0, 0) = -200;  // a weight that underflows counts all the same
  test.run();
  for (int64_t d = 0; d < 130; ++d) CHECK_EQ(std::isnan(test.result(0, 0, d)), d == 64);
  CHECK(!std::isnan(test.result_lse(0, 0)));
}

TEST(lses_of_any_size_neither_overflow_nor_vanish) {
  const float huge = std::numeric_limits<float>::max();
  for (const float large : {huge, 1e30f, 100.0f, -100.0f, -1e30f}) {
    for (const float small : {-huge, large - 200 - 1e-6f * std::fabs(large)}) {
      Case test(2, 1, 1, 1);
      test.lse_at(0, 0, 0) = small;
      test.lse_at(1, 0, 0) = large;
      test.out_at(0, 0, 0, 0) = 7;
      test.out_at(1, 0, 0, 0) = 3;
      test.run();
      CHECK_EQ(test.result_lse(0, 0), large);
      CHECK_EQ(test.result(0, 0, 0), 3.0f);
    }
    Case equal(2, 1, 1, 1);
    equal.lse_at(0, 0, 0) = equal.lse_at(1, 0, 0) = large;
    equal.out_at(0, 0, 0, 0) = 7;
    equal.out_at(1, 0, 0, 0) = 3;
    equal.run();
    CHECK_EQ(equal.result(0, 0, 0), 5.0f);
    CHECK_NEAR(static_cast<double>(equal.result_lse(0, 0)),
               static_cast<double>(large) + std::log(2.0),
               0x1p-24 * std::fabs(static_cast<double>(large)));
  }
}

TEST(threads_and_strides_change_no_bit_and_gaps_stay) {
  Random random(8);
  Case packed(11, 37, 3, 66);
  packed.fill(random, 2);
  packed.run();
  for (int num_threads = 1; num_threads <= 9; ++num_threads) {
    TRACE("threads %d", num_threads);
    const int64_t padding = num_threads % 3;
    Case test(11, 37, 3, 66, padding);
    size_t gaps = test.out.size();
    for (int64_t i = 0; i < 11; ++i) {
      for (int64_t r = 0; r < 37; ++r) {
        for (int64_t h = 0; h < 3; ++h) {
          test.lse_at(i, r, h) = packed.lse_at(i, r, h);
          for (int64_t d = 0; d < 66; ++d) test.out_at(i, r, h, d) = packed.out_at(i, r, h, d);
        }
      }
    }
    test.run(num_threads);
    for (int64_t r = 0; r < 37; ++r) {
      for (int64_t h = 0; h < 3; ++h) {
        CHECK_EQ(bits_of(test.result_lse(r, h)), bits_of(packed.result_lse(r, h)));
        for (int64_t d = 0; d < 66; ++d, --gaps) {
          CHECK_EQ(bits_of(test.result(r, h, d)), bits_of(packed.result(r, h, d)));
        }
      }
    }
    const auto unwritten = std::count(test.out.begin(), test.out.end(), kUnwritten);
    CHECK_EQ(static_cast<size_t>(unwritten), gaps);
  }
}

}  // namespace
}  // namespace flashverify::cpu

TEST_MAIN()
