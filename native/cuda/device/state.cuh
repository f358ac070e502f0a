// Softmax state (max, sum, un-normalised output) of a row, in base 2: identity,
// fold, finish. The identity is (-inf, 0, 0).
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_STATE_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_STATE_CUH_

#include "native/cuda/device/ptx.cuh"

namespace flashverify::cuda {

// A row's exponents are taken against a reference that moves only when a score
// exceeds it by this much (base 2): a decision of the row's own data.
constexpr float kReferenceSlack = 8.0f;
constexpr float kUnset = 1.0e30f;

// What a fold multiplies: the state so far by `old`, the newcomer by `add`.
struct FoldFactors {
  float old;
  float add;
};

// (max, sum) = (max, sum) folded with (m, l). The only fold there is: in a
// worker's registers, in the merge, between groups. Folding the identity in
// multiplies by 1 and adds 0; the floor keeps two of them from making NaN.
FV_DEVICE FoldFactors fold_stats(float& max, float& sum, float m, float l) {
  const float top = fmaxf(max, m);
  const float base = fmaxf(top, -3.0e38f);
  const FoldFactors f = {exp2_approx(max - base), exp2_approx(m - base)};
  max = top;
  sum = fmaf(l, f.add, sum * f.old);
  return f;
}
// Zeros stay positive, so that folding the identity in changes no bit.
FV_DEVICE float fold_value(float old_value, float new_value, FoldFactors f) {
  return fmaf(new_value, f.add, fmaf(old_value, f.old, 0.0f));
}

// The factor that turns a row's accumulator into its output, and its natural
// log-sum-exp. A row that saw nothing gives 0 and -inf, also with a sink.
FV_DEVICE float finish_row(float max, float sum, const float* sink, float value_scale, float& lse) {
  if (max == -kInfinity && sum == 0.0f) {  // NaN scores have no maximum, but a sum
    lse = -kInfinity;
    return 0.0f;
  }
  float factor = value_scale;
  if (sink != nullptr) {
    const FoldFactors f = fold_stats(max, sum, *sink * kLog2e, 1.0f);
    factor *= f.old;
  }
  lse = (max + log2f(sum)) * kLn2;
  return factor / sum;
}

// An output, with zeros positive. An attended infinity counts as NaN, whatever the
// sign of P_lo made of it on the way.
FV_DEVICE float finish_value(float v, float factor) {
  const float x = fmaf(v, factor, 0.0f);
  return fmaf(x, 0.0f, x);
}

// Reduces kCount values, each over the eight lanes that share lane % 4, by one
// tree whatever kCount is, and hands value i's result to one lane of each group.
template <bool kMax>
FV_DEVICE float combine(float a, float b) {
  return kMax ? fmaxf(a, b) : a + b;
}
template <bool kMax, int kCount, class Store>
FV_DEVICE void reduce_over_keys(float (&v)[kCount], int lane, Store store) {
  const int g = lane >> 2;
  if constexpr (kCount % 4 == 0) {
    constexpr int kHalf = kCount / 2;
    constexpr int kQuarter = kCount / 4;
    float half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = (g & 1) ? v[i] : v[kHalf + i];
      const float keep = (g & 1) ? v[kHalf + i] : v[i];
      half[i] = combine<kMax>(keep, __shfl_xor_sync(~0u, send, 4));
    }
    float quarter[kQuarter];
#pragma unroll
    for (int i = 0; i < kQuarter; ++i) {
      const float send = (g & 2) ? half[i] : half[kQuarter + i];
      const float keep = (g & 2) ? half[kQuarter + i] : half[i];
      quarter[i] = combine<kMax>(keep, __shfl_xor_sync(~0u, send, 8));
    }
#pragma unroll
    for (int i = 0; i < kQuarter; ++i) {
      quarter[i] = combine<kMax>(quarter[i], __shfl_xor_sync(~0u, quarter[i], 16));
    }
    if (g < 4) {
#pragma unroll
      for (int i = 0; i < kQuarter; ++i) {
        store((g & 1) * kHalf + ((g >> 1) & 1) * kQuarter + i, quarter[i]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float x = v[i];
      x = combine<kMax>(x, __shfl_xor_sync(~0u, x, 4));
      x = combine<kMax>(x, __shfl_xor_sync(~0u, x, 8));
      x = combine<kMax>(x, __shfl_xor_sync(~0u, x, 16));
      if (g == 0) store(i, x);
    }
  }
}

// Floats as integers of the same order, for atomicMax.
FV_DEVICE int ordered(float v) {
  const int i = __float_as_int(v);
  return i ^ ((i >> 31) & 0x7fffffff);
}
FV_DEVICE float from_ordered(int i) { return __int_as_float(i ^ ((i >> 31) & 0x7fffffff)); }
constexpr int kOrderedMinusInfinity = static_cast<int>(0xff800000u ^ 0x7fffffffu);

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_STATE_CUH_
