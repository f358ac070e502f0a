// What the consumer warps of a grouped kernel do with a tile.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CONSUMER_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CONSUMER_CUH_

#include "native/cuda/device/grouped_query.cuh"
#include "native/cuda/device/grouped_shape.cuh"
#include "native/cuda/device/mma.cuh"
#include "native/cuda/device/state.cuh"
#include "native/cuda/device/work.cuh"

namespace flashverify::cuda {

constexpr int kConsumerBarrier = 1;

template <class Shape, bool kWgmma>
struct Consumer {
  using Kv = typename Shape::Kv;
  static constexpr int kRows = Shape::kRowBlocks;  // blocks of eight
  static constexpr int kM = Shape::kBlocksM;
  using Values = Mma<kRows, true, Kv::kBfloat, kWgmma>;
  static constexpr bool kNearPairs = Kv::kNearIsNative;

  const AttentionArgs& p;
  unsigned char* const smem;
  const uint32 base;
  RowState<Shape::kTileRows>& rows;
  const int lane;
  const int warp;
  const int g;
  const int t;
  // This lane's place in a half tile, for ldmatrix: the part that constants are
  // added to, and the swizzled chunk, which they are xored into.
  uint32 key_base;
  uint32 key_xor;
  uint32 value_base;
  uint32 value_xor;

  float score[kRows][4];
  float o[kM][kRows][4];
  float split_sum[kM][kRows][4];  // splits of the current group
  float group_sum[Shape::kFoldsGroups ? kM : 1][Shape::kFoldsGroups ? kRows : 1][4];
  float minus_reference[kRows][2];
  float sum[kRows][2];
  uint32 operand[2][4][4];
  float factor;     // score -> base-2 exponent, positive
  float precap;     // score -> softcap's argument
  uint32 p_buffer;  // byte offset of the buffer that P V reads

  FV_DEVICE Consumer(const AttentionArgs& args, unsigned char* shared, int warp_index)
      : p(args),
        smem(shared),
        base(shared_address(shared)),
        rows(*reinterpret_cast<RowState<Shape::kTileRows>*>(shared + Shape::kRowStateOffset)),
        lane(threadIdx.x & 31),
        warp(warp_index),
        g((threadIdx.x & 31) >> 2),
        t(threadIdx.x & 3),
        p_buffer(0) {
    constexpr int kPitch = Shape::kRowBytes >= 128 ? 128 : Shape::kRowBytes;
    const int key_row = 16 * (warp & 3) + (lane & 15);
    key_base = key_row * kPitch;
    key_xor = tile_offset<Shape::kRowBytes>(key_row, lane >> 4) - key_base;
    const int block = (Shape::kKeySplit ? warp & 3 : warp) * kM;  // of 16 d
    const int matrix = lane >> 3;
    int chunk;
    int row;
    if constexpr (Kv::kBytes == 2) {  // matrix: (d half, key half)
      chunk = 2 * block + (matrix & 1);
      row = (matrix >> 1) * 8 + (lane & 7);
    } else if constexpr (kM == 1) {  // matrix: eight keys
      chunk = block;
      row = matrix * 8 + (lane & 7);
    } else {  // matrix: (key half, block)
      chunk = block + (matrix >> 1);
      row = (matrix & 1) * 8 + (lane & 7);
    }
    constexpr int kColumnChunks = Shape::kRowBytes >= 128 ? 8 : 4;
    value_base = chunk / kColumnChunks * 8192 + row * kPitch;
    value_xor = tile_offset<Shape::kRowBytes>(row, chunk % kColumnChunks) - row * kPitch;
  }

  // Read again at every use: kept in a register, it would be the one that spills.
  static FV_DEVICE int thread() {
    uint32 index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return static_cast<int>(index & (kConsumers - 1));
  }
  FV_DEVICE bool owner() const { return !Shape::kKeySplit || warp < 4; }
  FV_DEVICE void barrier() const { named_barrier(kConsumerBarrier, kConsumers); }

