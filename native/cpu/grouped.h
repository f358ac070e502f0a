// grouped: all rows of a unit share one pass over the KV head's bytes.
//
// Where the rows fit one register block, elements are decoded in registers on
// their way into the multiply-adds (fused); else a tile of 64 keys is taken in
// chunks of 64 dimensions, half a chunk is decoded once into an 8 KiB strip, in
// L1, and every block of rows reads it there. Either way a score is one chain
// of multiply-adds over ascending dimensions, and an output element one over
// ascending keys: blocking cannot change a bit.
#ifndef FLASHVERIFY_NATIVE_CPU_GROUPED_H_
#define FLASHVERIFY_NATIVE_CPU_GROUPED_H_

#include "native/cpu/tile.h"

namespace flashverify::cpu {
namespace {

// Rows in a register block at most, and vectors beside them: the block fills the
// register file less what operands need.
constexpr int kMaxBlockRows = 8;
constexpr int fused_vecs(int rows) {
  if (kLanes == 16) return rows <= 6 ? 4 : 2;
  return rows <= 6 ? 2 : 1;
}

// Keys (for scores) or dimensions (for outputs) of a strip. With whole chunks,
// 16 KiB, the strip, queries and scores of 48 rows pass 32 KiB of L1; measured on
// Zen 4 that costs nothing, so that this is for narrower machines.
constexpr int kStrip = 32;
constexpr int strip_vecs(int rows) { return kLanes == 16 ? 2 : fused_vecs(rows); }

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// ---- Scores ----------------------------------------------------------------

// scores[r][key] = sum over dims of q[r][dim] * keys[key][dim], decoding on the
// way. Returns false, with scores untouched, where a code is not finite.
template <class Format, int kRows>
bool scores_fused(const TileKeys& tile, const TileKeys& next, int64_t head_dim, const float* q,
                  float* scores) {
  using D = Decoder<Format>;
  const int64_t row_bytes = head_dim * D::kBytes;
  SpecialWatch<Format> watch;
  Vec sums[kTile / kLanes][kRows];
  for (int block = 0; block < kTile / kLanes; ++block) {
    Vec acc[kRows] = {};
    for (int64_t at = 0; at < row_bytes; at += kVectorBytes) {
      UintVec units[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        prefetch(next.k[block * kLanes + i] + at);
        units[i] = load_units(tile.k[block * kLanes + i] + at, row_bytes - at);
        watch.see(units[i]);
      }
      transpose(units);
      const int64_t d = at / D::kBytes;
      const float* q_unit = q + d / kChunk * kRows * kChunk + d % kChunk;
      const int count = row_bytes - at < kVectorBytes ? int(row_bytes - at) / 4 : kLanes;
      for (int u = 0; u < count; ++u) {
        for (int e = 0; e < D::kPerUnit; ++e) {
          const Vec key = D::from_unit(units[u], e);
          for (int r = 0; r < kRows; ++r) {
            acc[r] = fma(splat(q_unit[r * kChunk + e]), key, acc[r]);
          }
        }
        q_unit += D::kPerUnit;
      }
    }
    for (int r = 0; r < kRows; ++r) sums[block][r] = acc[r];
  }
  if (watch.seen()) return false;
  for (int block = 0; block < kTile / kLanes; ++block) {
    for (int r = 0; r < kRows; ++r) store(scores + r * kTile + block * kLanes, sums[block][r]);
  }
  return true;
}

// Decodes kStrip of the tile's keys, from `first_key`, to keys[dim][key]. Returns
// false where a code is not finite.
template <class Format>
bool decode_keys(const TileKeys& tile, const TileKeys& next, int first_key, int64_t offset_bytes,
                 int dims, float* keys) {
  using D = Decoder<Format>;
  const int unit_count = dims / D::kPerUnit;
  SpecialWatch<Format> watch;
  for (int key = 0; key < kStrip; key += kLanes) {
    for (int first = 0; first < unit_count; first += kLanes) {
      const int count = unit_count - first < kLanes ? unit_count - first : kLanes;
      UintVec units[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t at = offset_bytes + 4 * first;
        prefetch(next.k[first_key + key + i] + at);
        units[i] = load_units(tile.k[first_key + key + i] + at, 4 * count);
        watch.see(units[i]);
      }
      transpose(units);
      float* out = keys + first * D::kPerUnit * kStrip + key;
      for (int u = 0; u < count; ++u) {
        for (int e = 0; e < D::kPerUnit; ++e) {
          store(out, D::from_unit(units[u], e));
          out += kStrip;
        }
      }
    }
  }
  return !watch.seen();
}

// The same for any code, NaNs and infinities as they are.
template <class Format>
void decode_keys_special(const TileKeys& tile, int first_key, int64_t offset_bytes, int dims,
                         float* keys) {
  for (int key = 0; key < kStrip; ++key) {
    for (int d = 0; d < dims; ++d) {
      keys[d * kStrip + key] = decode_one<Format>(tile.k[first_key + key] + offset_bytes, d);
    }
  }
}

// scores[r][key] += sum over dims of q[r][dim] * keys[dim][key], for one strip.
template <int kRows>
void scores_block(const float* keys, int dims, const float* q, float* scores) {
  constexpr int kVecs = strip_vecs(kRows);
  for (int first = 0; first < kStrip; first += kVecs * kLanes) {
    Vec acc[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kVecs; ++j) acc[r][j] = load(scores + r * kTile + first + j * kLanes);
    }
    for (int d = 0; d < dims; ++d) {
      Vec key[kVecs];
      for (int j = 0; j < kVecs; ++j) key[j] = load(keys + d * kStrip + first + j * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec factor = splat(q[r * kChunk + d]);
        for (int j = 0; j < kVecs; ++j) acc[r][j] = fma(factor, key[j], acc[r][j]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kVecs; ++j) store(scores + r * kTile + first + j * kLanes, acc[r][j]);
    }
  }
}

// ---- Outputs ---------------------------------------------------------------

// out[r][dim] = out[r][dim] * factor[r] + sum over keys of p[r][key] *
// values[key][dim], for kVecs vectors of dimensions. `value(key, j)` gives
// vector j of a key's values.
template <int kRows, int kVecs, class Value>
FV_INLINE void accumulate(const float* p, const float* factor, int keys, Value&& value,
                          float* out) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    const Vec f = splat(factor[r]);
    for (int j = 0; j < kVecs; ++j) acc[r][j] = load(out + r * kChunk + j * kLanes) * f;
  }
  for (int key = 0; key < keys; ++key) {
    Vec v[kVecs];
    for (int j = 0; j < kVecs; ++j) v[j] = value(key, j);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = splat(p[r * kTile + key]);
      for (int j = 0; j < kVecs; ++j) acc[r][j] = fma(weight, v[j], acc[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVecs; ++j) store(out + r * kChunk + j * kLanes, acc[r][j]);
  }
}

// Calls body(Int<vecs>{}, first dim) over `dims` dimensions, kVecs vectors at a
// time, then one.
template <int kVecs, class Body>
FV_INLINE void for_dim_blocks(int dims, Body&& body) {
  int d = 0;
  for (; d + kVecs * kLanes <= dims; d += kVecs * kLanes) body(Int<kVecs>{}, d);
  if constexpr (kVecs > 1) {
    for (; d < dims; d += kLanes) body(Int<1>{}, d);
  }
}

// True where every value of the chunk is finite. A pass of its own, which also
// brings the chunk to L1: watching while decoding, in 32-dimension strips, made
// 48 rows 9 % slower and six rows no faster.
template <class Format>
FV_INLINE bool values_are_finite(const TileKeys& tile, const TileKeys& next, int64_t offset_bytes,
                                 int dims) {
  const int row_bytes = dims * Decoder<Format>::kBytes;
  SpecialWatch<Format> watch;
  for (int first = 0; first < row_bytes; first += kVectorBytes) {
    for (int key = 0; key < tile.count; ++key) {
      prefetch(next.v[key] + offset_bytes + first);
      watch.see(load_units(tile.v[key] + offset_bytes + first, row_bytes - first));
    }
  }
  return !watch.seen();
}

template <class Format, int kRows>
void outputs_fused(const TileKeys& tile, int64_t offset_bytes, int dims, const float* p,
                   const float* factor, float* out) {
  using D = Decoder<Format>;
  for_dim_blocks<fused_vecs(kRows)>(dims, [&](auto vecs, int d) FV_LAMBDA_INLINE {
    const int64_t at = offset_bytes + d * D::kBytes;
    accumulate<kRows, decltype(vecs)::value>(
        p, factor, tile.count,
        [&](int key, int j)
            FV_LAMBDA_INLINE { return D::from_row(tile.v[key] + at + j * kLanes * D::kBytes); },
        out + d);
  });
}

// Decodes `dims` (at most kStrip) dimensions of the tile's values to
// values[key][dim].
template <class Format>
void decode_values(const TileKeys& tile, int64_t offset_bytes, int dims, float* values) {
  using D = Decoder<Format>;
  for (int key = 0; key < tile.count; ++key) {
    for (int d = 0; d < dims; d += kLanes) {
      store(values + key * kStrip + d, D::from_row(tile.v[key] + offset_bytes + d * D::kBytes));
    }
  }
}

// The same with zero in place of what is not finite: 0 * NaN would reach rows
// that do not see the key. add_special_values() then adds it to those that do.
template <class Format>
void decode_finite_values(const TileKeys& tile, int64_t offset_bytes, int dims, float* values) {
  for (int key = 0; key < tile.count; ++key) {
    for (int d = 0; d < dims; ++d) {
      const float value = decode_one<Format>(tile.v[key] + offset_bytes, d);
      values[key * kStrip + d] = isfinite(value) ? value : 0.0f;
    }
  }
}

template <int kRows>
void outputs_block(const float* values, int keys, int dims, const float* p, const float* factor,
                   float* out) {
  for_dim_blocks<strip_vecs(kRows)>(dims, [&](auto vecs, int d) FV_LAMBDA_INLINE {
    accumulate<kRows, decltype(vecs)::value>(
        p, factor, keys,
        [&](int key, int j)
            FV_LAMBDA_INLINE { return load(values + key * kStrip + d + j * kLanes); },
        out + d);
  });
}

template <class Format>
void add_special_values(const TileKeys& tile, int64_t offset_bytes, int dims, int64_t token,
                        const KeyRange* visible, int64_t rows, float* out) {
  for (int key = 0; key < tile.count; ++key) {
    for (int d = 0; d < dims; ++d) {
      const float value = decode_one<Format>(tile.v[key] + offset_bytes, d);
      if (isfinite(value)) continue;
      for (int64_t r = 0; r < rows; ++r) {
        if (token + key >= visible[r].begin && token + key < visible[r].end) {
          out[r * kChunk + d] += value;
        }
      }
    }
  }
}

// Calls body(Int<rows>{}, first row) for blocks of rows
// whose sizes differ by at most one.
template <class Body>
FV_INLINE void for_row_blocks(int64_t rows, Body&& body) {
  const int64_t blocks = ceil_div(rows, kMaxBlockRows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = rows * block / blocks;
    const int64_t end = rows * (block + 1) / blocks;
    switch (end - begin) {
      case 1:
        body(Int<1>{}, begin);
        break;
      case 2:
        body(Int<2>{}, begin);
        break;
      case 3:
        body(Int<3>{}, begin);
        break;
      case 4:
        body(Int<4>{}, begin);
        break;
      case 5:
        body(Int<5>{}, begin);
        break;
      case 6:
        body(Int<6>{}, begin);
        break;
      case 7:
        body(Int<7>{}, begin);
        break;
      default:
        body(Int<8>{}, begin);
        break;
    }
  }
}

template <class Format>
struct GroupedKernel {
  static void compute_scores(const TileKeys& tile, const TileKeys& next, int64_t head_dim,
                             const float* q, int64_t rows, float* scores, float* strip) {
    if (rows <= kMaxBlockRows) {
      bool finite = false;
      for_row_blocks(rows, [&](auto count, int64_t) {
        finite = scores_fused<Format, decltype(count)::value>(tile, next, head_dim, q, scores);
      });
      if (finite) return;
    }
    memset(scores, 0, static_cast<size_t>(rows) * kTile * sizeof(float));
    for (int64_t d = 0; d < head_dim; d += kChunk) {
      const int64_t at = d * Decoder<Format>::kBytes;
      const int dims = static_cast<int>(min64(kChunk, head_dim - d));
      for (int key = 0; key < kTile; key += kStrip) {
        if (!decode_keys<Format>(tile, next, key, at, dims, strip)) {
          decode_keys_special<Format>(tile, key, at, dims, strip);
        }
        for_row_blocks(rows, [&](auto count, int64_t r) {
          scores_block<decltype(count)::value>(strip, dims, q + d * rows + r * kChunk,
                                               scores + r * kTile + key);
        });
      }
    }
  }

