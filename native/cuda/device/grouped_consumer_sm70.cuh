// What the eight warps of the sm_70 grouped kernel do with a tile of 128 keys.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CONSUMER_SM70_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CONSUMER_SM70_CUH_

#include "native/cuda/device/grouped_cache_sm70.cuh"
#include "native/cuda/device/grouped_query.cuh"
#include "native/cuda/device/mma_sm70.cuh"
#include "native/cuda/device/state.cuh"
#include "native/cuda/device/work.cuh"

namespace flashverify::cuda {

template <class Shape>
struct ConsumerSm70 {
  using Kv = typename Shape::Kv;
  static constexpr int kRows = Shape::kRowBlocks;  // blocks of eight
  static constexpr int kM = Shape::kBlocksM;
  static constexpr int kN = Shape::kBlocksN;

  const AttentionArgs& p;
  unsigned char* const smem;
  const uint32 base;
  RowState<Shape::kTileRows>& rows;
  const LaneSm70<Shape> at;
  CacheSm70<Shape> cache;
  uint32 p_write;  // where the lane's first probability goes, row block 0

  float score[kRows][4];
  float o[kM][kN][8];
  float split_sum[Shape::kFoldsInMemory ? 1 : kM][Shape::kFoldsInMemory ? 1 : kN][8];
  float group_sum[Shape::kFoldsGroups ? kM : 1][Shape::kFoldsGroups ? kN : 1][8];
  float sum[kRows][2];
  float factor;  // score -> base-2 exponent, positive
  float precap;  // score -> softcap's argument

  FV_DEVICE ConsumerSm70(const AttentionArgs& args, unsigned char* shared, int warp_index)
      : p(args),
        smem(shared),
        base(shared_address(shared)),
        rows(*reinterpret_cast<RowState<Shape::kTileRows>*>(shared + Shape::kRowStateOffset)),
        at(warp_index),
        cache{args, at, reinterpret_cast<int64*>(shared + Shape::kValueOffset)} {
    const int chunk = 4 * at.key_group + at.pair();
    p_write = Shape::kPOffset + chunk * Shape::kColumnBytes +
              (at.first_row() ^ at.row_swizzle(chunk)) * 16 + 8 * at.half() + 4 * (at.lane & 1);
  }

  FV_DEVICE void barrier() const { __syncthreads(); }

  // ---- queries --------------------------------------------------------------

