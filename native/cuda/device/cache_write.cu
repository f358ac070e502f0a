// append_kv: one warp per token and head, key and value.
#include "native/cuda/device/cache_codec.cuh"

namespace flashverify::cuda {

template <class Codec>
FV_DEVICE void append(const AppendArgs& p) {
  const int lane = threadIdx.x & 31;
  const int64 warp = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
  const int64 token = warp / p.kv_heads;
  const int head = static_cast<int>(warp % p.kv_heads);
  if (token >= p.tokens) return;
  const int64 slot = p.slots_are_int64
                         ? reinterpret_cast<const int64*>(p.slots)[token * p.slot_stride]
                         : reinterpret_cast<const int*>(p.slots)[token * p.slot_stride];
  if (slot < 0) return;
  if (slot >= p.slot_count) {
    if (lane == 0) atomicOr(p.status, kStatusSlotOutOfRange);
    return;
  }
  const int64 page = slot / p.page_size;
  const int64 offset = slot % p.page_size;
  const int bytes = element_bytes(p.source_type);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const Cache& cache = p.cache[which];
    const float scale = p.scale[which] == nullptr ? p.scale_number[which]
                                                  : p.scale[which][head * p.scale_stride[which]];
    const unsigned char* source =
        p.source[which] + token * p.token_stride[which] + head * p.head_stride[which];
    unsigned char* target = const_cast<unsigned char*>(cache.data) + page * cache.page_stride +
                            offset * cache.token_stride + head * cache.head_stride;
    for (int d = lane; d < p.head_dim; d += 32) {
      Codec::store(target, d, __fdiv_rn(load_element(source + d * bytes, p.source_type), scale));
    }
  }
}

}  // namespace flashverify::cuda

using namespace flashverify::cuda;

#define FV_APPEND(name, codec)                                    \
  extern "C" __global__ void __launch_bounds__(256)               \
      append_kv_##name(const __grid_constant__ AppendArgs args) { \
    append<codec>(args);                                          \
  }

FV_APPEND(e4m3, E4m3Codec)
FV_APPEND(e5m2, E5m2Codec)
FV_APPEND(f16, HalfCodec)
FV_APPEND(bf16, BfloatCodec)
