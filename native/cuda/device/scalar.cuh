// The scalar routes: any head_dim up to kScalarMaxDim, any types and strides, on
// every architecture, in FP32 arithmetic throughout. One block per query row,
// head and split; a second launch folds the splits.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_SCALAR_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_SCALAR_CUH_

#include "native/cuda/device/cache_codec.cuh"
#include "native/cuda/device/state.cuh"
#include "native/cuda/device/work.cuh"

namespace flashverify::cuda {

constexpr int kScalarThreads = kUnitTokens;  // a thread per key of a unit
constexpr int kScalarMaxDim = 512;

// The request of a row of q: by halving, since rows are contiguous per request.
FV_DEVICE int request_of_row(const AttentionArgs& p, int row) {
  if (p.query_start_loc == nullptr) return row / p.query_len;
  int low = 0;
  int high = p.batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.query_start_loc[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct ScalarRow {
  int request;
  int seq_len;
  bool bad;
  bool owned;  // by some request
  Visible keys;
};
FV_DEVICE ScalarRow scalar_row(const AttentionArgs& p, int row) {
  ScalarRow r = {};
  r.request = request_of_row(p, row);
  const int begin = query_start(p, r.request);
  const int end = query_start(p, r.request + 1);
  r.owned = row >= begin && row < end;
  r.seq_len = p.seq_lens[r.request];
  if (r.seq_len < 0 || r.seq_len > static_cast<int64>(p.max_pages) * p.page_size) {
    if (threadIdx.x == 0) {
      atomicOr(p.status, r.seq_len < 0 ? kStatusNegativeLength : kStatusLengthAboveCapacity);
    }
    r.bad = true;
    r.seq_len = 0;
  }
  r.keys = visible_keys(p, r.seq_len, end - begin, row - begin);
  r.keys.end = min_of(r.keys.end, r.seq_len);
  return r;
}

template <bool kMax>
FV_DEVICE float block_reduce(float v, float* scratch) {
#pragma unroll
  for (int k = 16; k > 0; k >>= 1) v = combine<kMax>(v, __shfl_xor_sync(~0u, v, k));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  return combine<kMax>(combine<kMax>(scratch[0], scratch[1]),
                       combine<kMax>(scratch[2], scratch[3]));
}

// A partial of scalar_fp32: head_dim floats; of scalar_half: as many halves,
// divided by the split's sum.
template <class Codec, bool kLegacy>
FV_DEVICE void scalar_splits(const AttentionArgs& p) {
  __shared__ float query[kScalarMaxDim];
  __shared__ float weight[kUnitTokens];
  __shared__ const unsigned char* value[kUnitTokens];
  __shared__ float scratch[4];
  const int thread = threadIdx.x;
  const int heads = p.kv_heads * p.group;
  const int row = blockIdx.x / heads;
  const int head = blockIdx.x % heads;
  const int split = blockIdx.y;
  const ScalarRow r = scalar_row(p, row);
  if (!r.owned) return;
  const int kv_head = head / p.group;
  const unsigned char* q = p.q + row * p.q_row_stride + head * p.q_head_stride;
  const int q_bytes = element_bytes(p.q_type);
  for (int d = thread; d < p.head_dim; d += kScalarThreads)
    query[d] = load_element(q + d * q_bytes, p.q_type);
  const float k_scale =
      p.k_scale == nullptr ? p.k_scale_number : p.k_scale[kv_head * p.k_scale_stride];
  const int* const table = p.page_table + r.request * p.page_table_row_stride;

  float max = -kInfinity;
  float sum = 0.0f;
  float o[kScalarMaxDim / kScalarThreads] = {};
  __syncthreads();
  const int first_unit = r.keys.begin / kUnitTokens;
  const int end_unit = (r.keys.end + kUnitTokens - 1) / kUnitTokens;
  for (int unit = first_unit + ((split - first_unit) & (p.splits - 1)); unit < end_unit;
       unit += p.splits) {
    const int key = unit * kUnitTokens + thread;
    float score = -kInfinity;
    value[thread] = nullptr;
    if (key >= r.keys.begin && key < r.keys.end) {
      const int page = key / p.page_size;
      const int64 token = key - page * p.page_size;
      const int64 id = usable_page(p, table[page]);
      const unsigned char* k =
          p.k.data + id * p.k.page_stride + token * p.k.token_stride + kv_head * p.k.head_stride;
      value[thread] =
          p.v.data + id * p.v.page_stride + token * p.v.token_stride + kv_head * p.v.head_stride;
      float dot = 0.0f;
      for (int d = 0; d < p.head_dim; ++d) dot = fmaf(query[d], Codec::load(k, d), dot);
      score = dot * (p.score_scale * k_scale);
      if (p.softcap > 0.0f) {
        score = p.softcap * kLog2e * tanhf(score * fminf(kLn2 / p.softcap, kLargest));
      }
    }
    const float top = fmaxf(max, block_reduce<true>(score, scratch));
    // Nothing seen yet, or NaN alone: any finite reference will do.
    const float base = top > -kInfinity ? top : 0.0f;
    const float factor = exp2_approx(max - base);
    const float y = exp2_approx(score - base);
    weight[thread] = kLegacy ? from_half(to_half(y)) : y;
    sum = fmaf(sum, factor, block_reduce<false>(y, scratch));
    max = top;
#pragma unroll
    for (int i = 0; i < kScalarMaxDim / kScalarThreads; ++i) {
      const int d = thread + i * kScalarThreads;
      if (d >= p.head_dim) continue;
      float total = 0.0f;
      for (int k = 0; k < kUnitTokens; ++k) {
        if (value[k] != nullptr) total = fmaf(weight[k], Codec::load(value[k], d), total);
      }
      o[i] = fmaf(o[i], factor, total);
    }
    __syncthreads();
  }

  const int64 part = static_cast<int64>(blockIdx.x) * p.splits + split;
  const float scale = kLegacy && sum != 0.0f ? 1.0f / sum : 1.0f;
#pragma unroll
  for (int i = 0; i < kScalarMaxDim / kScalarThreads; ++i) {
    const int d = thread + i * kScalarThreads;
    if (d >= p.head_dim) continue;
    const float v = fmaf(o[i], scale, 0.0f);
    if constexpr (kLegacy) {
      reinterpret_cast<unsigned short*>(p.partials)[part * p.head_dim + d] = to_half(v);
    } else {
      reinterpret_cast<float*>(p.partials)[part * p.head_dim + d] = v;
    }
  }
  if (thread == 0) {
    const bool seen = sum != 0.0f;
    const float m = max > -kInfinity ? max : 0.0f;
    p.partial_stats[part] = !seen     ? make_float2(-kInfinity, 0.0f)
                            : kLegacy ? make_float2(m + log2f(sum), 1.0f)
                                      : make_float2(m, sum);
  }
}

// One block per query row and head.
template <bool kLegacy>
FV_DEVICE void scalar_merge(const AttentionArgs& p) {
  __shared__ float2 factors[kMaxSplits];
  __shared__ float output_factor;
  const int heads = p.kv_heads * p.group;
  const int row = blockIdx.x / heads;
  const int head = blockIdx.x % heads;
  const ScalarRow r = scalar_row(p, row);
  if (!r.owned) return;
  const int64 first_part = static_cast<int64>(blockIdx.x) * p.splits;
  if (threadIdx.x == 0) {
    float max = -kInfinity;
    float sum = 0.0f;
    for (int i = 0; i < p.splits; ++i) {
      const float2 s = p.partial_stats[first_part + i];
      const FoldFactors f = fold_stats(max, sum, s.x, s.y);
      factors[i] = make_float2(f.old, f.add);
    }
    const int kv_head = head / p.group;
    const float scale =
        p.v_scale == nullptr ? p.v_scale_number : p.v_scale[kv_head * p.v_scale_stride];
    float lse;
    output_factor = finish_row(max, sum, p.sinks == nullptr ? nullptr : p.sinks + head, scale, lse);
    if (r.bad) output_factor = lse = __int_as_float(0x7fffffff);
    if (p.lse != nullptr) p.lse[row * p.lse_row_stride + head * p.lse_head_stride] = lse;
  }
  __syncthreads();
  unsigned char* const out = p.out + row * p.out_row_stride + head * p.out_head_stride;
  for (int d = threadIdx.x; d < p.head_dim; d += kScalarThreads) {
    float total = 0.0f;
    for (int i = 0; i < p.splits; ++i) {
      const int64 index = (first_part + i) * p.head_dim + d;
      const float v = kLegacy
                          ? from_half(reinterpret_cast<const unsigned short*>(p.partials)[index])
                          : reinterpret_cast<const float*>(p.partials)[index];
      total = fold_value(total, v, {factors[i].x, factors[i].y});
    }
    store_element(out + d * element_bytes(p.out_type), p.out_type,
                  finish_value(total, output_factor));
  }
}

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_SCALAR_CUH_
