// One work item: its splits reduced, merged along the tree, and, where it is the
// unit's last, the unit's output written.
#ifndef FLASHVERIFY_NATIVE_CPU_ITEM_H_
#define FLASHVERIFY_NATIVE_CPU_ITEM_H_

#include "native/cpu/tile.h"

namespace flashverify::cpu {
namespace {

// kLanes 16-bit floats as FP32, any code.
template <class Format>
FV_INLINE Vec widen(const uint16_t* from) {
  if constexpr (Format::kBias == BFloat::kBias) {
    return Decoder<BFloat>::from_row(from);
  } else {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(load_as<__m128i>(from));
#else
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = Half::decode(from[i]);
    return load(lanes);
#endif
  }
}

// Rounds kLanes FP32 numbers to a 16-bit format: nearest, ties to even.
template <class Format>
FV_INLINE void narrow(uint16_t* to, Vec value) {
  if constexpr (Format::kBias == BFloat::kBias) {
    const UintVec bits = reinterpret_cast<UintVec>(value);
    const UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const UintVec quiet = (bits >> 16) | 0x40u;
    const IntVec nan = value != value;
    const UintVec code = nan ? quiet : rounded;
    store_words(to, code);
  } else {
#if defined(__AVX512F__)
    store_as(to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    store_as(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
    float lanes[kLanes];
    store(lanes, value);
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint16_t>(Half::encode<false>(lanes[i]));
#endif
  }
}

template <class Format, class Read>
FV_INLINE void widen_row(const uint16_t* from, int64_t dims, Read&& each) {
  int64_t d = 0;
  for (; d + kLanes <= dims; d += kLanes) each(d, widen<Format>(from + d));
  if (d < dims) {
    uint16_t tail[kLanes] = {};
    memcpy(tail, from + d, static_cast<size_t>(dims - d) * sizeof(uint16_t));
    each(d, widen<Format>(tail));
  }
}

// Query rows of a unit to scratch, as FP32, and what each row sees.
inline void load_rows(const AttentionProblem& problem, const Unit& unit, const Scratch& scratch) {
  const int64_t group = problem.group();
  const int64_t query_len = problem.query_len(unit.request);
  const int64_t first_row = problem.first_row(unit.request);
  const int64_t seq_len = problem.seq_lens[unit.request];
  const int64_t dims = problem.head_dim;
  const int64_t last_chunk = padded_dims(dims) - kChunk;
  for (int64_t r = 0; r < unit.rows; ++r) {
    const int64_t token = (unit.row_begin + r) / group;
    const int64_t head = unit.kv_head * group + (unit.row_begin + r) % group;
    scratch.visible[r] = visible_keys(problem, seq_len, query_len, token);
    const int64_t at = (first_row + token) * problem.q_row_stride + head * problem.q_head_stride;
    const auto put = [&](int64_t d, Vec values) FV_LAMBDA_INLINE {
      store(scratch.q + d / kChunk * unit.rows * kChunk + r * kChunk + d % kChunk, values);
    };
    memset(scratch.q + last_chunk * unit.rows + r * kChunk, 0, kChunk * sizeof(float));
    if (problem.q_dtype == FV_DTYPE_FLOAT16) {
      widen_row<Half>(static_cast<const uint16_t*>(problem.q) + at, dims, put);
    } else if (problem.q_dtype == FV_DTYPE_BFLOAT16) {
      widen_row<BFloat>(static_cast<const uint16_t*>(problem.q) + at, dims, put);
    } else {
      const float* row = static_cast<const float*>(problem.q) + at;
      for (int64_t c = 0; c < dims; c += kChunk) {
        memcpy(scratch.q + c * unit.rows + r * kChunk, row + c,
               static_cast<size_t>(min64(kChunk, dims - c)) * sizeof(float));
      }
    }
  }
}

// Adds `b` to `a`, row by row. Where either has seen nothing (sum 0; a NaN is no
// 0) the other is the result to the bit.
inline void merge_state(const State& a, const State& b, int64_t rows, int64_t head_dim) {
  const int64_t chunks = padded_dims(head_dim) / kChunk;
  for (int64_t r = 0; r < rows; ++r) {
    if (b.sum[r] == 0.0f) continue;
    float weight_a = 0.0f, weight_b = 1.0f;
    if (a.sum[r] == 0.0f) {
      a.max[r] = b.max[r];
      a.sum[r] = b.sum[r];
      for (int64_t c = 0; c < chunks; ++c) {
        memcpy(a.chunk(c, rows) + r * kChunk, b.chunk(c, rows) + r * kChunk,
               kChunk * sizeof(float));
      }
      continue;
    }
    const float larger = a.max[r] > b.max[r] ? a.max[r] : b.max[r];
    const float base = larger == -INFINITY ? 0.0f : larger;
    weight_a = exp2_scalar(a.max[r] - base);
    weight_b = exp2_scalar(b.max[r] - base);
    a.max[r] = larger;
    a.sum[r] = a.sum[r] * weight_a + b.sum[r] * weight_b;
    for (int64_t c = 0; c < chunks; ++c) {
      float* to = a.chunk(c, rows) + r * kChunk;
      const float* from = b.chunk(c, rows) + r * kChunk;
      for (int d = 0; d < kChunk; d += kLanes) {
        store(to + d, fma(load(from + d), splat(weight_b), load(to + d) * splat(weight_a)));
      }
    }
  }
}

inline void store_row(const AttentionProblem& problem, int64_t at, const float* chunk,
                      int64_t chunk_stride, float factor, float v_scale) {
  for (int64_t d = 0; d < problem.head_dim; d += kLanes) {
    // + 0 makes a -0 that underflow left +0: whether masked keys turn it is not
    // a property of the row.
    const Vec value =
        load(chunk + d / kChunk * chunk_stride + d % kChunk) * splat(factor) * splat(v_scale) +
        splat(0.0f);
    const size_t count = static_cast<size_t>(min64(kLanes, problem.head_dim - d));
    if (problem.out_dtype == FV_DTYPE_FLOAT32) {
      memcpy(static_cast<float*>(problem.out) + at + d, &value, count * sizeof(float));
    } else {
      uint16_t codes[kLanes];
      if (problem.out_dtype == FV_DTYPE_FLOAT16) {
        narrow<Half>(codes, value);
      } else {
        narrow<BFloat>(codes, value);
      }
      memcpy(static_cast<uint16_t*>(problem.out) + at + d, codes, count * sizeof(uint16_t));
    }
  }
}

// Divides, scales and rounds, once.
inline void write_unit(const AttentionProblem& problem, const Unit& unit, const State& state) {
  const int64_t group = problem.group();
  const int64_t first_row = problem.first_row(unit.request);
  const float v_scale = problem.v_scale.at(unit.kv_head);
  for (int64_t r = 0; r < unit.rows; ++r) {
    const int64_t row = first_row + (unit.row_begin + r) / group;
    const int64_t head = unit.kv_head * group + (unit.row_begin + r) % group;
    float max = state.max[r];
    float sum = state.sum[r];
    const bool empty = sum == 0.0f;
    float weight = 1.0f;
    if (!empty && problem.sinks != nullptr) {
      const float sink = static_cast<float>(static_cast<double>(problem.sinks[head]) * kLog2E);
      const float larger = sink > max ? sink : max;
      weight = exp2_scalar(max - larger);
      sum = sum * weight + exp2_scalar(sink - larger);
      max = larger;
    }
    // The value scale stays apart: its product with a small factor may be subnormal
    // where the output is not.
    const float factor = empty ? 0.0f : weight / sum;
    store_row(problem, row * problem.out_row_stride + head * problem.out_head_stride,
              state.out + r * kChunk, unit.rows * kChunk, factor, v_scale);
    if (problem.lse != nullptr) {
      const double lse = empty ? -INFINITY : (static_cast<double>(max) + ::log2(sum)) * kLn2;
      problem.lse[row * problem.lse_row_stride + head * problem.lse_head_stride] =
          static_cast<float>(lse);
    }
  }
}

// ---- FP32 partials: one per item ---------------------------------------------

inline State item_state(const Call& call, const Unit& unit, int64_t item) {
  const int64_t row = unit.first_partial + item * unit.rows;
  return {static_cast<float*>(call.partial_out) + row * padded_dims(call.problem->head_dim),
          call.partial_max + row, call.partial_sum + row};
}

inline void copy_state(const State& to, const State& from, int64_t rows, int64_t head_dim) {
  const size_t row_bytes = static_cast<size_t>(rows) * sizeof(float);
  memcpy(to.max, from.max, row_bytes);
  memcpy(to.sum, from.sum, row_bytes);
  memcpy(to.out, from.out, row_bytes * static_cast<size_t>(padded_dims(head_dim)));
}

inline void merge_items(const Call& call, const Unit& unit) {
  const int64_t head_dim = call.problem->head_dim;
  const int64_t first_node = unit.split_begin >> unit.level;
  State states[64];
  TreeWalk walk;
  for (int64_t item = 0; item < unit.items(); ++item) {
    states[walk.depth()] = item_state(call, unit, item);
    walk.push(unit.level, first_node + item);
    while (walk.merge()) {
      merge_state(states[walk.depth() - 1], states[walk.depth()], unit.rows, head_dim);
    }
  }
  while (walk.collapse()) {
    merge_state(states[walk.depth() - 1], states[walk.depth()], unit.rows, head_dim);
  }
  write_unit(*call.problem, unit, states[0]);
}

// ---- Half partials: one per split --------------------------------------------
// The old arithmetic, on purpose: every split's output is divided by its own sum
// and rounded to FP16; the merge weights those in FP32, over all splits at once.

inline uint16_t* half_row(const Call& call, int64_t partial_row) {
  return static_cast<uint16_t*>(call.partial_out) +
         partial_row * padded_dims(call.problem->head_dim);
}

inline void store_half_partial(const Call& call, int64_t first_row, const State& state,
                               int64_t rows) {
  const int64_t dims = padded_dims(call.problem->head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    const bool empty = state.sum[r] == 0.0f;
    const Vec factor = splat(empty ? 0.0f : 1.0f / state.sum[r]);
    uint16_t* to = half_row(call, first_row + r);
    for (int64_t d = 0; d < dims; d += kLanes) {
      narrow<Half>(to + d, load(state.chunk(d / kChunk, rows) + r * kChunk + d % kChunk) * factor);
    }
    call.partial_max[first_row + r] = state.max[r];
    call.partial_sum[first_row + r] = state.sum[r];
  }
}

inline void merge_half_partials(const Call& call, const Unit& unit, const State& result) {
  const int64_t dims = padded_dims(call.problem->head_dim);
  const int64_t splits = unit.split_end - unit.split_begin;
  for (int64_t r = 0; r < unit.rows; ++r) {
    float max = -INFINITY;
    for (int64_t s = 0; s < splits; ++s) {
      const float split_max = call.partial_max[unit.first_partial + s * unit.rows + r];
      if (split_max > max) max = split_max;
    }
    const float base = max == -INFINITY ? 0.0f : max;
    float* out = result.out + r * kChunk;
    const auto at = [&](int64_t d) { return out + d / kChunk * unit.rows * kChunk + d % kChunk; };
    for (int64_t d = 0; d < dims; d += kLanes) store(at(d), Vec{});
    float sum = 0.0f;
    for (int64_t s = 0; s < splits; ++s) {
      const int64_t row = unit.first_partial + s * unit.rows + r;
      if (call.partial_sum[row] == 0.0f) continue;
      const float weight = call.partial_sum[row] * exp2_scalar(call.partial_max[row] - base);
      sum += weight;
      const uint16_t* from = half_row(call, row);
      for (int64_t d = 0; d < dims; d += kLanes) {
        store(at(d), fma(widen<Half>(from + d), splat(weight), load(at(d))));
      }
    }
    result.max[r] = max;
    result.sum[r] = sum;
  }
}

// ---- The item ------------------------------------------------------------------

template <class Kernel, bool kHalf>
void run_item(const Call& call, int64_t item_index, void* scratch_memory) {
  const AttentionProblem& problem = *call.problem;
  Unit& unit = call.plan.unit_of(item_index);
  Scratch scratch;
  lay_out_scratch(static_cast<char*>(scratch_memory), call.max_unit_rows, problem.head_dim,
                  call.tree_depth, &scratch);
  load_rows(problem, unit, scratch);

  const int64_t item = item_index - unit.first_item;
  const int64_t node = (unit.split_begin >> unit.level) + item;
  const int64_t first_split = max64(unit.split_begin, node << unit.level);
  const int64_t last_split =
      unit.level >= 62 ? unit.split_end : min64(unit.split_end, (node + 1) << unit.level);
  const KeyRange all = {scratch.visible[0].begin, scratch.visible[unit.rows - 1].end};

  TreeWalk walk;
  for (int64_t split = first_split; split < last_split; ++split) {
    const KeyRange keys = {max64(all.begin, split * kSplitTokens),
                           min64(all.end, (split + 1) * kSplitTokens)};
    const State state = scratch.state(walk.depth());
    Kernel::template reduce_split<kHalf>(call, unit, scratch, keys, state);
    if constexpr (kHalf) {
      store_half_partial(call, unit.first_partial + (split - unit.split_begin) * unit.rows, state,
                         unit.rows);
    } else {
      walk.push(0, split);
      while (walk.merge()) {
        merge_state(scratch.state(walk.depth() - 1), scratch.state(walk.depth()), unit.rows,
                    problem.head_dim);
      }
    }
  }
  while (walk.collapse()) {
    merge_state(scratch.state(walk.depth() - 1), scratch.state(walk.depth()), unit.rows,
                problem.head_dim);
  }

  const State result = scratch.state(0);
  if (first_split == last_split) begin_split(scratch, result, unit.rows, problem.head_dim);
  if (first_split == last_split) end_split(scratch, result, unit.rows);
  const bool alone = unit.items() == 1;
  if (!kHalf && !alone) {
    copy_state(item_state(call, unit, item), result, unit.rows, problem.head_dim);
  }
  // Whoever comes last sees every other thread's partials.
  if (!alone && unit.unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if constexpr (kHalf) {
    merge_half_partials(call, unit, result);
    write_unit(problem, unit, result);
  } else if (alone) {
    write_unit(problem, unit, result);
  } else {
    merge_items(call, unit);
  }
}

}  // namespace
}  // namespace flashverify::cpu

#endif  // FLASHVERIFY_NATIVE_CPU_ITEM_H_
