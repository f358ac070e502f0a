// From token position to split, and from split to merge tree.
//
// A schedule is a pure function of the absolute token position: never of the
// batch, the query length, the number of threads or SMs. That is what makes a
// row's bits independent of all those (docs/numerics.md, invariance).
#ifndef FLASHVERIFY_NATIVE_PLAN_SCHEDULE_H_
#define FLASHVERIFY_NATIVE_PLAN_SCHEDULE_H_

#include <cstdint>

namespace flashverify {

// Keys in a tile: the scores that are computed together. One running maximum
// is taken per tile, so a tile's boundaries are part of the arithmetic.
constexpr int64_t kTileTokens = 64;

// The CPU's schedule "c1024": contiguous splits. 512 is within noise of it and
// doubles the half arms' partials; 4096 leaves two threads idle below 8K tokens.
constexpr int64_t kSplitTokens = 1024;
static_assert(kSplitTokens % kTileTokens == 0, "a tile lies in one split");

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr int log2_ceil(int64_t value) {
  int log = 0;
  while ((int64_t{1} << log) < value) ++log;
  return log;
}

// The merge tree is the perfect binary tree over split indices: node (level, i)
// covers splits i << level .. (i + 1) << level. A split that a row does not see
// is the identity, so that the tree's size does not matter. This is the walk
// over neighbouring nodes in ascending order, as a stack of finished nodes whose
// levels fall: push() a node, then merge() while it says so. No node between the
// first and the last may be left out, or the stack outgrows the tree.
class TreeWalk {
 public:
  struct Node {
    int level;
    int64_t index;
  };

  int depth() const { return depth_; }

  void push(int level, int64_t index) { nodes_[depth_++] = {level, index}; }

  // True when the two topmost nodes are siblings: the caller merges the upper
  // into the lower. Promotes a right child at the bottom of the stack: its left
  // sibling was never pushed, since everything in it precedes what any row sees.
  bool merge() {
    while (depth_ > 0 && (nodes_[depth_ - 1].index & 1) != 0) {
      if (depth_ > 1) {
        --depth_;
        promote(nodes_[depth_ - 1]);
        return true;
      }
      promote(nodes_[0]);
    }
    return false;
  }

  // After the last push: true while two nodes are left. Their right siblings
  // are identities, so the upper merges into the lower whatever their levels.
  bool collapse() {
    if (depth_ <= 1) return false;
    --depth_;
    return true;
  }

 private:
  static void promote(Node& node) {
    ++node.level;
    node.index >>= 1;
  }

  static constexpr int kMaxDepth = 64;
  int depth_ = 0;
  Node nodes_[kMaxDepth];
};

}  // namespace flashverify

#endif  // FLASHVERIFY_NATIVE_PLAN_SCHEDULE_H_
