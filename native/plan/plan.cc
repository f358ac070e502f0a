#include "native/plan/plan.h"

#include <algorithm>
#include <new>

namespace flashverify {
namespace {

// Items per thread that a call is cut into: with 16, one slow item costs the
// last thread at most a sixteenth of its time.
constexpr int64_t kItemsPerThread = 16;

constexpr size_t kCacheLineBytes = 64;

size_t align(size_t bytes) { return (bytes + kCacheLineBytes - 1) & ~(kCacheLineBytes - 1); }

int64_t max_seq_len(const AttentionProblem& problem) {
  if (problem.seq_lens == nullptr) return problem.max_pages * problem.page_size;
  int64_t longest = 0;
  for (int64_t i = 0; i < problem.batch; ++i) {
    longest = std::max<int64_t>(longest, problem.seq_lens[i]);
  }
  return longest;
}

}  // namespace

PartialKind partial_kind(fv_route route) {
  switch (route) {
    case FV_ROUTE_GROUPED_HALF:
    case FV_ROUTE_SCALAR_HALF:
    case FV_ROUTE_XQA_HALF:
      return PartialKind::kHalfPerSplit;
    default:
      return PartialKind::kFp32PerItem;
  }
}

WorkspaceLayout plan_workspace(const AttentionProblem& problem, int num_threads,
                               ScratchBytes scratch_bytes) {
  const int64_t all_rows = problem.rows * problem.group();  // of one KV head
  const int64_t splits = ceil_div(max_seq_len(problem), kSplitTokens);

  WorkspaceLayout layout;
  layout.max_units = problem.kv_heads * (problem.batch + all_rows / kMaxUnitRows);
  layout.max_unit_rows = std::min(all_rows, kMaxUnitRows);
  layout.max_tree_depth = log2_ceil(splits) + 2;

  // A call is cut into items of at least 1 / target of its splits, so that the
  // units of several items hold at most target + 2 items each, and there are at
  // most target such units: 3 target in all, however the lengths are mixed.
  const int64_t every_split = problem.rows * problem.q_heads * (splits + 1);
  const PartialKind kind = partial_kind(problem.route);
  const int64_t target = kItemsPerThread * num_threads;
  layout.max_partial_rows = kind == PartialKind::kHalfPerSplit
                                ? every_split
                                : std::min(every_split, 3 * target * layout.max_unit_rows);

  layout.units_offset = 0;
  layout.partials_offset = align(static_cast<size_t>(layout.max_units) * sizeof(Unit));
  layout.scratch_offset =
      align(layout.partials_offset + static_cast<size_t>(layout.max_partial_rows) *
                                         partial_row_bytes(kind, problem.head_dim));
  layout.scratch_bytes_per_thread =
      align(scratch_bytes(layout.max_unit_rows, problem.head_dim, layout.max_tree_depth));
  layout.total_bytes =
      layout.scratch_offset + static_cast<size_t>(num_threads) * layout.scratch_bytes_per_thread;
  return layout;
}

Plan make_plan(const AttentionProblem& problem, int num_threads, void* units) {
  Plan plan;
  plan.units = static_cast<Unit*>(units);
  const int64_t group = problem.group();
  int64_t all_splits = 0;

  for (int64_t request = 0; request < problem.batch; ++request) {
    const int64_t query_len = problem.query_len(request);
    const int64_t rows = query_len * group;
    const int64_t seq_len = problem.seq_lens[request];
    // Equal tiles: 300 rows are 150 + 150, not 256 + 44.
    const int64_t tiles = ceil_div(rows, kMaxUnitRows);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row_begin = rows * tile / tiles;
      const int64_t row_end = rows * (tile + 1) / tiles;
      // Both ends of a row's range rise with the row.
      const int64_t key_begin = visible_keys(problem, seq_len, query_len, row_begin / group).begin;
      const int64_t key_end = visible_keys(problem, seq_len, query_len, (row_end - 1) / group).end;
      for (int64_t head = 0; head < problem.kv_heads; ++head) {
        Unit* unit = new (plan.units + plan.num_units++) Unit{};
        unit->request = request;
        unit->kv_head = head;
        unit->row_begin = row_begin;
        unit->rows = row_end - row_begin;
        unit->split_begin = key_begin / kSplitTokens;
        unit->split_end = key_end > key_begin ? ceil_div(key_end, kSplitTokens) : unit->split_begin;
        all_splits += unit->split_end - unit->split_begin;
      }
    }
  }

  const int64_t target = kItemsPerThread * num_threads;
  const int level = log2_ceil(std::max<int64_t>(1, ceil_div(all_splits, target)));
  const bool half = partial_kind(problem.route) == PartialKind::kHalfPerSplit;
  int64_t partial_rows = 0;
  for (int64_t i = 0; i < plan.num_units; ++i) {
    Unit& unit = plan.units[i];
    const int64_t splits = unit.split_end - unit.split_begin;
    // A short unit is one item, whatever its alignment.
    const bool whole = num_threads == 1 || splits <= (int64_t{1} << level);
    unit.level = whole ? 62 : level;
    unit.first_item = plan.num_items;
    unit.first_partial = partial_rows;
    unit.unfinished.store(unit.items(), std::memory_order_relaxed);
    plan.num_items += unit.items();
    if (half) {
      partial_rows += unit.rows * splits;
    } else if (unit.items() > 1) {
      partial_rows += unit.rows * unit.items();
    }
  }
  return plan;
}

Unit& Plan::unit_of(int64_t item) const {
  const Unit* after =
      std::upper_bound(units, units + num_units, item,
                       [](int64_t value, const Unit& unit) { return value < unit.first_item; });
  return const_cast<Unit&>(*(after - 1));
}

}  // namespace flashverify
