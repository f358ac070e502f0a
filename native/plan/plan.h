// The work list of one attention call on the CPU, and its workspace.
//
// A unit is a tile of rows of one request and one KV head; all of its rows
// share one pass over the head's bytes. A unit's splits are divided into items,
// each an aligned node of the merge tree (or the whole unit), that one thread
// reduces to one partial state. Which items there are depends on the number of
// threads; the bits do not, since the tree is fixed.
#ifndef FLASHVERIFY_NATIVE_PLAN_PLAN_H_
#define FLASHVERIFY_NATIVE_PLAN_PLAN_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "native/plan/problem.h"
#include "native/plan/schedule.h"

namespace flashverify {

// More rows than this are cut into several passes. 256 rows do 512 operations a
// byte of cache, 30 times what covers the bytes' cost; the state still fits L2.
constexpr int64_t kMaxUnitRows = 256;

// Elements of the head dimension that are decoded and multiplied at a time: a
// 64 x 64 FP32 block is 16 KiB, half of the smallest L1 in use.
constexpr int64_t kChunkDims = 64;

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// Keys that row `token` (0 .. query_len) of a request sees.
inline KeyRange visible_keys(const AttentionProblem& problem, int64_t seq_len, int64_t query_len,
                             int64_t token) {
  KeyRange range;
  range.end = problem.causal ? seq_len - query_len + token + 1 : seq_len;
  if (range.end < 0) range.end = 0;
  if (problem.window > 0 && range.end > problem.window) range.begin = range.end - problem.window;
  return range;
}

struct Unit {
  int64_t request;
  int64_t kv_head;
  int64_t row_begin;  // of the request's query_len * group rows
  int64_t rows;
  int64_t split_begin;  // splits that some row sees
  int64_t split_end;
  int64_t first_item;     // over all units
  int64_t first_partial;  // in rows of partial state; used where items() > 1
  int level;              // each item covers an aligned 1 << level splits
  std::atomic<int64_t> unfinished;

  int64_t items() const {
    if (split_begin == split_end) return 1;
    return ((split_end - 1) >> level) - (split_begin >> level) + 1;
  }
};

// How partial states are kept: the FP32 routes' un-normalised FP32 output, one
// per item; or the half routes' normalised FP16 output, one per split.
enum class PartialKind { kFp32PerItem, kHalfPerSplit };
PartialKind partial_kind(fv_route route);

// Elements of one row of output, padded to whole chunks.
constexpr int64_t padded_dims(int64_t head_dim) { return round_up(head_dim, kChunkDims); }

// One row of one partial: max, sum and output.
constexpr size_t partial_row_bytes(PartialKind kind, int64_t head_dim) {
  return 2 * sizeof(float) +
         static_cast<size_t>(padded_dims(head_dim)) * (kind == PartialKind::kFp32PerItem ? 4 : 2);
}

// Sizes that depend on the shapes alone, and never grow when batch, rows or
// lengths shrink: a workspace planned for a capacity serves every call within.
struct WorkspaceLayout {
  int64_t max_units = 0;
  int64_t max_unit_rows = 0;
  int64_t max_partial_rows = 0;
  int64_t max_tree_depth = 0;

  size_t units_offset = 0;
  size_t partials_offset = 0;
  size_t scratch_offset = 0;
  size_t scratch_bytes_per_thread = 0;
  size_t total_bytes = 0;
};

// `scratch_bytes` tells what one thread needs for units of at most so many rows
// and a tree walk of so many states.
using ScratchBytes = size_t (*)(int64_t unit_rows, int64_t head_dim, int64_t tree_depth);

// Reads seq_lens (or counts max_pages * page_size where it is null) and
// query_start_loc; nothing else behind a pointer.
WorkspaceLayout plan_workspace(const AttentionProblem& problem, int num_threads,
                               ScratchBytes scratch_bytes);

struct Plan {
  Unit* units = nullptr;
  int64_t num_units = 0;
  int64_t num_items = 0;

  // The unit that item `index` belongs to.
  Unit& unit_of(int64_t item) const;
};

// Builds the work list in `units`, room for WorkspaceLayout::max_units.
Plan make_plan(const AttentionProblem& problem, int num_threads, void* units);

}  // namespace flashverify

#endif  // FLASHVERIFY_NATIVE_PLAN_PLAN_H_