  FV_DEVICE void store_queries(const RowTile& tile, int head, float score_scale) {
    // A negative scale's sign goes into the queries, so that maxima stay maxima.
    const float scale = fmaxf(fabsf(score_scale), 1e-37f);
    factor = p.softcap > 0.0f ? 1.0f : scale;
    precap = p.softcap > 0.0f ? fminf(scale * 2.0f / p.softcap, kLargest) : 0.0f;
    const bool aligned =
        p.q_type == kFloat16 &&
        ((reinterpret_cast<uint64>(p.q) | p.q_row_stride | p.q_head_stride) & 15) == 0;
    if (FV_UNLIKELY(!aligned)) {
      load_any_queries<Shape>(p, smem, tile, head, score_scale < 0.0f);
    } else {
      const uint32 sign = score_scale < 0.0f ? 0x80008000u : 0u;
#pragma unroll 2
      for (int i = at.thread(); i < Shape::kTileRows * Shape::kDim / 8; i += kConsumers) {
        const int row = i % Shape::kTileRows;
        const int d = i / Shape::kTileRows * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < tile.count && d < p.head_dim)
          v = __ldg(reinterpret_cast<const uint4*>(query_row(p, tile, head, row) + d * 2));
        store_query_quad(v.x ^ sign, v.y ^ sign, row, d);
        store_query_quad(v.z ^ sign, v.w ^ sign, row, d + 4);
      }
    }
    if (at.thread() < Shape::kTileRows) set_up_row<Shape>(p, rows, tile, at.thread());
  }
  FV_DEVICE void store_query_quad(uint32 low, uint32 high, int row, int d) const {
    if constexpr (Kv::kNearIsNative) {
      store_query_pairs<Shape>(smem, low, high, row, d);
    } else {
      store_query_pairs<Shape>(smem, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632),
                               row, d);
    }
  }

  // ---- S^T = K Q^T ----------------------------------------------------------

  // Two quads of d as operand A: eight codes of a key, in the queries' order.
  FV_DEVICE static void decode_keys(uint32 (&a)[2][2], const uint32 (&raw)[4], int chunk) {
    if constexpr (Kv::kBytes == 2) {
      a[0][0] = raw[0];
      a[0][1] = raw[1];
      a[1][0] = raw[2];
      a[1][1] = raw[3];
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (Kv::kNearIsNative) {
          Kv::decode_near(raw[2 * chunk + i], a[i][0], a[i][1]);
        } else {
          Kv::decode_far(raw[2 * chunk + i], a[i][0], a[i][1]);
        }
      }
    }
  }
  // The whole product of a tile; the other warp's rows go to shared memory.
  FV_DEVICE void multiply_keys() {
    float s[kRows][8];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[j][i] = 0.0f;
    }
    constexpr int kChunksPerLoad = 2 / Kv::kBytes;
    // A warp's own rows come first in d[i]: hence the exchanged halves.
    const uint32 q = base + Shape::kQOffset +
                     ((at.lane & 3) + 4 * ((at.lane >> 4) ^ at.d_half)) * 16 +
                     at.d_half * (Shape::kDim / 16) * Shape::kColumnBytes;
#pragma unroll
    for (int batch = 0; batch < Shape::kKeyBatches; ++batch) {
      uint32(&raw)[Shape::kKeyBatchLoads][4] = cache.raw_keys[batch % Shape::kKeyBuffers];
#pragma unroll
      for (int i = 0; i < Shape::kKeyBatchLoads; ++i) {
#pragma unroll
        for (int c = 0; c < kChunksPerLoad; ++c) {
          uint32 a[2][2];
          decode_keys(a, raw[i], c);
          const int chunk = (batch * Shape::kKeyBatchLoads + i) * kChunksPerLoad + c;
          uint4 b[kRows];
#pragma unroll
          for (int j = 0; j < kRows; ++j)
            b[j] = load_shared4(q + chunk * Shape::kColumnBytes + j * 128);
#pragma unroll
          for (int j = 0; j < kRows; ++j) multiply_rows(s[j], a[0], b[j].x, b[j].y);
#pragma unroll
          for (int j = 0; j < kRows; ++j) multiply_rows(s[j], a[1], b[j].z, b[j].w);
        }
      }
      if (batch + Shape::kKeyBuffers < Shape::kKeyBatches)
        cache.load_keys(raw, batch + Shape::kKeyBuffers);
    }
    float4* const exchange = reinterpret_cast<float4*>(smem + Shape::kExchangeOffset) +
                             (at.warp ^ 4) * kRows * 32 + at.lane;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      exchange[j * 32] = make_float4(s[j][4], s[j][5], s[j][6], s[j][7]);