  // Rescales one chunk of the outputs and adds the tile's values to it.
  static void add_outputs(const TileKeys& tile, const TileKeys& next, int64_t offset_bytes,
                          int dims, const float* p, const float* factor, int64_t token,
                          const KeyRange* visible, int64_t rows, float* out, float* strip) {
    const bool finite = values_are_finite<Format>(tile, next, offset_bytes, dims);
    if (finite && rows <= kMaxBlockRows) {
      for_row_blocks(rows, [&](auto count, int64_t) {
        outputs_fused<Format, decltype(count)::value>(tile, offset_bytes, dims, p, factor, out);
      });
      return;
    }
    for (int d = 0; d < dims; d += kStrip) {
      const int64_t at = offset_bytes + d * Decoder<Format>::kBytes;
      const int strip_dims = dims - d < kStrip ? dims - d : kStrip;
      if (finite) {
        decode_values<Format>(tile, at, strip_dims, strip);
      } else {
        decode_finite_values<Format>(tile, at, strip_dims, strip);
      }
      for_row_blocks(rows, [&](auto count, int64_t r) {
        outputs_block<decltype(count)::value>(strip, tile.count, strip_dims, p + r * kTile,
                                              factor + r, out + r * kChunk + d);
      });
    }
    if (!finite) {
      add_special_values<Format>(tile, offset_bytes, dims, token, visible, rows, out);
    }
  }