  // ---- queries --------------------------------------------------------------

  // Q as operand B, [d column of 8][row block] core matrices, d permuted as the
  // decoded keys are. A row of another type than the operand is moved into
  // FP16's range by a power of two, which `factor` takes out again.
  // Aligned FP16, the usual case, is fetched ahead of everything else, as it is,
  // into the room of P; store_queries then brings it into operand B's order.
  FV_DEVICE bool fetches_queries() const {
    return !Kv::kBfloat && p.q_type == kFloat16 &&
           ((reinterpret_cast<uint64>(p.q) | p.q_row_stride | p.q_head_stride) & 15) == 0;
  }
  static constexpr int kRowChunks = Shape::kDim / 8;  // of 16 bytes
  // Fetched a row at a time, read back a column at a time: the pitch puts eight rows
  // into different banks.
  static constexpr int kStagedPitch = (kRowChunks + 1) * 16;
  static_assert(Shape::kTileRows * kStagedPitch <= 4 * Shape::kPBytes, "fits the room of P");
  FV_DEVICE void fetch_queries(const RowTile& tile, int head) const {
#pragma unroll 2
    for (int i = thread(); i < Shape::kTileRows * kRowChunks; i += kConsumers) {
      const int row = i / kRowChunks;
      const int chunk = i % kRowChunks;
      copy_async<16>(base + Shape::kPOffset + row * kStagedPitch + chunk * 16,
                     query_row(p, tile, head, row) + chunk * 16,
                     row < tile.count && chunk * 8 < p.head_dim);
    }
  }
  FV_DEVICE void store_queries(const RowTile& tile, int head, bool fetched, float score_scale) {
    // A negative scale's sign goes into the queries, so that maxima stay maxima.
    const float scale = fmaxf(fabsf(score_scale), 1e-37f);
    factor = p.softcap > 0.0f ? 1.0f : scale;
    precap = p.softcap > 0.0f ? fminf(scale * 2.0f / p.softcap, kLargest) : 0.0f;
    if (!FV_UNLIKELY(!fetched)) {
      const uint32 sign = score_scale < 0.0f ? 0x80008000u : 0u;
      copy_async_wait();
      barrier();
#pragma unroll 2
      for (int i = thread(); i < Shape::kTileRows * kRowChunks; i += kConsumers) {
        const int row = i % Shape::kTileRows;
        const int d = i / Shape::kTileRows * 8;
        const uint4 v =
            *reinterpret_cast<const uint4*>(smem + Shape::kPOffset + row * kStagedPitch + d * 2);
        store_query_quad(v.x ^ sign, v.y ^ sign, row, d);
        store_query_quad(v.z ^ sign, v.w ^ sign, row, d + 4);
      }
    } else {
      load_any_queries<Shape>(p, smem, tile, head, score_scale < 0.0f);
    }
    if (thread() < Shape::kTileRows) set_up_row<Shape>(p, rows, tile, thread());
    if constexpr (kWgmma) async_proxy_fence();
  }
  FV_DEVICE void store_query_quad(uint32 low, uint32 high, int row, int d) const {
    if constexpr (kNearPairs) {
      store_query_pairs<Shape>(smem, low, high, row, d);
    } else {
      store_query_pairs<Shape>(smem, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632),
                               row, d);
    }
  }

  FV_DEVICE void reset_chain(int row) {
    rows.split_max[row] = -kInfinity;
    rows.split_sum[row] = 0.0f;
  }

  // ---- S^T = K Q^T ----------------------------------------------------------

