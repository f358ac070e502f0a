// Query rows on their way into shared memory, and what is kept per row.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_QUERY_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_QUERY_CUH_

#include "native/cuda/device/grouped_shape.cuh"
#include "native/cuda/device/state.cuh"
#include "native/cuda/device/work.cuh"

namespace flashverify::cuda {

FV_DEVICE const unsigned char* query_row(const AttentionArgs& p, const RowTile& tile, int head,
                                         int row) {
  const int index = tile.first + min_of(row, tile.count - 1);
  const int token = token_of(p, index);
  return p.q + (tile.first_row + token) * p.q_row_stride +
         (head * p.group + index - token * p.group) * p.q_head_stride;
}

template <class Shape>
FV_DEVICE void set_up_row(const AttentionArgs& p, RowState<Shape::kTileRows>& rows,
                          const RowTile& tile, int row) {
  const bool valid = row < tile.count;
  const Visible v =
      visible_keys(p, tile.seq_len, tile.query_len, token_of(p, tile.first + (valid ? row : 0)));
  rows.visible[row] = valid ? make_int2(v.begin, min_of(v.end, tile.seq_len)) : make_int2(0, 0);
  rows.tile_max[row] = kOrderedMinusInfinity;
  rows.split_max[row] = -kInfinity;
  rows.split_sum[row] = 0.0f;
  rows.group_max[row] = -kInfinity;
  rows.group_sum[row] = 0.0f;
}

// Operand A's pairs (2t, 2t + 1) and (2t + 8, 2t + 9) hold d = 4t .. 4t + 3 of an
// FP8 cache, in the order in which the decode gives them.
template <class Shape>
FV_DEVICE void store_query_pairs(unsigned char* smem, uint32 first, uint32 second, int row, int d) {
  unsigned char* target = smem + Shape::kQOffset + (row >> 3) * 128 + (row & 7) * 16;
  if constexpr (Shape::kPairsApart) {
    target += (d >> 4) * 2 * Shape::kColumnBytes + (d & 15);
    *reinterpret_cast<uint32*>(target) = first;
    *reinterpret_cast<uint32*>(target + Shape::kColumnBytes) = second;
  } else {
    target += (d >> 3) * Shape::kColumnBytes + (d & 7) * 2;
    *reinterpret_cast<uint2*>(target) = make_uint2(first, second);
  }
}

// Query rows of any type and alignment, rounded to the operand's type. What lies
// outside its range becomes infinite, and its row NaN.
template <class Shape>
FV_RARE void load_any_queries(const AttentionArgs& p, unsigned char* smem, RowTile tile, int head,
                              bool flip) {
  using Kv = typename Shape::Kv;
  const int bytes = element_bytes(p.q_type);
  constexpr int kQuads = Shape::kDim / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kTileRows * kQuads; i += kConsumers) {
    const int row = i / kQuads;
    const int d = i % kQuads * 4;
    const unsigned char* source = query_row(p, tile, head, row) + d * bytes;
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (row < tile.count && d < p.head_dim) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = load_element(source + e * bytes, p.q_type);
        v[e] = flip ? -x : x;
      }
    }
    const float second = Kv::kNearIsNative ? v[1] : v[2];
    const float third = Kv::kNearIsNative ? v[2] : v[1];
    store_query_pairs<Shape>(smem, pack_operand2<Kv>(v[0], second), pack_operand2<Kv>(third, v[3]),
                             row, d);
  }
}

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_GROUPED_QUERY_CUH_
