// merge_states: one block per row and head; natural-log LSEs, normalised outputs.
#include "native/cuda/device/ptx.cuh"

using namespace flashverify::cuda;

namespace flashverify::cuda {

// The perfect binary tree over the states, read depth first: after state i, as
// many pairs of equal height merge as i + 1 has trailing zero bits.
constexpr int kTreeDepth = 32;

struct NaturalState {
  float lse;
  float o;
};
// exp is of differences at most 0; two empty states stay empty.
FV_DEVICE NaturalState merge_pair(NaturalState a, NaturalState b) {
  const float top = fmaxf(a.lse, b.lse);
  if (top == -kInfinity && a.lse == b.lse) return a;
  const float wa = expf(a.lse - top);
  const float wb = expf(b.lse - top);
  const float sum = wa + wb;
  return {top + logf(sum), (a.lse == -kInfinity ? 0.0f : a.o * wa / sum) +
                               (b.lse == -kInfinity ? 0.0f : b.o * wb / sum)};
}

}  // namespace flashverify::cuda

extern "C" __global__ void __launch_bounds__(128)
    merge_states(const __grid_constant__ MergeArgs p) {
  const int64 row = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x % p.heads);
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    NaturalState stack[kTreeDepth];
    int height = 0;
    for (int64 i = 0; i < p.states; ++i) {
      NaturalState s;
      s.lse = p.lses[i * p.lses_stride[0] + row * p.lses_stride[1] + head * p.lses_stride[2]];
      s.o = p.outs[i * p.outs_stride[0] + row * p.outs_stride[1] + head * p.outs_stride[2] + d];
      for (int64 bits = i; bits & 1; bits >>= 1) s = merge_pair(stack[--height], s);
      stack[height++] = s;
    }
    NaturalState s = {-kInfinity, 0.0f};
    if (height > 0) s = stack[--height];
    while (height > 0) s = merge_pair(stack[--height], s);
    if (s.lse == -kInfinity) s.o = 0.0f;
    p.out[row * p.out_stride[0] + head * p.out_stride[1] + d] = s.o;
    if (d == 0) p.out_lse[row * p.out_lse_stride[0] + head * p.out_lse_stride[1]] = s.lse;
  }
}
