// scalar: one row at a time, any head dimension, only the keys that the row
// sees. The fallback for shapes that grouped does not take, and a cross-check
// of it: lanes are dimensions, so that scores are summed in another order.
#ifndef FLASHVERIFY_NATIVE_CPU_SCALAR_H_
#define FLASHVERIFY_NATIVE_CPU_SCALAR_H_

#include "native/cpu/tile.h"

namespace flashverify::cpu {
namespace {

template <class Format>
struct ScalarKernel {
  using D = Decoder<Format>;

  // Calls each(dim, kLanes elements from `dim` on); past `dims`, zeros.
  template <class Each>
  FV_INLINE static void for_elements(const char* row, int64_t dims, Each&& each) {
    SpecialWatch<Format> watch;
    int64_t d = 0;
    for (; (d + kLanes * D::kPerUnit) <= dims; d += kLanes * D::kPerUnit) {
      watch.see(load_as<UintVec>(row + d * D::kBytes));
    }
    char tail[kVectorBytes] = {};
    if (d < dims) {
      memcpy(tail, row + d * D::kBytes, static_cast<size_t>((dims - d) * D::kBytes));
      watch.see(load_as<UintVec>(tail));
    }
    const bool finite = !watch.seen();
    for (d = 0; d < dims; d += kLanes) {
      if (finite && d + kLanes <= dims) {
        each(d, D::from_row(row + d * D::kBytes));
        continue;
      }
      float lanes[kLanes] = {};
      for (int i = 0; i < kLanes && d + i < dims; ++i) lanes[i] = decode_one<Format>(row, d + i);
      each(d, load(lanes));
    }
  }

  FV_INLINE static float dot(const float* q, const char* key, int64_t rows, int64_t dims) {
    Vec sum{};
    for_elements(key, dims, [&](int64_t d, Vec k) FV_LAMBDA_INLINE {
      sum = fma(load(q + d / kChunk * rows * kChunk + d % kChunk), k, sum);
    });
    return sum_of_lanes(sum);
  }

  // out += p * value, where what is not finite counts even at a weight that
  // underflowed to 0.
  FV_INLINE static void add_value(float p, const char* value, int64_t rows, int64_t dims,
                                  float* out) {
    for_elements(value, dims, [&](int64_t d, Vec v) FV_LAMBDA_INLINE {
      float* at = out + d / kChunk * rows * kChunk + d % kChunk;
      const IntVec finite = (v - v) == Vec{};
      store(at, fma(select(finite, splat(p), splat(1.0f)), v, load(at)));
    });
  }

  template <bool kHalf>
  static void reduce_split(const Call& call, const Unit& unit, const Scratch& scratch,
                           KeyRange keys, const State& state) {
    const AttentionProblem& problem = *call.problem;
    const int64_t rows = unit.rows;
    const int64_t dims = problem.head_dim;
    const ScoreMap map = ScoreMap::make(problem, unit.kv_head);
    const PageWalk pages(problem, unit.request, unit.kv_head, D::kBytes);

    begin_split(scratch, state, rows, dims);
    TileKeys tile;
    for (int64_t token = keys.begin / kTile * kTile; token < keys.end; token += kTile) {
      pages.fill(tile, token, keys);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t begin = max64(scratch.visible[r].begin - token, 0);
        const int64_t end = min64(scratch.visible[r].end - token, tile.count);
        float* scores = scratch.scores;  // of this row alone
        memset(scores, 0, kTile * sizeof(float));
        for (int64_t i = begin; i < end; ++i) {
          scores[i] = dot(scratch.q + r * kChunk, tile.k[i], rows, dims);
        }
        float largest[kLanes], running[kLanes], factor[kLanes];
        store(largest, splat(map_scores(scores, map, begin, end)));
        store(running, splat(scratch.running_max[r]));
        raise_maxima(running, largest, factor, 1);
        scratch.running_max[r] = running[0];
        float* sums = scratch.lane_sums + r * kLanes;
        store(sums, exponentiate<kHalf>(scores, running[0], factor[0], load(sums)));

        for (int64_t c = 0; c < padded_dims(dims) / kChunk; ++c) {
          float* out = state.chunk(c, rows) + r * kChunk;
          for (int d = 0; d < kChunk; d += kLanes) {
            store(out + d, load(out + d) * splat(factor[0]));
          }
        }
        for (int64_t i = begin; i < end; ++i) {
          add_value(scores[i], tile.v[i], rows, dims, state.out + r * kChunk);
        }
      }
    }
    end_split(scratch, state, rows);
  }
};

}  // namespace
}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_SCALAR_H_