  FV_DEVICE void load_keys(uint32 (&raw)[16], uint32 half, int batch) const {
    constexpr int kLoads = 2 * Kv::kBytes;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int chunk = 2 * (kLoads * batch + i);
      uint32 r[4];
      load_matrix4(r, half + chunk / 8 * 8192 + key_base + (key_xor ^ ((chunk & 7) << 4)));
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[4 * i + e] = r[e];
    }
  }
  // Four k-steps of operand A from what load_keys read.
  FV_DEVICE void decode_keys(uint32 (&a)[4][4], const uint32 (&raw)[16]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Kv::kBytes == 1) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32 codes = raw[4 * (i >> 1) + 2 * (i & 1) + e];
          if constexpr (kNearPairs) {
            Kv::decode_near(codes, a[i][e], a[i][e + 2]);
          } else {
            Kv::decode_far(codes, a[i][e], a[i][e + 2]);
          }
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = raw[4 * i + e];
      }
    }
  }

  // Leaves the last products in flight where they are asynchronous.
  FV_DEVICE void multiply_keys(uint32 half) {
    uint32 raw[16];
    using Keys = Mma<kRows, false, Kv::kBfloat, kWgmma>;
    const uint32 q = Keys::handle(base + Shape::kQOffset);
    if constexpr (!kWgmma) clear(score);
    load_keys(raw, half, 0);
#pragma unroll
    for (int batch = 0; batch < Shape::kSteps / 4; ++batch) {
      uint32(&a)[4][4] = operand[batch & 1];
      decode_keys(a, raw);
      if (batch + 1 < Shape::kSteps / 4) load_keys(raw, half, batch + 1);
      Keys::begin();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Keys::run(score, a[i], q + (4 * batch + i) * 2 * Shape::kColumnBytes / Keys::kHandleBytes,
                  lane, batch + i > 0);
      }
      Keys::template end<1>();
    }
  }

  // ---- O^T += V^T P^T -------------------------------------------------------

  FV_DEVICE void load_values(uint32 (&raw)[16], uint32 slot, int batch) const {
    constexpr int kBatchTokens = 16 * Shape::kStepsPerBatch;
    const int token = batch * kBatchTokens + (Shape::kKeySplit ? (warp >> 2) * kHalfTokens : 0);
    const uint32 half = slot + token / kHalfTokens * Shape::kHalfBytes;
    const int first = token % kHalfTokens;
    uint32 r[4];
#pragma unroll
    for (int i = 0; i < 2 * Kv::kBytes; ++i) {
      // i: (step, block) | step | pair of steps | pair of blocks; see value_base.
      constexpr int kPitch = Shape::kRowBytes >= 128 ? 128 : Shape::kRowBytes;
      const int key = first + (Kv::kBytes == 2 ? 16 * (i / kM)
                               : kM == 2       ? 16 * i
                               : kM == 1       ? 32 * i
                                               : 0);
      const int chunk = Kv::kBytes == 2 ? 2 * (i % kM) : kM == 4 ? 2 * i : 0;
      load_matrix4_transposed(r, half + key * kPitch + value_base + (value_xor ^ (chunk << 4)));
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[4 * i + e] = r[e];
    }
  }
  // a[step * kM + block].
  FV_DEVICE void decode_values(uint32 (&a)[4][4], const uint32 (&raw)[16]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Kv::kBytes == 2) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = raw[4 * i + e];
      } else {
        // Both halves of the keys lie side by side in every arrangement above.
        Kv::decode_far(raw[2 * i], a[i][0], a[i][1]);
        Kv::decode_far(raw[2 * i + 1], a[i][2], a[i][3]);
      }
    }
  }

  // `add` false: the first products of a split, which replace what o holds.
  FV_DEVICE void multiply_values(uint32 (&raw)[16], uint32 slot, int batch, bool add) {
    uint32(&a)[4][4] = operand[batch & 1];
    decode_values(a, raw);
    if (batch + 1 < Shape::kBatchesPv) load_values(raw, slot, batch + 1);
    const uint32 source =
        Values::handle(base + Shape::kPOffset + p_buffer +
                       (Shape::kKeySplit ? (warp >> 2) * 8 * Shape::kColumnBytes : 0));
    Values::begin();
    add_products(a, source, batch, add);
    if constexpr (!Shape::kLegacy) {
      add_products(a, source + Shape::kPBytes / Values::kHandleBytes, batch, true);  // P_lo
    }
    Values::template end<1>();
  }
  FV_DEVICE void add_products(uint32 (&a)[4][4], uint32 source, int batch, bool add) {
#pragma unroll
    for (int i = 0; i < Shape::kStepsPerBatch; ++i) {
      const int step = batch * Shape::kStepsPerBatch + i;
      Values::template run_blocks<kM>(
          o, a, i * kM, source + step * 2 * Shape::kColumnBytes / Values::kHandleBytes, lane,
          add || i > 0);
    }
  }
  FV_DEVICE void wait_products() { Values::wait(); }

  // ---- softmax --------------------------------------------------------------

  FV_DEVICE static void clear(float (&v)[kRows][4]) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) v[j][e] = 0.0f;
    }
  }
  FV_DEVICE void clear_sums() {
#pragma unroll
    for (int j = 0; j < kRows; ++j) sum[j][0] = sum[j][1] = 0.0f;
  }
  FV_DEVICE void clear_products() {
#pragma unroll
    for (int m = 0; m < kM; ++m) clear(o[m]);
  }
  FV_DEVICE void clear_split_sum() {
#pragma unroll
    for (int m = 0; m < kM; ++m) clear(split_sum[m]);
  }
  FV_DEVICE void clear_group_sum() {
    if constexpr (Shape::kFoldsGroups) {
#pragma unroll
      for (int m = 0; m < kM; ++m) clear(group_sum[m]);
    }
  }

  // Caps the scores: through the P buffer that is free now, so that it is a loop.
  FV_DEVICE void cap_scores() {
    float* const own =
        reinterpret_cast<float*>(smem + Shape::kPOffset + (p_buffer ^ (2 * Shape::kPBytes))) +
        thread();
    static_assert(4 * kRows * kConsumers * 4 <= 2 * Shape::kPBytes, "all scores in one buffer");
#pragma unroll
    for (int i = 0; i < 4 * kRows; ++i) own[i * kConsumers] = score[i >> 2][i & 3];
#pragma unroll 4
    for (int i = 0; i < 4 * kRows; ++i) {
      // tanh(x) = 1 - 2 / (exp(2 x) + 1); the argument comes times 2 log2(e).
      const float cap = p.softcap * kLog2e;
      const float x = own[i * kConsumers];
      own[i * kConsumers] = cap - __fdividef(2.0f * cap, exp2_approx(x * precap) + 1.0f);
    }
#pragma unroll
    for (int i = 0; i < 4 * kRows; ++i) score[i >> 2][i & 3] = own[i * kConsumers];
  }
  // In registers: by a loop, through shared memory, the last tile was 1 us later.
  FV_DEVICE void mask_scores(int first_key) {
    const int key = first_key + 16 * warp + g;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int4 v = *reinterpret_cast<const int4*>(&rows.visible[8 * j + 2 * t]);  // two rows'
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = key + 4 * (e & 2);
        if (k < ((e & 1) ? v.z : v.x) || k >= ((e & 1) ? v.w : v.y)) score[j][e] = -kInfinity;
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
    if (FV_UNLIKELY(p.softcap > 0.0f)) cap_scores();
    if (FV_UNLIKELY(partial)) mask_scores(first_key);
  }

  // True where some row needs a new reference. One that has seen no key has
  // kUnset, which every score that is not masked exceeds.
  FV_DEVICE bool exceeds() const {
    float top[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        top[e] = fmaxf(top[e], fmaf(score[j][e], factor, minus_reference[j][e & 1]));
      }
    }
    return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])) > kReferenceSlack;
  }

  // New references, in three steps with a barrier after each of the first two:
  // the tile's maximum of every row, to shared memory;
  FV_DEVICE void publish_max() {
    float v[2 * kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      v[2 * j] = fmaxf(score[j][0], score[j][2]) * factor;
      v[2 * j + 1] = fmaxf(score[j][1], score[j][3]) * factor;
    }
    reduce_over_keys<true>(v, lane, [&](int i, float x) {
      atomicMax(&rows.tile_max[8 * (i >> 1) + 2 * t + (i & 1)], ordered(x));
    });
  }
  // each row's decision, by one thread;
  FV_DEVICE void decide_references(bool fresh) {
    if (thread() >= Shape::kTileRows) return;
    const float top = from_ordered(rows.tile_max[thread()]);
    rows.tile_max[thread()] = kOrderedMinusInfinity;
    const float old = fresh ? kUnset : rows.minus_reference[thread()];
    const bool moves = top > -kInfinity && (old == kUnset || top + old > kReferenceSlack);
    rows.moved[thread()] = moves && old != kUnset ? exp2_approx(-top - old) : 1.0f;
    rows.minus_reference[thread()] = moves ? -top : old;
  }
  // and everybody's sums follow it.
  FV_DEVICE void take_references(bool fresh) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float2 r = *reinterpret_cast<const float2*>(&rows.minus_reference[8 * j + 2 * t]);
      minus_reference[j][0] = r.x;
      minus_reference[j][1] = r.y;
    }
    if (fresh) {
      clear_sums();
      return;
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(&rows.moved[8 * j + 2 * t]);
      sum[j][0] *= f.x;
      sum[j][1] *= f.y;
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        o[i][j][0] *= f.x;
        o[i][j][1] *= f.y;
        o[i][j][2] *= f.x;
        o[i][j][3] *= f.y;
      }
    }
  }

  // Row block j's probabilities, P_hi and P_lo, into the buffer that P V does not
  // read now.
  FV_DEVICE void exponentiate(int j) {
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      y[e] = exp2_approx(fmaf(score[j][e], factor, minus_reference[j][e & 1]));
    }
    sum[j][0] += y[0] + y[2];
    sum[j][1] += y[1] + y[3];
    const uint32 high0 = pack_operand2<Kv>(y[0], y[1]);
    const uint32 high1 = pack_operand2<Kv>(y[2], y[3]);
    unsigned char* target = smem + Shape::kPOffset + (p_buffer ^ (2 * Shape::kPBytes)) +
                            (2 * warp * kRows + j) * 128 + g * 16 + t * 4;
    *reinterpret_cast<uint32*>(target) = high0;
    *reinterpret_cast<uint32*>(target + Shape::kColumnBytes) = high1;
    if constexpr (!Shape::kLegacy) {
      const float2 f0 = unpack_operand2<Kv>(high0);
      const float2 f1 = unpack_operand2<Kv>(high1);
      target += Shape::kPBytes;
      *reinterpret_cast<uint32*>(target) = pack_operand2<Kv>(y[0] - f0.x, y[1] - f0.y);
      *reinterpret_cast<uint32*>(target + Shape::kColumnBytes) =
          pack_operand2<Kv>(y[2] - f1.x, y[3] - f1.y);
    }
  }
  template <int kBegin, int kEnd>
  FV_DEVICE void exponentiate_blocks() {
#pragma unroll
    for (int j = kBegin; j < kEnd; ++j) exponentiate(j);
  }
  FV_DEVICE void swap_probabilities() { p_buffer ^= 2 * Shape::kPBytes; }

  // ---- ends of splits -------------------------------------------------------

  // Step 1, when the split's last products are there; a barrier follows.
  FV_DEVICE void publish_split() {
    float v[2 * kRows];
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) v[i] = sum[i >> 1][i & 1];
    float* const target = rows.warp_sum[warp];
    reduce_over_keys<false>(v, lane,
                            [&](int i, float x) { target[8 * (i >> 1) + 2 * t + (i & 1)] = x; });
    if constexpr (Shape::kKeySplit) {
      if (warp >= 4) {
        float4* const exchange = reinterpret_cast<float4*>(smem + Shape::kExchangeOffset);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int j = 0; j < kRows; ++j) {
            exchange[(m * kRows + j) * 128 + (thread() & 127)] =
                make_float4(o[m][j][0], o[m][j][1], o[m][j][2], o[m][j][3]);
          }
        }
      }
    }
  }

  // The ended split's state of a row.
  FV_DEVICE float2 split_state(int row) const {
    float l = 0.0f;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) l += rows.warp_sum[w][row];
    return make_float2(l == 0.0f ? -kInfinity : -rows.minus_reference[row], l);
  }

  // Step 2, one thread per row; a barrier follows.
  FV_DEVICE void fold_split_stats(bool ends_group, float2* stats) {
    if (thread() >= Shape::kTileRows) return;
    const int row = thread();
    const float2 split = split_state(row);
    const float m = split.x;
    const float l = split.y;
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
    reset_chain(row);
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

  // Step 3. o itself stays as it is: writing an accumulator here, in a branch,
  // would make the compiler serialise the products around it.
  // `poison`: per d, the rows that attend a non-finite value; null: none.
  FV_DEVICE void finish_split(float (&v)[kM][kRows][4], const uint64* poison) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[m][j][e] = o[m][j][e];
        if constexpr (Shape::kKeySplit) {
          const float4 other = reinterpret_cast<const float4*>(
              smem + Shape::kExchangeOffset)[(m * kRows + j) * 128 + (thread() & 127)];
          v[m][j][0] += other.x;
          v[m][j][1] += other.y;
          v[m][j][2] += other.z;
          v[m][j][3] += other.w;
        }
      }
    }
    if (FV_UNLIKELY(poison != nullptr)) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const int block = (Shape::kKeySplit ? warp & 3 : warp) * kM + m;
          const uint64 bits = poison[fragment_column<Shape>(block, g, second)] >> (2 * t);
