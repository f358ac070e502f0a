// From a work item's number to the rows and units that it covers. Everything is
// read from device memory, so that a captured launch follows the live lengths.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_WORK_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_WORK_CUH_

#include "native/cuda/device/ptx.cuh"

namespace flashverify::cuda {

struct Visible {
  int begin;
  int end;
};

// The keys that query token `token` of a request sees.
FV_DEVICE Visible visible_keys(const AttentionArgs& p, int seq_len, int query_len, int token) {
  Visible v;
  v.end = p.causal ? max_of(seq_len - query_len + token + 1, 0) : seq_len;
  v.begin = p.window > 0 ? max_of(v.end - p.window, 0) : 0;
  return v;
}

// Row index among query_len * group -> its query token.
FV_DEVICE int token_of(const AttentionArgs& p, int index) {
  return p.group_magic != 0 ? static_cast<int>(__umulhi(static_cast<uint32>(index), p.group_magic))
                            : index / p.group;
}

// A row tile: up to kTileRows of the query_len * group rows that share one KV
// head of one request.
struct RowTile {
  int request;
  int first_row;  // in q
  int query_len;
  int first;       // first row of the tile, among the request's query_len * group
  int count;       // rows of the tile, 0: nothing to do
  int seq_len;     // as the kernel may use it: within [0, capacity]
  bool bad;        // the length or the query start is unusable: NaN
  int unit_begin;  // units that some row sees
  int unit_end;
};

// A page of the table as it may be used: one that is not there is reported, and
// the first is read in its place.
FV_DEVICE int usable_page(const AttentionArgs& p, int page) {
  if (FV_UNLIKELY(static_cast<uint32>(page) >= static_cast<uint32>(p.pages))) {
    atomicOr(p.status, kStatusPageOutOfRange);
    return 0;
  }
  return page;
}

FV_DEVICE int query_start(const AttentionArgs& p, int request) {
  if (p.query_start_loc != nullptr) return p.query_start_loc[request];
  return request * p.query_len;
}

// Row tiles are numbered so that request b's start at floor(start_b * group /
// kTileRows) + b: at least as many as it needs, without a prefix sum. All lanes
// of the warp take part. Reads no length, so that what needs none can start.
template <int kTileRows>
FV_DEVICE RowTile locate_row_tile(const AttentionArgs& p, int tile, int lane) {
  RowTile t = {};
  int begin;
  int end;
  int first_tile;
  if (p.query_start_loc == nullptr) {
    const int tiles = (p.query_len * p.group + kTileRows - 1) / kTileRows;
    t.request = tiles <= 1 ? tile : tile / tiles;
    first_tile = t.request * tiles;
    begin = t.request * p.query_len;
    end = begin + p.query_len;
  } else {
    // The last request whose first tile is at or before this one.
    int low = 0;
    int high = p.batch;
    while (high - low > 1) {
      const int step = (high - low + 31) / 32;
      const int probe = low + lane * step;
      const bool before =
          probe < high &&
          static_cast<int>(static_cast<int64>(p.query_start_loc[probe]) * p.group / kTileRows) +
                  probe <=
              tile;
      const int hits = max_of(__popc(__ballot_sync(~0u, before)), 1);
      low += (hits - 1) * step;
      high = min_of(high, low + step);
    }
    t.request = low;
    begin = p.query_start_loc[low];
    end = p.query_start_loc[low + 1];
    first_tile = static_cast<int>(static_cast<int64>(begin) * p.group / kTileRows) + low;
    if (begin < 0 || end < begin || end > p.rows) {
      if (lane == 0) atomicOr(p.status, kStatusBadQueryStart);
      begin = end = 0;
    }
  }
  t.first_row = begin;
  t.query_len = end - begin;
  t.first = (tile - first_tile) * kTileRows;
  t.count = max_of(min_of(t.query_len * p.group - t.first, kTileRows), 0);
  return t;
}

// The rest of a row tile, from its request's length.
FV_DEVICE void resolve_row_tile(const AttentionArgs& p, RowTile& t, int seq_len, int lane) {
  if (FV_UNLIKELY(seq_len < 0 || seq_len > static_cast<int64>(p.max_pages) * p.page_size)) {
    if (lane == 0) {
      atomicOr(p.status, seq_len < 0 ? kStatusNegativeLength : kStatusLengthAboveCapacity);
    }
    t.bad = true;
    seq_len = 0;
  }
  t.seq_len = seq_len;
  const int last_token = token_of(p, t.first + max_of(t.count, 1) - 1);
  t.unit_begin = visible_keys(p, seq_len, t.query_len, token_of(p, t.first)).begin / kUnitTokens;
  const int end_key = min_of(visible_keys(p, seq_len, t.query_len, last_token).end, seq_len);
  t.unit_end = t.count > 0 ? (end_key + kUnitTokens - 1) / kUnitTokens : 0;
}

template <int kTileRows>
FV_DEVICE RowTile row_tile(const AttentionArgs& p, int tile, int lane) {
  RowTile t = locate_row_tile<kTileRows>(p, tile, lane);
  resolve_row_tile(p, t, p.seq_lens[t.request], lane);
  return t;
}

// A work item: `fold` neighbouring splits of one row tile and KV head. Later
// splits come first, since the live rows' last units lie there.
struct Item {
  int tile;
  int head;
  int part;  // which `fold` splits
  int first_split;
};
FV_DEVICE int item_count(const AttentionArgs& p) { return p.row_tiles * p.kv_heads * p.parts; }
FV_DEVICE int divide_by_heads(const AttentionArgs& p, int index) {
  return p.kv_heads == 1 ? index : index / p.kv_heads;
}
FV_DEVICE Item item_at(const AttentionArgs& p, int index) {
  const int tile_part = divide_by_heads(p, index);
  Item item;
  item.head = index - tile_part * p.kv_heads;
  item.part = p.parts - 1 - (tile_part & (p.parts - 1));
  item.first_split = item.part * p.fold;
  item.tile = tile_part >> p.parts_log2;
  return item;
}
// Where the partial of an item, or of a part of its row tile and head, is kept.
FV_DEVICE int64 part_index(const AttentionArgs& p, int tile, int head, int part) {
  return (static_cast<int64>(tile) * p.kv_heads + head) * p.parts + part;
}

// Units below `unit` that belong to the item.
FV_DEVICE int units_below(const AttentionArgs& p, int unit, const Item& item) {
  const int cycle = unit & ~(p.splits - 1);
  return (cycle >> p.splits_log2) * p.fold +
         min_of(max_of(unit - cycle - item.first_split, 0), p.fold);
}
FV_DEVICE int unit_count(const AttentionArgs& p, const Item& item, int begin, int end) {
  return units_below(p, end, item) - units_below(p, begin, item);
}

// Walks the units of an item split by split, in ascending order.
struct UnitWalk {
  int unit;
  int split;
  int unit_begin;
  int unit_end;

  FV_DEVICE void start(const AttentionArgs& p, const Item& item, int begin, int end) {
    unit_begin = begin;
    unit_end = end;
    split = item.first_split;
    enter_split(p.splits);
  }
  // Returns true where the next unit opens a new split.
  FV_DEVICE bool next(const AttentionArgs& p) {
    unit += p.splits;
    if (unit < unit_end) return false;
    ++split;
    enter_split(p.splits);
    return true;
  }

 private:
  // The first unit at or above unit_begin of this split, or of the next one
  // that has any. The callers count units and never walk past the last.
  FV_DEVICE void enter_split(int splits) {
    for (;; ++split) {
      unit = unit_begin + ((split - unit_begin) & (splits - 1));
      if (unit < unit_end) return;
    }
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_WORK_CUH_
