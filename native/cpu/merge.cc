// Merging partial results that were normalised and carry their log-sum-exp.
//
// With M = max lse_i and w_i = e^(lse_i - M):  out = sum w_i out_i / sum w_i  and
// lse = M + log(sum w_i). Both sums follow the tree of native/plan/schedule.h in
// ascending order of i. A state of lse -inf saw nothing and counts as zeros,
// whatever its output holds.

#include <cmath>

#include "native/cpu/cpu.h"
#include "native/cpu/threads.h"
#include "native/plan/schedule.h"

namespace flashverify::cpu {
namespace {

constexpr int64_t kDimsPerPass = 64;
constexpr int kMaxTreeDepth = 64;

struct Row {
  const MergeProblem& problem;
  int64_t row;
  int64_t head;

  float lse(int64_t state) const {
    return problem.lses[state * problem.lses_stride[0] + row * problem.lses_stride[1] +
                        head * problem.lses_stride[2]];
  }
  const float* out(int64_t state) const {
    return problem.outs + state * problem.outs_stride[0] + row * problem.outs_stride[1] +
           head * problem.outs_stride[2];
  }
};

float weight(float lse, float largest) {
  return static_cast<float>(std::exp(static_cast<double>(lse) - static_cast<double>(largest)));
}

void merge_row(const Row& row, float* out, float* out_lse) {
  const MergeProblem& problem = row.problem;
  float largest = -INFINITY;
  for (int64_t i = 0; i < problem.states; ++i) {
    const float lse = row.lse(i);
    if (std::isnan(lse)) {
      largest = lse;
      break;
    }
    if (lse > largest) largest = lse;
  }
  if (largest == -INFINITY) {
    for (int64_t d = 0; d < problem.head_dim; ++d) out[d] = 0.0f;
    *out_lse = -INFINITY;
    return;
  }

  float partial[kMaxTreeDepth][kDimsPerPass + 1];  // the last one sums weights
  float total = 0.0f;
  for (int64_t first = 0; first < problem.head_dim; first += kDimsPerPass) {
    const int64_t left = problem.head_dim - first;
    const int64_t dims = left < kDimsPerPass ? left : kDimsPerPass;
    TreeWalk walk;
    const auto add_top = [&] {
      float* to = partial[walk.depth() - 1];
      const float* from = partial[walk.depth()];
      for (int64_t d = 0; d < dims; ++d) to[d] += from[d];
      to[kDimsPerPass] += from[kDimsPerPass];
    };
    for (int64_t i = 0; i < problem.states; ++i) {
      // An empty state keeps its place in the tree, as zeros.
      const float lse = row.lse(i);
      const bool empty = lse == -INFINITY;
      const float w = empty ? 0.0f : weight(lse, largest);
      const float* from = row.out(i) + first;
      float* to = partial[walk.depth()];
      for (int64_t d = 0; d < dims; ++d) to[d] = empty ? 0.0f : w * from[d];
      to[kDimsPerPass] = w;
      walk.push(0, i);
      while (walk.merge()) add_top();
    }
    while (walk.collapse()) add_top();
    total = partial[0][kDimsPerPass];
    for (int64_t d = 0; d < dims; ++d) out[first + d] = partial[0][d] / total + 0.0f;
  }
  *out_lse =
      static_cast<float>(static_cast<double>(largest) + std::log(static_cast<double>(total)));
}

}  // namespace

void run_merge(const MergeProblem& problem, int num_threads) {
  for_each_index(problem.rows, num_threads, [&](int64_t row, int) {
    for (int64_t head = 0; head < problem.heads; ++head) {
      merge_row(
          {problem, row, head},
          problem.out + row * problem.out_stride[0] + head * problem.out_stride[1],
          problem.out_lse + row * problem.out_lse_stride[0] + head * problem.out_lse_stride[1]);
    }
  });
}

}  // namespace flashverify::cpu
