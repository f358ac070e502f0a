/* The header is C99, and a C program can call the library. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flashverify/flashverify.h"

/* A second time: the guard holds. */
#include "flashverify/flashverify.h"

#define KEYS 3
#define HEAD_DIM 4

static int failures = 0;

static void expect(int condition, const char* what) {
  if (condition) return;
  printf("FAILED: %s (last error: %s)\n", what, fv_get_api()->last_error());
  ++failures;
}

static fv_tensor tensor(void* data, fv_dtype dtype, int32_t rank, const int64_t* shape) {
  fv_tensor view;
  int64_t stride = 1;
  int32_t axis;
  memset(&view, 0, sizeof view);
  view.data = data;
  view.dtype = (int32_t)dtype;
  view.rank = rank;
  for (axis = rank - 1; axis >= 0; --axis) {
    view.shape[axis] = shape[axis];
    view.stride[axis] = stride;
    stride *= shape[axis];
  }
  return view;
}

/* One query that is orthogonal to every key: the output is the values' mean. */
static void attend(const fv_api* api) {
  const int64_t q_shape[3] = {1, 1, HEAD_DIM};
  const int64_t cache_shape[4] = {1, KEYS, 1, HEAD_DIM};
  const int64_t table_shape[2] = {1, 1};
  const int64_t one[1] = {1};
  float q[HEAD_DIM] = {1, 0, 0, 0};
  float out[HEAD_DIM] = {0, 0, 0, 0};
  float lse[1] = {0};
  /* E4M3: 0x38 is 1, 0x40 is 2, 0x44 is 3. */
  uint8_t k[KEYS][HEAD_DIM] = {{0, 0x38, 0, 0}, {0, 0, 0x38, 0}, {0, 0, 0, 0x38}};
  uint8_t v[KEYS][HEAD_DIM] = {{0x38, 0x38, 0, 0x38}, {0x40, 0x38, 0, 0xB8}, {0x44, 0x38, 0, 0}};
  int32_t page_table[1] = {0};
  int32_t seq_lens[1] = {KEYS};
  size_t bytes = 0;
  char* memory;
  fv_attention_params params;

  memset(&params, 0, sizeof params);
  params.struct_size = (uint32_t)sizeof params;
  params.route = FV_ROUTE_SCALAR_FP32;
  params.device_type = FV_DEVICE_CPU;
  params.q = tensor(q, FV_DTYPE_FLOAT32, 3, q_shape);
  params.k_cache = tensor(k, FV_DTYPE_FLOAT8_E4M3, 4, cache_shape);
  params.v_cache = tensor(v, FV_DTYPE_FLOAT8_E4M3, 4, cache_shape);
  params.page_table = tensor(page_table, FV_DTYPE_INT32, 2, table_shape);
  params.seq_lens = tensor(seq_lens, FV_DTYPE_INT32, 1, one);
  params.out = tensor(out, FV_DTYPE_FLOAT32, 3, q_shape);
  params.lse = tensor(lse, FV_DTYPE_FLOAT32, 2, q_shape);
  params.softmax_scale = 0.5f;
  params.causal = 1;
  params.num_threads = 1;
  expect(api->attention_workspace_bytes(&params, &bytes) == FV_OK, "workspace size");
  memory = malloc(bytes + 64);
  params.workspace = memory + (64 - (uintptr_t)memory % 64) % 64;
  params.workspace_bytes = bytes;
  expect(api->paged_attention(&params) == FV_OK, "attention");
  expect(params.ran_route == FV_ROUTE_SCALAR_FP32, "the route that ran");
  expect(fabs((double)out[0] - 2) < 1e-6, "the mean of 1, 2 and 3");
  expect(fabs((double)out[1] - 1) < 1e-6, "the mean of 1, 1 and 1");
  expect(out[2] == 0, "the mean of 0, 0 and 0");
  expect(fabs((double)out[3]) < 1e-6, "the mean of 1, -1 and 0");
  expect(fabs((double)lse[0] - log(3.0)) < 1e-6, "the logarithm of 3");

  params.window = -1;
  expect(api->paged_attention(&params) == FV_ERROR_INVALID_ARGUMENT, "a negative window");
  expect(strstr(api->last_error(), "window: -1") != NULL, "its message");
  free(memory);
}

int main(void) {
  const fv_api* api = fv_get_api();
  expect(api->struct_size == sizeof(fv_api), "struct_size");
  expect(api->abi_version == FLASHVERIFY_ABI_VERSION, "abi_version");
  expect(api->precision_revision == FLASHVERIFY_PRECISION_REVISION, "precision_revision");
  expect(strcmp(api->status_name(FV_ERROR_UNSUPPORTED), "unsupported") == 0, "status_name");
  attend(api);
  printf("%s\n", failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? 0 : 1;
}