  // Reduces keys [keys.begin, keys.end) of one split to `state`.
  template <bool kHalf>
  static void reduce_split(const Call& call, const Unit& unit, const Scratch& scratch,
                           KeyRange keys, const State& state) {
    using D = Decoder<Format>;
    const AttentionProblem& problem = *call.problem;
    const int64_t rows = unit.rows;
    const ScoreMap map = ScoreMap::make(problem, unit.kv_head);
    const PageWalk pages(problem, unit.request, unit.kv_head, D::kBytes);

    begin_split(scratch, state, rows, problem.head_dim);
    TileKeys tiles[2];
    const int64_t first_token = keys.begin / kTile * kTile;
    pages.fill(tiles[0], first_token, keys);
    int current = 0;
    for (int64_t token = first_token; token < keys.end; token += kTile) {
      const TileKeys& tile = tiles[current];
      TileKeys& next = tiles[current ^ 1];
      pages.fill(next, token + kTile, keys);
      current ^= 1;

      compute_scores(tile, next, problem.head_dim, scratch.q, rows, scratch.scores, scratch.strip);
      for (int64_t r = 0; r < rows; ++r) {
        const KeyRange& seen = scratch.visible[r];
        scratch.tile_max[r] =
            map_scores(scratch.scores + r * kTile, map, seen.begin - token, seen.end - token);
      }
      raise_maxima(scratch.running_max, scratch.tile_max, scratch.factor, rows);
      for (int64_t r = 0; r < rows; ++r) {
        float* sums = scratch.lane_sums + r * kLanes;
        store(sums, exponentiate<kHalf>(scratch.scores + r * kTile, scratch.running_max[r],
                                        scratch.factor[r], load(sums)));
      }
      for (int64_t d = 0; d < problem.head_dim; d += kChunk) {
        const int dims = static_cast<int>(min64(kChunk, problem.head_dim - d));
        add_outputs(tile, next, d * D::kBytes, dims, scratch.scores, scratch.factor, token,
                    scratch.visible, rows, state.chunk(d / kChunk, rows), scratch.strip);
      }
    }
    end_split(scratch, state, rows);
  }
};

}  // namespace
}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_GROUPED_H_
