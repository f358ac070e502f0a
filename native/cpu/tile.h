// What the grouped and the scalar kernel share: where a tile's keys lie, a unit's
// rows, and the softmax of a row over a tile.
#ifndef FLASHVERIFY_NATIVE_CPU_TILE_H_
#define FLASHVERIFY_NATIVE_CPU_TILE_H_

#include <math.h>

#include "native/cpu/decode.h"
#include "native/cpu/kernels.h"

namespace flashverify::cpu {
namespace {

constexpr int kTile = static_cast<int>(kTileTokens);
constexpr int kChunk = static_cast<int>(kChunkDims);
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

// What a key reads as that no row sees: scores and products of zero.
alignas(64) constexpr char kZeroRow[512 * 2] = {};

// The cache rows of one tile, for one KV head.
struct TileKeys {
  int count = 0;  // keys that exist: the last ones of the tile may not
  const char* k[kTile];
  const char* v[kTile];
};

// Walks the page table in ascending token order.
class PageWalk {
 public:
  PageWalk(const AttentionProblem& problem, int64_t request, int64_t kv_head, int64_t element_bytes)
      : problem_(problem),
        pages_(problem.page_table + request * problem.page_table_row_stride),
        k_(static_cast<const char*>(problem.k.data) +
           kv_head * problem.k.head_stride * element_bytes),
        v_(static_cast<const char*>(problem.v.data) +
           kv_head * problem.v.head_stride * element_bytes),
        element_bytes_(element_bytes) {}

  // The tile that begins at `token`; only keys [range.begin, range.end) are
  // looked up, since pages that no row sees may be gone.
  FV_INLINE void fill(TileKeys& tile, int64_t token, KeyRange range) const {
    const int64_t last = token + kTile < range.end ? token + kTile : range.end;
    tile.count = last > token ? static_cast<int>(last - token) : 0;
    int i = 0;
    for (; token + i < range.begin && i < kTile; ++i) tile.k[i] = tile.v[i] = kZeroRow;
    while (i < tile.count) {
      const int64_t page = (token + i) / problem_.page_size;
      const int64_t offset = (token + i) - page * problem_.page_size;
      const int64_t id = pages_[page];
      const char* k =
          k_ + (id * problem_.k.page_stride + offset * problem_.k.token_stride) * element_bytes_;
      const char* v =
          v_ + (id * problem_.v.page_stride + offset * problem_.v.token_stride) * element_bytes_;
      const int64_t in_page = problem_.page_size - offset;
      const int end = in_page < tile.count - i ? i + static_cast<int>(in_page) : tile.count;
      for (; i < end; ++i) {
        tile.k[i] = k;
        tile.v[i] = v;
        k += problem_.k.token_stride * element_bytes_;
        v += problem_.v.token_stride * element_bytes_;
      }
    }
    for (; i < kTile; ++i) tile.k[i] = tile.v[i] = kZeroRow;
  }

 private:
  const AttentionProblem& problem_;
  const int32_t* pages_;
  const char* k_;
  const char* v_;
  int64_t element_bytes_;
};

// FP32 state of a unit's rows. Outputs lie chunk by chunk: chunk c of row r is
// the kChunk floats at out + (c * rows + r) * kChunk.
struct State {
  float* out;
  float* max;  // log2 units; -inf: nothing seen
  float* sum;

  FV_INLINE float* chunk(int64_t c, int64_t rows) const { return out + c * rows * kChunk; }
};

// How a score becomes an exponent of 2.
struct ScoreMap {
  float scale;       // softmax_scale * k_scale, times log2(e) without a softcap
  float cap;         // 0: no softcap
  float cap_log2_e;  // cap * log2(e)

  static ScoreMap make(const AttentionProblem& problem, int64_t kv_head) {
    const double scale = static_cast<double>(problem.softmax_scale) *
                         static_cast<double>(problem.k_scale.at(kv_head));
    ScoreMap map{};
    if (problem.softcap > 0) {
      map.scale = static_cast<float>(scale);
      map.cap = problem.softcap;
      map.cap_log2_e = static_cast<float>(static_cast<double>(problem.softcap) * kLog2E);
    } else {
      map.scale = static_cast<float>(scale * kLog2E);
    }
    return map;
  }

