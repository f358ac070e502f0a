// The tree walk against the perfect binary tree by its recursive definition.
// States are strings: a leaf is its split's number, a merge "(a b)", so that two
// orders of merging never look alike.

#include "native/plan/schedule.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify {
namespace {

std::string merged(const std::string& a, const std::string& b) {
  if (a.empty()) return b;  // the identity
  if (b.empty()) return a;
  return "(" + a + " " + b + ")";
}

// Node (level, index) of the tree, where splits begin .. end - 1 saw something.
std::string tree(int level, int64_t index, int64_t begin, int64_t end) {
  const int64_t first = index << level;
  const int64_t last = (index + 1) << level;
  if (last <= begin || end <= first) return "";
  if (level == 0) return std::to_string(index);
  return merged(tree(level - 1, 2 * index, begin, end), tree(level - 1, 2 * index + 1, begin, end));
}

std::string whole_tree(int64_t begin, int64_t end) {
  return tree(log2_ceil(end) + 1, 0, begin, end);
}

// The stack of states that a caller keeps beside a TreeWalk.
class Walker {
 public:
  void push(int level, int64_t index, const std::string& state) {
    states_.push_back(state);
    walk_.push(level, index);
    while (walk_.merge()) merge_top();
    if (walk_.depth() > deepest_) deepest_ = walk_.depth();
  }

  std::string finish() {
    while (walk_.collapse()) merge_top();
    CHECK_EQ(states_.size(), static_cast<size_t>(walk_.depth()));
    CHECK(states_.size() <= 1);
    return states_.empty() ? "" : states_[0];
  }

  // Most states kept after a push; one more exists during it.
  int deepest() const { return deepest_; }

 private:
  void merge_top() {
    CHECK_EQ(states_.size(), static_cast<size_t>(walk_.depth()) + 1);
    const std::string upper = states_.back();
    states_.pop_back();
    states_.back() = merged(states_.back(), upper);
  }

  TreeWalk walk_;
  std::vector<std::string> states_;
  int deepest_ = 0;
};

std::string plain_walk(int64_t begin, int64_t end) {
  Walker walker;
  for (int64_t split = begin; split < end; ++split) {
    walker.push(0, split, std::to_string(split));
  }
  const std::string result = walker.finish();
  CHECK(walker.deepest() <= log2_ceil(end) + 1);
  return result;
}

// As several work items do it: each walks its aligned 1 << level splits (its
// first and last may be partial) to one state; those are merged afterwards.
std::string walk_in_items(int level, int64_t begin, int64_t end) {
  Walker items;
  for (int64_t node = begin >> level; node << level < end; ++node) {
    const int64_t first = std::max(begin, node << level);
    const int64_t last = std::min(end, (node + 1) << level);
    items.push(level, node, plain_walk(first, last));
  }
  return items.finish();
}

void check_range(int64_t begin, int64_t end) {
  TRACE("splits %lld .. %lld", static_cast<long long>(begin), static_cast<long long>(end));
  const std::string expected = whole_tree(begin, end);
  CHECK_EQ(plain_walk(begin, end), expected);
  for (int level = 0; level <= log2_ceil(end) + 1; ++level) {
    TRACE("items of level %d", level);
    CHECK_EQ(walk_in_items(level, begin, end), expected);
  }
}

TEST(a_small_tree_looks_as_drawn) {
  CHECK_EQ(plain_walk(0, 1), "0");
  CHECK_EQ(plain_walk(0, 7), "(((0 1) (2 3)) ((4 5) 6))");
  CHECK_EQ(plain_walk(3, 7), "(3 ((4 5) 6))");
  CHECK_EQ(plain_walk(5, 8), "(5 (6 7))");
  CHECK_EQ(plain_walk(2, 2), "");
}

TEST(every_small_range_is_merged_along_the_tree) {
  for (int64_t end = 0; end <= 72; ++end) {
    for (int64_t begin = 0; begin <= end; ++begin) check_range(begin, end);
  }
}

TEST(large_ranges_are_merged_along_the_tree) {
  testing::Random random(2);
  for (int i = 0; i < 30; ++i) {
    const int64_t end = random.integer(1, 3000);
    check_range(random.integer(0, end - 1), end);
  }
}

// No split's place in the tree depends on the context's length: whatever is
// complete stays as it is when splits are added.
TEST(a_longer_context_only_adds_to_the_tree) {
  for (int64_t end = 1; end < 64; ++end) {
    const std::string left = plain_walk(0, int64_t{1} << log2_ceil(end));
    CHECK_EQ(plain_walk(0, 2 * (int64_t{1} << log2_ceil(end))).substr(1, left.size()), left);
  }
}

// The largest indices that 2^31 - 1 keys give, and the depth that they need.
TEST(deep_walks_stay_within_the_planned_depth) {
  const int64_t splits = ceil_div(INT32_MAX, kSplitTokens);
  CHECK_EQ(splits, int64_t{1} << 21);
  TreeWalk walk;
  int deepest = 0;
  for (int64_t split = 0; split < splits - 1; ++split) {
    walk.push(0, split);
    if (walk.depth() > deepest) deepest = walk.depth();
    while (walk.merge()) {
    }
  }
  CHECK_EQ(deepest, 21);
  CHECK_EQ(walk.depth(), 21);
  walk.push(0, splits - 1);
  CHECK(walk.depth() <= log2_ceil(splits) + 2);
  int merges = 0;
  while (walk.merge()) ++merges;
  CHECK_EQ(merges, 21);
  CHECK_EQ(walk.depth(), 1);
  CHECK(!walk.collapse());
}

TEST(an_empty_walk_has_nothing_to_merge) {
  TreeWalk walk;
  CHECK_EQ(walk.depth(), 0);
  CHECK(!walk.merge());
  CHECK(!walk.collapse());
}

TEST(integer_helpers) {
  for (int64_t value = 1; value < 5000; ++value) {
    const int log = log2_ceil(value);
    CHECK(int64_t{1} << log >= value);
    CHECK(log == 0 || int64_t{1} << (log - 1) < value);
  }
  CHECK_EQ(log2_ceil(0), 0);
  CHECK_EQ(log2_ceil(int64_t{1} << 62), 62);
  CHECK_EQ(log2_ceil((int64_t{1} << 61) + 1), 62);
  for (int64_t a = 0; a < 200; ++a) {
    for (int64_t b = 1; b < 70; ++b) {
      const int64_t quotient = ceil_div(a, b);
      CHECK(quotient * b >= a && (quotient - 1) * b < a);
      CHECK_EQ(round_up(a, b), quotient * b);
    }
  }
  CHECK_EQ(ceil_div(int64_t{1} << 60, 3), ((int64_t{1} << 60) + 2) / 3);
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
