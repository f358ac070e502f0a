/* Attention over one cached token: the output is that token's value. */
#include <flashverify/flashverify.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kHeadDim = 64 };

static fv_tensor tensor(void* data, fv_dtype dtype, int32_t rank, const int64_t* shape) {
  fv_tensor view;
  int64_t stride = 1;
  int32_t axis;
  memset(&view, 0, sizeof(view));
  view.data = data;
  view.dtype = dtype;
  view.rank = rank;
  for (axis = rank - 1; axis >= 0; --axis) {
    view.shape[axis] = shape[axis];
    view.stride[axis] = stride;
    stride *= shape[axis];
  }
  return view;
}

int main(void) {
  const int64_t row_shape[3] = {1, 1, kHeadDim};
  const int64_t cache_shape[4] = {1, 1, 1, kHeadDim};
  const int64_t table_shape[2] = {1, 1};
  const int64_t lens_shape[1] = {1};
  float q[kHeadDim];
  float out[kHeadDim];
  uint8_t k[kHeadDim];
  uint8_t v[kHeadDim];
  int32_t page = 0;
  int32_t seq_len = 1;
  size_t bytes = 0;
  int i;
  const fv_api* api = fv_get_api();
  fv_attention_params params;

  if (api->precision_revision != FLASHVERIFY_PRECISION_REVISION) return 1;
  for (i = 0; i < kHeadDim; ++i) {
    q[i] = 0.5f;
    out[i] = -1.0f;
    k[i] = 0x38; /* 1.0 in E4M3 */
    v[i] = 0x40; /* 2.0 in E4M3 */
  }

  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.route = FV_ROUTE_GROUPED_FP32;
  params.device_type = FV_DEVICE_CPU;
  params.q = tensor(q, FV_DTYPE_FLOAT32, 3, row_shape);
  params.k_cache = tensor(k, FV_DTYPE_FLOAT8_E4M3, 4, cache_shape);
  params.v_cache = tensor(v, FV_DTYPE_FLOAT8_E4M3, 4, cache_shape);
  params.page_table = tensor(&page, FV_DTYPE_INT32, 2, table_shape);
  params.seq_lens = tensor(&seq_len, FV_DTYPE_INT32, 1, lens_shape);
  params.out = tensor(out, FV_DTYPE_FLOAT32, 3, row_shape);
  params.softmax_scale = 0.125f;
  params.causal = 1;
  params.num_threads = 1;
  if (api->attention_workspace_bytes(&params, &bytes) != FV_OK) {
    fprintf(stderr, "attention_workspace_bytes: %s\n", api->last_error());
    return 1;
  }
  params.workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
  params.workspace_bytes = bytes;
  if (api->paged_attention(&params) != FV_OK) {
    fprintf(stderr, "paged_attention: %s\n", api->last_error());
    return 1;
  }
  for (i = 0; i < kHeadDim; ++i) {
    if (out[i] != 2.0f) return 1;
  }
  free(params.workspace);
  printf("%s at precision revision %u\n", api->route_name(params.ran_route),
         (unsigned)api->precision_revision);
  return 0;
}