  FV_INLINE Vec operator()(Vec score) const {
    const Vec scaled = score * splat(scale);
    if (cap == 0.0f) return scaled;
    // A quotient: the inverse of a subnormal cap would be infinite.
    return tanh(scaled / splat(cap)) * splat(cap_log2_e);
  }
};

// Maps a row's kTile scores in place, masks keys outside `visible` (offsets in
// the tile), and returns the largest; a NaN score does not count.
FV_INLINE float map_scores(float* scores, const ScoreMap& map, int64_t visible_begin,
                           int64_t visible_end) {
  const bool masked = visible_begin > 0 || visible_end < kTile;
  const Vec minus_infinity = splat(-INFINITY);
  IntVec lane{};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  // Beyond the tile either way, so that 32 bits hold them.
  const int begin = visible_begin < 0 ? 0 : visible_begin > kTile ? kTile : int(visible_begin);
  const int end = visible_end < 0 ? 0 : visible_end > kTile ? kTile : int(visible_end);

  Vec largest = minus_infinity;
  for (int i = 0; i < kTile; i += kLanes) {
    Vec x = map(load(scores + i));
    if (masked) {
      const IntVec key = lane + splat_int(i);
      const IntVec seen = (key >= splat_int(begin)) & (key < splat_int(end));
      x = select(seen, x, minus_infinity);
    }
    store(scores + i, x);
    largest = max(x, largest);
  }
  return max_of_lanes(largest);
}

// Takes the tile's largest scores into the running maxima of `rows` rows (in
// place), and gives the factor 2^(old - new) for each row's older state. A row
// that has seen nothing keeps -inf; its factor does not matter, its state is 0.
FV_INLINE void raise_maxima(float* running, const float* tile, float* factor, int64_t rows) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    const Vec old = load(running + r);
    const Vec fresh = max(load(tile + r), old);
    store(running + r, fresh);
    const Vec base = select(fresh == splat(-INFINITY), Vec{}, fresh);
    store(factor + r, exp2(old - base));
  }
}

// Turns a row's mapped scores into probabilities relative to `running_max`, in
// place, and returns the row's running lane sums with them added. kHalf rounds
// what is stored, not what is summed.
template <bool kHalf>
FV_INLINE Vec exponentiate(float* scores, float running_max, float factor, Vec lane_sums) {
  const Vec base = splat(running_max == -INFINITY ? 0.0f : running_max);
  Vec sum{};
  for (int i = 0; i < kTile; i += kLanes) {
    const Vec p = exp2(load(scores + i) - base);
    sum += p;
    store(scores + i, kHalf ? through_half(p) : p);
  }
  return lane_sums * splat(factor) + sum;
}

FV_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
FV_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Tells one thread's scratch memory apart. Rows are padded to 16, the widest
// vector, so that loops over rows may run past the last one.
struct Scratch {
  float* q = nullptr;            // [chunk][row][kChunk]
  float* scores = nullptr;       // [row][kTile]
  float* strip = nullptr;        // 8 KiB of decoded elements
  float* running_max = nullptr;  // [row]
  float* tile_max = nullptr;     // [row]
  float* factor = nullptr;       // [row]
  float* lane_sums = nullptr;    // [row][kLanes]
  KeyRange* visible = nullptr;   // [row]
  char* states = nullptr;
  size_t state_bytes = 0;
  int64_t padded_rows = 0;

  State state(int64_t depth) const {
    float* base = reinterpret_cast<float*>(states + static_cast<size_t>(depth) * state_bytes);
    return {base + 2 * padded_rows, base, base + padded_rows};
  }
};

// Sets `scratch` up in `memory`, or only counts the bytes where that is null.
inline size_t lay_out_scratch(char* memory, int64_t unit_rows, int64_t head_dim, int64_t tree_depth,
                              Scratch* scratch) {
  const int64_t rows = round_up(unit_rows, 16);
  const int64_t dims = padded_dims(head_dim);
  size_t used = 0;
  const auto take = [&](int64_t elements, size_t element_bytes) {
    char* at = memory == nullptr ? nullptr : memory + used;
    used += (static_cast<size_t>(elements) * element_bytes + 63) & ~size_t{63};
    return at;
  };
  const auto floats = [&](int64_t count) {
    return reinterpret_cast<float*>(take(count, sizeof(float)));
  };
  scratch->padded_rows = rows;
  scratch->q = floats(rows * dims);
  scratch->scores = floats(rows * kTile);
  scratch->strip = floats(kChunk * kTile / 2);
  scratch->running_max = floats(rows);
  scratch->tile_max = floats(rows);
  scratch->factor = floats(rows);
  scratch->lane_sums = floats(rows * 16);
  scratch->visible = reinterpret_cast<KeyRange*>(take(rows, sizeof(KeyRange)));
  scratch->state_bytes = static_cast<size_t>(rows * (dims + 2)) * sizeof(float);
  scratch->states = take(tree_depth, scratch->state_bytes);
  return used;
}

FV_INLINE void begin_split(const Scratch& scratch, const State& state, int64_t rows,
                           int64_t head_dim) {
  const int64_t padded = round_up(rows, 16);
  for (int64_t r = 0; r < padded; ++r) scratch.running_max[r] = scratch.tile_max[r] = -INFINITY;
  memset(scratch.lane_sums, 0, static_cast<size_t>(rows) * kLanes * sizeof(float));
  memset(state.out, 0, static_cast<size_t>(rows * padded_dims(head_dim)) * sizeof(float));
}

FV_INLINE void end_split(const Scratch& scratch, const State& state, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    state.max[r] = scratch.running_max[r];
    state.sum[r] = sum_of_lanes(load(scratch.lane_sums + r * kLanes));
  }
}

}  // namespace
}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_TILE_H_
