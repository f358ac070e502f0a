// One-line wrappers of the PTX instructions that the kernels use.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_PTX_CUH_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_PTX_CUH_

#include "native/cuda/device/args.h"

#define FV_DEVICE __device__ __forceinline__
// Moves the branch's code out of the hot path's instruction lines. A launch that
// finds L2 flushed fetches its own code from memory: what runs once must be
// short, and what runs per tile must lie together.
#define FV_RARE __device__ __noinline__
#define FV_UNLIKELY(condition) __builtin_expect(static_cast<bool>(condition), 0)

namespace flashverify::cuda {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
// The largest finite float.
constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
FV_DEVICE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
FV_DEVICE T max_of(T a, T b) {
  return a > b ? a : b;
}

FV_DEVICE uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

FV_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// {low, high} as two FP16 of one register, and back.
FV_DEVICE uint32 pack_half2(float low, float high) {
  uint32 r;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(r)
      : "f"(low), "f"(high));
#endif
  return r;
}
FV_DEVICE float2 unpack_half2(uint32 v) {
  float2 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(r.x), "=f"(r.y)
      : "r"(v));
  return r;
}
FV_DEVICE unsigned short to_half(float v) {
  unsigned short r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
FV_DEVICE float from_half(unsigned short v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}

// BF16 by integer arithmetic: round to nearest even, NaN kept.
FV_DEVICE unsigned short to_bfloat(float v) {
  const uint32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>((bits >> 16) | 0x40u);
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
FV_DEVICE float from_bfloat(unsigned short v) {
  return __uint_as_float(static_cast<uint32>(v) << 16);
}
FV_DEVICE uint32 pack_bfloat2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return static_cast<uint32>(to_bfloat(low)) | static_cast<uint32>(to_bfloat(high)) << 16;
#endif
}
FV_DEVICE float2 unpack_bfloat2(uint32 v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// One element of a query or an output, whose type is known at run time only.
FV_DEVICE float load_element(const unsigned char* p, int type) {
  if (type == kFloat32) return *reinterpret_cast<const float*>(p);
  const unsigned short bits = *reinterpret_cast<const unsigned short*>(p);
  return type == kFloat16 ? from_half(bits) : from_bfloat(bits);
}
FV_DEVICE void store_element(unsigned char* p, int type, float v) {
  if (type == kFloat32) {
    *reinterpret_cast<float*>(p) = v;
  } else {
    *reinterpret_cast<unsigned short*>(p) = type == kFloat16 ? to_half(v) : to_bfloat(v);
  }
}
FV_DEVICE int element_bytes(int type) { return type == kFloat32 ? 4 : 2; }

FV_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
FV_DEVICE bool named_barrier_or(int id, int threads, bool value) {
  int r;
  asm volatile(
      "{.reg .pred p, q; setp.ne.b32 q, %3, 0; bar.red.or.pred p, %1, %2, q; selp.b32 %0, 1, 0, p;}"
      : "=r"(r)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return r != 0;
}

#if __CUDA_ARCH__ >= 750
FV_DEVICE void load_matrix4(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
FV_DEVICE void load_matrix4_transposed(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
FV_DEVICE void load_matrix2(uint32& r0, uint32& r1, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}
FV_DEVICE void load_matrix2_transposed(uint32& r0, uint32& r1, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}
#endif

// Copies kBytes (8 or 16) to shared memory, or zeros where not `valid`; on the way
// until copy_async_wait, where the architecture can.
template <int kBytes>
FV_DEVICE void copy_async(uint32 target, const unsigned char* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(valid ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source),
                 "r"(valid ? 8 : 0)
                 : "memory");
  }
#else
  uint4 v = make_uint4(0, 0, 0, 0);
  if constexpr (kBytes == 16) {
    if (valid) v = __ldcg(reinterpret_cast<const uint4*>(source));
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  } else {
    if (valid) {
      const uint2 w = __ldcg(reinterpret_cast<const uint2*>(source));
      v.x = w.x;
      v.y = w.y;
    }
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(target), "r"(v.x), "r"(v.y) : "memory");
  }
#endif
}
FV_DEVICE void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// Ends a batch of copies; all batches but the last are waited for.
FV_DEVICE void copy_async_end_batch() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
FV_DEVICE void copy_async_wait_but_last() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

FV_DEVICE void add_release(uint32* p, uint32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
FV_DEVICE uint32 load_acquire(const uint32* p) {
  uint32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Orders this thread's accesses to shared memory before those of the tensor
// cores and the copy engine, where these have a proxy of their own.
FV_DEVICE void async_proxy_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
FV_DEVICE void mbarrier_init(uint32 address, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}
FV_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
FV_DEVICE void mbarrier_arrive(uint32 address) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(address) : "memory");
}
FV_DEVICE void mbarrier_expect(uint32 address, int bytes) {
  asm volatile(
      "{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(address),
      "r"(bytes)
      : "memory");
}
FV_DEVICE void mbarrier_wait(uint32 address, uint32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}" ::"r"(address),
      "r"(parity)
      : "memory");
}
// Copies a box [1, tokens, 1, 128 bytes] of a paged cache into shared memory.
FV_DEVICE void bulk_copy_box(uint32 target, const void* map, int byte, int head, int token,
                             int page, uint32 barrier, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(byte), "r"(head), "r"(token), "r"(page), "l"(policy)
      : "memory");
}
FV_DEVICE uint64 evict_first_policy() {
  uint64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
#endif

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_PTX_CUH_
