// Kernel arguments, one definition for host and device. Compiled by the host's
// compiler and by NVRTC, which has no standard headers: hence the own integer
// names. Strides are in bytes unless named otherwise.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_ARGS_H_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_ARGS_H_

namespace flashverify::cuda {

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;

#if !defined(__CUDACC__)
struct float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
#endif

// The schedules `n<k>`, k a power of two up to kMaxSplits. The cache is cut into
// units of kUnitTokens positions and unit u belongs to split u % k: a function of
// position only, that keeps every split equally long at every length. kChain
// neighbouring splits are folded left to right into a group, the groups left to
// right into the row's state. Whoever computes a fold, its operands and its order
// are these.
constexpr int kUnitTokens = 128;
constexpr int kMaxSplits = 128;
constexpr int kChain = 8;
constexpr int kMaxGroups = kMaxSplits / kChain;

// Element types as the kernels number them (those of fv_dtype).
enum ElementType : int { kFloat32 = 1, kFloat16 = 2, kBfloat16 = 3 };

// Bits of the status word, which stays set until the host clears it.
enum StatusBit : uint32 {
  kStatusLengthAboveCapacity = 1,  // seq_lens[b] > max_pages * page_size
  kStatusNegativeLength = 2,       // seq_lens[b] < 0
  kStatusBadQueryStart = 4,        // query_start_loc not ascending within [0, rows]
  kStatusPageOutOfRange = 8,       // page_table names a page that is not there
  kStatusSlotOutOfRange = 16,      // slot_mapping names a slot that is not there
};

struct Cache {
  const unsigned char* data;
  int64 page_stride;
  int64 token_stride;
  int64 head_stride;
};

// How one launch divides the splits: a work item is `fold` splits of one row
// tile and KV head. 1: every split is stored; kChain: every group; `splits`: none,
// the item writes the output itself.
struct AttentionArgs {
  const unsigned char* q;
  int64 q_row_stride;
  int64 q_head_stride;
  Cache k;
  Cache v;
  const int* page_table;
  int64 page_table_row_stride;  // entries
  const int* seq_lens;
  const int* query_start_loc;  // null: rows / batch each
  const float* k_scale;        // null: k_scale_number
  const float* v_scale;
  int64 k_scale_stride;  // elements
  int64 v_scale_stride;
  const float* sinks;
  unsigned char* out;
  int64 out_row_stride;
  int64 out_head_stride;
  float* lse;
  int64 lse_row_stride;  // elements
  int64 lse_head_stride;

  unsigned char* partials;  // [row tile][kv head][split or group] accumulators
  float2* partial_stats;    // [row tile][kv head][split or group][row] (max, sum)
  uint32* barrier;          // two counters, zero between launches
  uint32* status;

  int rows;
  int batch;
  int group;
  uint32 group_magic;  // ceil(2^32 / group), 0: rows too many for it
  int kv_heads;
  int head_dim;
  int pages;  // of the caches
  int page_size;
  int max_pages;
  int q_type;
  int out_type;
  int causal;
  int window;     // 0: none
  int query_len;  // of every request, where query_start_loc is null
  int splits;     // of the schedule
  int fold;
  int parts;  // splits / fold; logarithms spare the kernels' first instructions divisions
  int splits_log2;
  int parts_log2;
  int row_tiles;       // over all requests, an upper bound when query_start_loc is given
  int bulk_copy;       // the cache can be read by the bulk copy engine
  int vector_copy;     // the cache can be read 16 bytes at a time
  int granule_tokens;  // tokens that lie together in a page: 8, 16 (bulk copy)
  float score_scale;   // softmax_scale * log2(e), without the cache's scale
  float softcap;       // 0: none
  float k_scale_number;
  float v_scale_number;
};

// Key and value rows on their way into the cache.
struct AppendArgs {
  const unsigned char* source[2];  // key, value
  int64 token_stride[2];
  int64 head_stride[2];
  Cache cache[2];
  const float* scale[2];  // null: scale_number
  int64 scale_stride[2];  // elements
  const void* slots;
  int64 slot_stride;  // elements
  int slots_are_int64;
  int64 tokens;
  int kv_heads;
  int head_dim;
  int page_size;
  int source_type;
  float scale_number[2];
  int64 slot_count;  // pages * page_size
  uint32* status;
};

// Partial results of the same rows over disjoint keys. Strides in elements.
struct MergeArgs {
  const float* outs;
  int64 outs_stride[3];  // state, row, head
  const float* lses;
  int64 lses_stride[3];
  float* out;
  int64 out_stride[2];
  float* out_lse;
  int64 out_lse_stride[2];
  int64 states;
  int64 rows;
  int heads;
  int head_dim;
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_ARGS_H_
