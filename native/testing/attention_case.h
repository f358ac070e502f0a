// A complete attention call on random data, in any layout: what the tests of
// the library hand to it and to the oracle.
#ifndef FLASHVERIFY_NATIVE_TESTING_ATTENTION_CASE_H_
#define FLASHVERIFY_NATIVE_TESTING_ATTENTION_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/testing/arena.h"
#include "native/testing/random.h"

namespace flashverify::testing {

// How a [pages, page_size, kv_heads, head_dim] cache lies in memory.
enum class CacheLayout {
  kNhd,       // as its shape says
  kHnd,       // [pages, kv_heads, page_size, head_dim]
  kPairNhd,   // K and V of one [pages, 2, page_size, kv_heads, head_dim] array
  kPairHnd,   // K and V of one [pages, 2, kv_heads, page_size, head_dim] array
  kPacked,    // K and V of one [pages, page_size, kv_heads, 2 * head_dim] array
  kPadded,    // kNhd with a gap after every row
  kPageInner  // [page_size, pages, kv_heads, head_dim]
};
constexpr int kCacheLayouts = 7;
const char* layout_name(CacheLayout layout);

struct AttentionOptions {
  int32_t route = FV_ROUTE_SCALAR_FP32;
  std::vector<int32_t> query_lens = {8};
  std::vector<int32_t> seq_lens = {100};
  int64_t q_heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 64;
  int64_t page_size = 16;
  int32_t q_dtype = FV_DTYPE_FLOAT16;
  int32_t kv_dtype = FV_DTYPE_FLOAT8_E4M3;
  int32_t out_dtype = FV_DTYPE_FLOAT16;
  CacheLayout layout = CacheLayout::kNhd;
  bool q_transposed = false;  // heads outermost, for q and out
  bool equal_blocks = false;  // leave query_start_loc out
  bool causal = true;
  int64_t window = 0;
  float softcap = 0;
  bool sinks = false;
  int scales = 0;  // elements of each dequant scale: 0, 1 or 2 for one a head
  bool lse = true;
  int32_t num_threads = 1;
  int32_t cpu_isa = FV_CPU_ISA_AUTO;

  std::string describe() const;
};

// Options within the limits of their route, sizes of at most a few thousand keys.
AttentionOptions random_options(Random& random);

// Owns the memory of one call. Everything that the call must not use is poison:
// bytes past a length, unused pages, table entries past the last page.
class AttentionCase {
 public:
  AttentionCase(const AttentionOptions& options, Random& random);

  fv_attention_params params;
  Arena arena;

  // Gives the call the workspace that the library asks for, and not a byte more.
  void plan(const fv_api& api);
};

// Makes K and V caches of a layout. Poison throughout.
void make_caches(Arena& arena, CacheLayout layout, int32_t dtype, int64_t pages, int64_t page_size,
                 int64_t kv_heads, int64_t head_dim, fv_tensor* k_cache, fv_tensor* v_cache);

}  // namespace flashverify::testing

#endif  // FLASHVERIFY_NATIVE_TESTING_ATTENTION_CASE_H_
