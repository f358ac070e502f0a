/* flashverify: attention for speculative-decoding verification over a paged
 * FP8 key/value cache, with every piece of attention state in FP32.
 *
 * This is the whole C ABI, in C99. The library exports one symbol,
 * fv_get_api(); everything else is reached through the table it returns, so
 * that a stale library is told by the numbers at the head of the table and
 * never by an unresolved symbol. docs/abi.md has the compatibility rules.
 */
#ifndef FLASHVERIFY_FLASHVERIFY_H_
#define FLASHVERIFY_FLASHVERIFY_H_

#include <stddef.h>
#include <stdint.h>

/* The arithmetic contract (docs/numerics.md). It changes whenever any stored or
 * returned bit may change, and is part of the SONAME and of the symbol version. */
#ifndef FLASHVERIFY_PRECISION_REVISION
#define FLASHVERIFY_PRECISION_REVISION 4
#endif

/* The layout of the structures below. It changes when a field moves or changes
 * meaning; new fields at the end of a structure are told by struct_size. */
#define FLASHVERIFY_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fv_status {
  FV_OK = 0,
  FV_ERROR_INVALID_ARGUMENT = 1,    /* wrong rank, shape, dtype, stride, device or value */
  FV_ERROR_OUT_OF_RANGE = 2,        /* a length, page, slot or offset outside its range */
  FV_ERROR_UNSUPPORTED = 3,         /* valid, but nothing here computes it */
  FV_ERROR_WORKSPACE_TOO_SMALL = 4, /* workspace_bytes below what the call needs */
  FV_ERROR_OUT_OF_MEMORY = 5,
  FV_ERROR_DEVICE = 6, /* the device's driver refused; its own text is in the message */
  FV_ERROR_INTERNAL = 7
} fv_status;

typedef enum fv_dtype {
  FV_DTYPE_NONE = 0,
  FV_DTYPE_FLOAT32 = 1,
  FV_DTYPE_FLOAT16 = 2,
  FV_DTYPE_BFLOAT16 = 3,
  FV_DTYPE_FLOAT8_E4M3 = 4, /* float8_e4m3fn: no infinities, NaN is S.1111.111 */
  FV_DTYPE_FLOAT8_E5M2 = 5, /* IEEE-like: infinities and NaNs */
  FV_DTYPE_INT32 = 6,
  FV_DTYPE_INT64 = 7
} fv_dtype;

typedef enum fv_device_type { FV_DEVICE_CPU = 1, FV_DEVICE_CUDA = 2 } fv_device_type;

/* The kernel family. The *_half routes keep the old arithmetic on purpose and
 * run only when named. */
typedef enum fv_route {
  FV_ROUTE_NONE = 0,
  FV_ROUTE_GROUPED_FP32 = 1,
  FV_ROUTE_SCALAR_FP32 = 2,
  FV_ROUTE_GROUPED_HALF = 3,
  FV_ROUTE_SCALAR_HALF = 4,
  FV_ROUTE_XQA_HALF = 5 /* q_len = 1 only */
} fv_route;
#define FV_ROUTE_COUNT 6

/* CPU instruction sets. Bits are invariant within each, not between them. */
typedef enum fv_cpu_isa {
  FV_CPU_ISA_AUTO = 0, /* the best one that this CPU has */
  FV_CPU_ISA_PORTABLE = 1,
  FV_CPU_ISA_AVX2 = 2,  /* AVX2, FMA, F16C */
  FV_CPU_ISA_AVX512 = 3 /* AVX-512 F, BW, DQ, VL, and the above */
} fv_cpu_isa;

#define FV_MAX_RANK 4

/* What device code found in a call's device-side inputs, as bits. */
typedef enum fv_cuda_fault {
  FV_CUDA_FAULT_LENGTH_ABOVE_CAPACITY = 1, /* seq_lens above max_pages * page_size */
  FV_CUDA_FAULT_NEGATIVE_LENGTH = 2,       /* seq_lens below 0 */
  FV_CUDA_FAULT_BAD_QUERY_START = 4,       /* query_start_loc not ascending within the rows */
  FV_CUDA_FAULT_PAGE_OUT_OF_RANGE = 8,     /* page_table names a page that is not there */
  FV_CUDA_FAULT_SLOT_OUT_OF_RANGE = 16     /* slot_mapping names a slot that is not there */
} fv_cuda_fault;

