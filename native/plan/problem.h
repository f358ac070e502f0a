// What the validated arguments of one attention call look like to a backend.
//
// native/abi fills these structures after every check has passed; the backends
// trust them. Strides are in elements and 64-bit.
#ifndef FLASHVERIFY_NATIVE_PLAN_PROBLEM_H_
#define FLASHVERIFY_NATIVE_PLAN_PROBLEM_H_

#include <cstdint>

#include "flashverify/flashverify.h"

namespace flashverify {

// A [pages, page_size, kv_heads, head_dim] view; the last axis is contiguous.
struct CacheView {
  const void* data = nullptr;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// Per-tensor (stride 0) or per-head (stride 1) FP32 scales; without data a number.
struct ScaleView {
  const float* data = nullptr;
  int64_t stride = 0;
  float number = 1.0f;

  float at(int64_t head) const { return data == nullptr ? number : data[head * stride]; }
};

struct AttentionProblem {
  fv_route route = FV_ROUTE_NONE;

  int64_t rows = 0;  // over all requests
  int64_t batch = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t pages = 0;  // of the caches
  int64_t page_size = 0;
  int64_t max_pages = 0;

  fv_dtype q_dtype = FV_DTYPE_NONE;
  const void* q = nullptr;
  int64_t q_row_stride = 0;
  int64_t q_head_stride = 0;

  fv_dtype kv_dtype = FV_DTYPE_NONE;
  CacheView k;
  CacheView v;

  const int32_t* page_table = nullptr;
  int64_t page_table_row_stride = 0;  // the last axis is contiguous
  const int32_t* seq_lens = nullptr;
  const int32_t* query_start_loc = nullptr;  // null: rows / batch each

  ScaleView k_scale;
  ScaleView v_scale;
  const float* sinks = nullptr;

  fv_dtype out_dtype = FV_DTYPE_NONE;
  void* out = nullptr;
  int64_t out_row_stride = 0;
  int64_t out_head_stride = 0;
  float* lse = nullptr;
  int64_t lse_row_stride = 0;
  int64_t lse_head_stride = 0;

  float softmax_scale = 1.0f;
  float softcap = 0.0f;
  bool causal = true;
  int64_t window = 0;

  int64_t group() const { return q_heads / kv_heads; }
  int64_t first_row(int64_t request) const {
    return query_start_loc != nullptr ? query_start_loc[request] : request * (rows / batch);
  }
  int64_t query_len(int64_t request) const { return first_row(request + 1) - first_row(request); }
};

}  // namespace flashverify

#endif  // FLASHVERIFY_NATIVE_PLAN_PROBLEM_H_