#pragma unroll
      for (int e = 0; e < 4; ++e) score[j][e] = s[j][e];
    }
  }
  // After a barrier.
  FV_DEVICE void complete_scores() {
    const float4* const exchange = reinterpret_cast<const float4*>(smem + Shape::kExchangeOffset) +
                                   at.warp * kRows * 32 + at.lane;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float4 v = exchange[j * 32];
      score[j][0] += v.x;
      score[j][1] += v.y;
      score[j][2] += v.z;
      score[j][3] += v.w;
    }
  }

  // ---- O^T += V^T P^T -------------------------------------------------------

  FV_DEVICE static void decode_values(uint32 (&a)[kM][2],
                                      const uint32 (&raw)[Shape::kValueRegisters]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (Kv::kBytes == 2) {
        a[m][0] = __byte_perm(raw[2 * m], raw[2 * m + 1], 0x5410);
        a[m][1] = __byte_perm(raw[2 * m], raw[2 * m + 1], 0x7632);
      } else {
        Kv::decode_far(raw[m], a[m][0], a[m][1]);
      }
    }
  }
  FV_DEVICE void multiply_values(typename CacheSm70<Shape>::RawValues& raw, int batch, bool scrub) {
    if (FV_UNLIKELY(scrub)) {
#pragma unroll
      for (int i = 0; i < Shape::kBatchSteps; ++i) {
#pragma unroll
        for (int w = 0; w < Shape::kValueRegisters; ++w) raw[i][w] = finite_only<Kv>(raw[i][w]);
      }
    }
    const int first_chunk = (at.key_split * Shape::kStepsPv + batch * Shape::kBatchSteps) / 2;
    const int lane_row = (at.lane & 3) + 4 * (at.lane >> 4);
    const uint32 first =
        base + Shape::kPOffset + at.row_group * kN * 128 + first_chunk * Shape::kColumnBytes;
#pragma unroll
    for (int i = 0; i < Shape::kBatchSteps / 2; ++i) {
      const uint32 source =
          first + i * Shape::kColumnBytes + (lane_row ^ at.row_swizzle(first_chunk + i)) * 16;
      uint4 high[kN];
      uint4 low[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        high[j] = load_shared4(source + j * 128);
        if constexpr (!Shape::kLegacy) low[j] = load_shared4(source + Shape::kPBytes + j * 128);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32 a[kM][2];
        decode_values(a, raw[2 * i + k]);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int j = 0; j < kN; ++j) {
            multiply_columns(o[m][j], a[m], k ? high[j].z : high[j].x, k ? high[j].w : high[j].y);
          }
        }
        if constexpr (!Shape::kLegacy) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int j = 0; j < kN; ++j) {
              multiply_columns(o[m][j], a[m], k ? low[j].z : low[j].x, k ? low[j].w : low[j].y);
            }
          }
        }
      }
    }
  }

  // ---- softmax --------------------------------------------------------------

  FV_DEVICE static void clear(float (&v)[kM][kN][8]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) v[m][j][e] = 0.0f;
      }
    }
  }

  FV_DEVICE void finish_scores(int first_key, bool partial) {
    if constexpr (Kv::kScale != 1.0f) {
      // An infinity stands for a NaN code.
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) score[j][e] = fmaf(score[j][e], 0.0f, score[j][e]);
      }
    }
    if (FV_UNLIKELY(partial || p.softcap > 0.0f)) adjust_scores(first_key, partial);
  }
  // Caps and masks the scores of a tile that needs either.
  FV_DEVICE void adjust_scores(int first_key, bool partial) {
    const int lane_key =
        first_key + 32 * at.key_group + 8 * (at.lane >> 2 & 3) + 4 * (at.lane >> 4) + (at.lane & 1);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = score[j][e];
        if (p.softcap > 0.0f) {
          // tanh(x) = 1 - 2 / (exp(2 x) + 1); the argument comes times 2 log2(e).
          const float cap = p.softcap * kLog2e;
          x = cap - __fdividef(2.0f * cap, exp2_approx(x * precap) + 1.0f);
        }
        const int2 v = rows.visible[8 * j + at.first_row() + (e & 1)];
        const int position = lane_key + (e & 2);
        if (partial && (position < v.x || position >= v.y)) x = -kInfinity;
        score[j][e] = x;
      }
    }
  }

  // True where some row needs a new reference. One that has seen no key has
  // kUnset, which every score that is not masked exceeds.
  FV_DEVICE bool exceeds() const {
    float top = -kInfinity;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float2 r = reference(j);
#pragma unroll
      for (int e = 0; e < 4; ++e) top = fmaxf(top, fmaf(score[j][e], factor, (e & 1) ? r.y : r.x));
    }
    return top > kReferenceSlack;
  }

  // Of the lane's two rows of row block j. Read where it is used: registers are few.
  FV_DEVICE float2 reference(int j) const {
    return *reinterpret_cast<const float2*>(&rows.minus_reference[8 * j + at.first_row()]);
  }

  // Over the keys of a warp that meet one row: one tree for every row.
  template <bool kMax>
  FV_DEVICE static float reduce_over_lanes(float v) {
    v = combine<kMax>(v, __shfl_xor_sync(~0u, v, 1));
    v = combine<kMax>(v, __shfl_xor_sync(~0u, v, 4));
    v = combine<kMax>(v, __shfl_xor_sync(~0u, v, 8));
    return combine<kMax>(v, __shfl_xor_sync(~0u, v, 16));
  }

  // New references, in three steps with a barrier after each of the first two:
  // the tile's maximum of every row, to shared memory;
  FV_DEVICE void publish_max() {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float top = reduce_over_lanes<true>(fmaxf(score[j][e], score[j][e + 2]) * factor);
        if ((at.lane & ~2) == 0)
          atomicMax(&rows.tile_max[8 * j + at.first_row() + e], ordered(top));
      }
    }
  }
  // each row's decision, by one thread;
  FV_DEVICE void decide_references(bool fresh) {
    if (at.thread() >= Shape::kTileRows) return;
    const float top = from_ordered(rows.tile_max[at.thread()]);
    rows.tile_max[at.thread()] = kOrderedMinusInfinity;
    const float old = fresh ? kUnset : rows.minus_reference[at.thread()];
    const bool moves = top > -kInfinity && (old == kUnset || top + old > kReferenceSlack);
    rows.moved[at.thread()] = moves && old != kUnset ? exp2_approx(-top - old) : 1.0f;
    rows.minus_reference[at.thread()] = moves ? -top : old;
  }
  // and everybody's sums follow it.
  FV_DEVICE void take_references(bool fresh) {
    if (fresh) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) sum[j][0] = sum[j][1] = 0.0f;
      clear(o);
      return;
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(&rows.moved[8 * j + at.first_row()]);
      sum[j][0] *= f.x;
      sum[j][1] *= f.y;
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const float2 f = *reinterpret_cast<const float2*>(&rows.moved[at.product_row(j, u)]);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          o[m][j][4 * u] *= f.x;
          o[m][j][4 * u + 1] *= f.y;
          o[m][j][4 * u + 2] *= f.x;
          o[m][j][4 * u + 3] *= f.y;
        }
      }
    }
  }
  // Probabilities, P_hi and P_lo, to shared memory.
  FV_DEVICE void exponentiate() {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float2 r = reference(j);
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        y[e] = exp2_approx(fmaf(score[j][e], factor, (e & 1) ? r.y : r.x));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[j][e] += y[e] + y[e + 2];
        const uint32 high = pack_half2(y[e], y[e + 2]);
        unsigned char* const target = smem + (p_write ^ (16 * e)) + j * 128;
        *reinterpret_cast<uint32*>(target) = high;
        if constexpr (!Shape::kLegacy) {
          const float2 f = unpack_half2(high);
          *reinterpret_cast<uint32*>(target + Shape::kPBytes) =
              pack_half2(y[e] - f.x, y[e + 2] - f.y);
        }
      }
    }
  }

  // ---- ends of splits -------------------------------------------------------

  // Step 1, when the split's last products are there; a barrier follows.
  FV_DEVICE void publish_split() {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float total = reduce_over_lanes<false>(sum[j][e]);
        if ((at.lane & ~2) == 0) rows.warp_sum[at.key_group][8 * j + at.first_row() + e] = total;
      }
    }
    if constexpr (Shape::kKeySplits > 1) {
      if (!at.owner()) {
        const int slot = at.thread() - kConsumers / Shape::kKeySplits;
#pragma unroll
        for (int i = 0; i < kM * kN * 2; ++i) exchange_slot(i, slot) = quarter(o, i);
      }
    }
  }
  FV_DEVICE float4& exchange_slot(int i, int slot) const {
    constexpr int kSlots = kConsumers - kConsumers / Shape::kKeySplits;
    return reinterpret_cast<float4*>(smem + Shape::kExchangeOffset)[i * kSlots + slot];
  }
  FV_DEVICE static float4 quarter(const float (&v)[kM][kN][8], int i) {
    const float (&x)[8] = v[i / (2 * kN)][i / 2 % kN];
    const int e = 4 * (i & 1);
    return make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
  }

  // Step 2, one thread per row, beside collect_sums; a barrier follows.
  FV_DEVICE void fold_split_stats(bool ends_group, float2* stats) {
    if (at.thread() >= Shape::kTileRows) return;
    const int row = at.thread();
    const float l = rows.warp_sum[0][row] + rows.warp_sum[1][row] + rows.warp_sum[2][row] +
                    rows.warp_sum[3][row];
    const float m = l == 0.0f ? -kInfinity : -rows.minus_reference[row];
    float max = rows.split_max[row];
    float total = rows.split_sum[row];
    const FoldFactors f = fold_stats(max, total, m, l);
    rows.split_factors[row] = make_float2(f.old, f.add);
    rows.split_max[row] = max;
    rows.split_sum[row] = total;
    if (!ends_group) return;
    if (p.fold < p.splits) {
      write_stats(stats, row, max, total);
      return;
    }
    float group_max = rows.group_max[row];
    float group_total = rows.group_sum[row];
    const FoldFactors group = fold_stats(group_max, group_total, max, total);
    rows.group_factors[row] = make_float2(group.old, group.add);
    rows.group_max[row] = group_max;
    rows.group_sum[row] = group_total;
    rows.split_max[row] = -kInfinity;
    rows.split_sum[row] = 0.0f;
  }
  // A half partial is stored normalised, its sum inside its maximum.
  FV_DEVICE void write_stats(float2* stats, int row, float m, float l) {
    if constexpr (Shape::kLegacy) {
      rows.output_factor[row] = l == 0.0f ? 0.0f : 1.0f / l;
      __stcg(&stats[row],
             make_float2(l == 0.0f ? -kInfinity : m + log2f(l), l == 0.0f ? 0.0f : 1.0f));
    } else {
      __stcg(&stats[row], make_float2(m, l));
    }
  }
  // The other key splits' products, in ascending order, and what poison demands.
  FV_DEVICE void collect_sums(bool poisoned) {
    if (!at.owner()) return;
    if constexpr (Shape::kKeySplits > 1) {
#pragma unroll
      for (int split = 0; split + 1 < Shape::kKeySplits; ++split) {
#pragma unroll
        for (int i = 0; i < kM * kN * 2; ++i) {
          const float4 v = exchange_slot(i, at.thread() + split * (kConsumers / Shape::kKeySplits));
          float (&x)[8] = o[i / (2 * kN)][i / 2 % kN];
          x[4 * (i & 1)] += v.x;
          x[4 * (i & 1) + 1] += v.y;
          x[4 * (i & 1) + 2] += v.z;
          x[4 * (i & 1) + 3] += v.w;
        }
      }
    }
    if (FV_UNLIKELY(poisoned)) {
      // Per d, the rows that attend a non-finite value.
      const uint64* const poison = reinterpret_cast<const uint64*>(smem + Shape::kPoisonOffset);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const uint64 bits = poison[at.product_column(m) + (e >> 1 & 1)];
#pragma unroll
          for (int j = 0; j < kN; ++j) {
            if (bits >> (at.product_row(j, e >> 2) + (e & 1)) & 1)
              o[m][j][e] = __int_as_float(0x7fffffff);
          }
        }
      }
    }
  }
  // Step 3: o becomes the fold of the item's splits so far, or of its current group.
  // `partial`: their place in memory, null where the item's first split ends.
  FV_DEVICE void fold_split(bool ends_group, const unsigned char* partial) {
    if (!at.owner()) return;
    if constexpr (Shape::kFoldsInMemory) {
      fold_onto(partial);
    } else {
      fold_into(split_sum, o, rows.split_factors);
    }
    if constexpr (Shape::kFoldsGroups) {
      if (ends_group && p.fold == p.splits) {
        fold_into(group_sum, split_sum, rows.group_factors);
        clear(split_sum);
      }
    }
  }
  FV_DEVICE void fold_into(float (&into)[kM][kN][8], const float (&from)[kM][kN][8],
                           const float2* factors) const {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const float4 f = *reinterpret_cast<const float4*>(&factors[at.product_row(j, u)]);
        const FoldFactors even = {f.x, f.y};
        const FoldFactors odd = {f.z, f.w};
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int e = 4 * u; e < 4 * u + 4; ++e) {
            into[m][j][e] = fold_value(into[m][j][e], from[m][j][e], (e & 1) ? odd : even);
          }
        }
      }
    }
  }

  FV_DEVICE void fold_onto(const unsigned char* partial) {
    const float4* const source = reinterpret_cast<const float4*>(partial) + partial_index();
#pragma unroll
    for (int i = 0; i < kM * kN * 2; ++i) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (partial != nullptr) v = __ldcg(source + partial_step(i));
      const float4 f =
          *reinterpret_cast<const float4*>(&rows.split_factors[at.product_row(i / 2 % kN, i & 1)]);
      const FoldFactors even = {f.x, f.y};
      const FoldFactors odd = {f.z, f.w};
      float* const x = &o[i / (2 * kN)][i / 2 % kN][4 * (i & 1)];
      x[0] = fold_value(v.x, x[0], even);
      x[1] = fold_value(v.y, x[1], odd);
      x[2] = fold_value(v.z, x[2], even);
      x[3] = fold_value(v.w, x[3], odd);
    }
  }
  // The result of fold_split where the item ends, or its last group.
  FV_DEVICE float4 folded(int i) const {
    if constexpr (Shape::kFoldsInMemory) {
      return quarter(o, i);
    } else {
      return quarter(split_sum, i);
    }
  }

  // A partial is [16 d][row block] of 32 positions, as the merge takes them.
  FV_DEVICE int partial_index() const {
    const int row = at.product_row(0, 0);
    const int d = at.product_column(0);
    return ((d >> 4) * kRows + (row >> 3)) * kSlicePositions + (d >> 1 & 7) * 4 + (row >> 1 & 3);
  }
  // How far behind the first one the i-th is.
  FV_DEVICE static constexpr int partial_step(int i) {
    return i / (2 * kN) * 8 + i / 2 % kN * kSlicePositions + (i & 1) * 2;
  }
  FV_DEVICE void store_partial(unsigned char* target) const {
    if (!at.owner()) return;
    const int first = partial_index();
#pragma unroll
    for (int i = 0; i < kM * kN * 2; ++i) {
      const float4 x = folded(i);
      const int index = first + partial_step(i);
      if constexpr (Shape::kLegacy) {
        const float2 f = *reinterpret_cast<const float2*>(
            &rows.output_factor[at.product_row(i / 2 % kN, i & 1)]);
        __stcg(reinterpret_cast<uint2*>(target) + index,
               make_uint2(pack_half2(x.x * f.x, x.y * f.y), pack_half2(x.z * f.x, x.w * f.y)));
      } else {
        __stcg(reinterpret_cast<float4*>(target) + index, x);
      }
    }
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CONSUMER_SM70_CUH_