/* A view of memory that the caller owns, on the call's device. An absent optional tensor has
 * data = NULL and dtype = FV_DTYPE_NONE. A tensor with no elements may have
 * data = NULL beside its dtype. */
typedef struct fv_tensor {
  void* data;
  int32_t dtype; /* fv_dtype */
  int32_t rank;
  int64_t shape[FV_MAX_RANK];
  int64_t stride[FV_MAX_RANK]; /* in elements */
} fv_tensor;

/* A scale is float32 [1] or [kv_heads], or of rank 0: a number that is read when
 * the call is made, from the host's memory on every device. Absent, it is 1. */

/* One pass of attention over a paged cache.
 *
 * Rows of one request are contiguous in q. Row j of a request with n_q rows and
 * seq_len n sees keys 0 .. n - n_q + j when causal, 0 .. n - 1 otherwise; a
 * window w > 0 keeps the last w of those. A row that sees nothing gives output
 * 0 and LSE -inf. Bytes at or beyond seq_len, and page-table entries past the
 * last used page, are never used.
 *
 * On CUDA the call enqueues its work on the stream and returns; lengths, offsets,
 * pages, sinks and scales are read on the device when it runs, so that a captured
 * call follows them. What is wrong with them there is told by cuda_faults: an
 * unusable length or offset makes the rows concerned NaN; a page that is not
 * there is not read, and the rows concerned hold no result. */
typedef struct fv_attention_params {
  uint32_t struct_size; /* sizeof(fv_attention_params) */
  int32_t route;        /* fv_route, named: routing is the caller's business */
  int32_t device_type;  /* fv_device_type of every tensor */
  int32_t device_index;
  void* stream; /* CUDA stream, NULL on the CPU */

  fv_tensor q;               /* [rows, q_heads, head_dim] float32, float16 or bfloat16 */
  fv_tensor k_cache;         /* [pages, page_size, kv_heads, head_dim], last stride 1 */
  fv_tensor v_cache;         /* as k_cache, same dtype and shape, strides of its own */
  fv_tensor page_table;      /* int32 [batch, max_pages] */
  fv_tensor seq_lens;        /* int32 [batch], keys visible to the last row */
  fv_tensor query_start_loc; /* int32 [batch + 1], optional: rows / batch each */
  fv_tensor sinks;           /* float32 [q_heads], optional */
  fv_tensor k_dequant_scale; /* a scale, optional */
  fv_tensor v_dequant_scale;
  fv_tensor out; /* [rows, q_heads, head_dim] float32, float16 or bfloat16 */
  fv_tensor lse; /* float32 [rows, q_heads], natural log, optional */

  float softmax_scale;
  float softcap;       /* c * tanh(x / c) on the scaled score; 0 = none */
  int32_t causal;      /* 0 or 1 */
  int32_t cpu_isa;     /* fv_cpu_isa */
  int64_t window;      /* keys a row sees, itself included; 0 = all */
  int32_t num_threads; /* CPU threads to use at most; >= 1 */
  int32_t splits;      /* CUDA: into how many parts positions are dealt, a power of two
                          up to 128; 0 = 128. Bits differ between two values. */

  void* workspace; /* 64-byte aligned, on the call's device */
  size_t workspace_bytes;

  /* CUDA: the device code to run, such as "compute_70"; NULL = the device's own. */
  const char* cuda_image;

  int32_t ran_route;     /* out: fv_route as the kernel that ran names itself */
  int32_t ran_isa;       /* out: fv_cpu_isa that ran, FV_CPU_ISA_AUTO off the CPU */
  const char* ran_image; /* out: the device code that ran, NULL on the CPU */
} fv_attention_params;

/* Writes key and value rows to cache slots; slot = page * page_size + offset,
 * a negative slot is skipped. Values are divided by the dequant scale, then
 * rounded to nearest even; FP8 saturates, and keeps NaN. A slot that appears
 * twice is an error, which only the CPU reports. On CUDA a slot that is not there
 * is skipped, and told by cuda_faults of the workspace NULL. */