#pragma unroll
          for (int j = 0; j < kRows; ++j) {
            if (bits >> (8 * j) & 1) v[m][j][2 * second] = __int_as_float(0x7fffffff);
            if (bits >> (8 * j + 1) & 1) v[m][j][2 * second + 1] = __int_as_float(0x7fffffff);
          }
        }
      }
    }
  }
  FV_DEVICE void fold_split(bool ends_group, const uint64* poison) {
    float v[kM][kRows][4];
    finish_split(v, poison);
    fold_into(split_sum, v, rows.split_factors);
    if constexpr (Shape::kFoldsGroups) {
      if (ends_group && p.fold == p.splits) {
        fold_into(group_sum, split_sum, rows.group_factors);
        clear_split_sum();
      }
    }
  }
  FV_DEVICE void fold_into(float (&into)[kM][kRows][4], const float (&from)[kM][kRows][4],
                           const float2* factors) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float4 f = *reinterpret_cast<const float4*>(&factors[8 * j + 2 * t]);
      const FoldFactors even = {f.x, f.y};
      const FoldFactors odd = {f.z, f.w};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          into[m][j][e] = fold_value(into[m][j][e], from[m][j][e], (e & 1) ? odd : even);
        }
      }
    }
  }

  // The accumulators as a partial, in the order in which they lie in registers.
  FV_DEVICE void store_partial(unsigned char* target, const float (&v)[kM][kRows][4]) const {
    if (!owner()) return;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(&rows.output_factor[8 * j + 2 * t]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int index = (m * kRows + j) * Shape::kOwners + thread();
        const float (&x)[4] = v[m][j];
        if constexpr (Shape::kLegacy) {
          __stcg(
              reinterpret_cast<uint2*>(target) + index,
              make_uint2(pack_half2(x[0] * f.x, x[1] * f.y), pack_half2(x[2] * f.x, x[3] * f.y)));
        } else {
          __stcg(reinterpret_cast<float4*>(target) + index, make_float4(x[0], x[1], x[2], x[3]));
        }
      }
    }
  }
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_CONSUMER_CUH_