typedef struct fv_append_params {
  uint32_t struct_size;
  int32_t device_type;
  int32_t device_index;
  int32_t num_threads;
  void* stream;
  fv_tensor key;     /* [tokens, kv_heads, head_dim] float32, float16 or bfloat16 */
  fv_tensor value;   /* as key, strides of its own */
  fv_tensor k_cache; /* as in fv_attention_params */
  fv_tensor v_cache;
  fv_tensor slot_mapping;    /* int64 or int32 [tokens] */
  fv_tensor k_dequant_scale; /* a scale, optional */
  fv_tensor v_dequant_scale;
  const char* cuda_image; /* as in fv_attention_params */
} fv_append_params;

/* Merges n partial results of the same rows over disjoint sets of keys, by the
 * fixed tree in ascending order of the first axis. */
typedef struct fv_merge_params {
  uint32_t struct_size;
  int32_t device_type;
  int32_t device_index;
  int32_t num_threads;
  void* stream;
  fv_tensor outs;         /* float32 [n, rows, heads, head_dim] */
  fv_tensor lses;         /* float32 [n, rows, heads], natural log, -inf = nothing seen */
  fv_tensor out;          /* float32 [rows, heads, head_dim] */
  fv_tensor out_lse;      /* float32 [rows, heads] */
  const char* cuda_image; /* as in fv_attention_params */
} fv_merge_params;

typedef struct fv_cuda_device {
  uint32_t struct_size;
  int32_t index;
  int32_t major; /* compute capability */
  int32_t minor;
  char name[256];
  const char* image; /* the device code that runs there; NULL: none does */
} fv_cuda_device;

/* Everything the library offers. The fields up to build_id never move. */
typedef struct fv_api {
  uint32_t struct_size;
  uint32_t abi_version;
  uint32_t precision_revision;
  uint32_t reserved;
  const char* build_id; /* digest of the sources and of the build's mode */

  /* The message of this thread's last failed call: names the argument, the
   * value found and what is accepted. Valid until the thread's next call. */
  const char* (*last_error)(void);
  const char* (*status_name)(int32_t status); /* "invalid_argument", ...; NULL if unknown */
  const char* (*route_name)(int32_t route);   /* "grouped_fp32", ...; NULL if unknown */
  const char* (*cpu_isa_name)(int32_t isa);   /* "avx512", ...; NULL if unknown */

  int32_t (*best_cpu_isa)(void);       /* what FV_CPU_ISA_AUTO stands for here */
  int32_t (*has_cpu_isa)(int32_t isa); /* 1 if this CPU has it */

  /* Bytes of workspace that a call of these shapes needs. Of the tensors' data
   * only seq_lens and query_start_loc are read, and these on the CPU alone; the
   * other pointers may be NULL.
   * For a capacity leave those two absent: every request then counts as
   * max_pages * page_size keys long, and the rows may be dealt to the requests
   * in any way. Beside seq_lens, page_table may be absent. */
  fv_status (*attention_workspace_bytes)(const fv_attention_params* params, size_t* bytes);
  /* On any status but FV_OK nothing was written to an output; but for
   * FV_ERROR_INTERNAL, after which outputs hold no result. */
  fv_status (*paged_attention)(fv_attention_params* params);
  fv_status (*append_kv)(const fv_append_params* params);
  fv_status (*merge_states)(const fv_merge_params* params);

  /* Calls completed per route since the library was loaded; counts has
   * FV_ROUTE_COUNT elements, indexed by fv_route. */
  void (*route_counts)(uint64_t* counts);

  /* The names of the device code in this library, ended by NULL. */
  const char* const* (*cuda_images)(void);
  /* Without a CUDA driver: FV_ERROR_DEVICE, and the reason. */
  fv_status (*cuda_device_count)(int32_t* count);
  fv_status (*cuda_device)(int32_t index, fv_cuda_device* device);
  /* What calls with this workspace found since the last time: bits of
   * fv_cuda_fault. Waits for the device's work. */
  fv_status (*cuda_faults)(int32_t device_index, const void* workspace, uint32_t* faults);
} fv_api;

#if defined(__GNUC__)
#define FV_EXPORT __attribute__((visibility("default")))
#else
#define FV_EXPORT
#endif

/* Never fails, and never returns NULL. */
FV_EXPORT const fv_api* fv_get_api(void);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* FLASHVERIFY_FLASHVERIFY_H_ */
