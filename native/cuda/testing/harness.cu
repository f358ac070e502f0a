// Test data, an FP64 reference, and a plain read, for the tests and benchmarks
// of this folder. Independent of the kernels under test, the codec included.
namespace {

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;

__device__ double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }

__device__ uint32 hash(uint64 x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32>(x);
}
// Standard normal, a function of (index, seed).
__device__ float normal(uint64 index, uint64 seed) {
  const float u = (hash(index * 2 + seed * 0x9e3779b97f4a7c15ull) + 0.5f) * 2.3283064e-10f;
  const float v = hash(index * 2 + 1 + seed * 0x9e3779b97f4a7c15ull) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fmaxf(u, 1e-10f))) * cosf(6.2831853f * v);
}

// fv_dtype numbers.
enum { kF32 = 1, kF16 = 2, kBf16 = 3, kE4m3 = 4, kE5m2 = 5 };

__device__ int bytes_of(int type) { return type == kF32 ? 4 : type <= kBf16 ? 2 : 1; }

__device__ double minifloat(int code, int exponent_bits, int mantissa_bits, int bias) {
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const double sign = code >> (mantissa_bits + exponent_bits) & 1 ? -1.0 : 1.0;
  const double scale = exp2(static_cast<double>(-mantissa_bits));
  if (exponent == 0) return sign * mantissa * scale * exp2(1.0 - bias);
  return sign * (1.0 + mantissa * scale) * exp2(static_cast<double>(exponent - bias));
}
__device__ double decode(const unsigned char* p, int type) {
  const double nan = __longlong_as_double(0x7ff8000000000000ll);
  switch (type) {
    case kF32:
      return *reinterpret_cast<const float*>(p);
    case kF16: {
      const int code = *reinterpret_cast<const unsigned short*>(p);
      if ((code & 0x7c00) == 0x7c00) return nan;
      return minifloat(code, 5, 10, 15);
    }
    case kBf16: {
      const int code = *reinterpret_cast<const unsigned short*>(p);
      if ((code & 0x7f80) == 0x7f80) return nan;
      return minifloat(code, 8, 7, 127);
    }
    case kE4m3:
      return (*p & 0x7f) == 0x7f ? nan : minifloat(*p, 4, 3, 7);
    default:
      return (*p & 0x7c) == 0x7c ? nan : minifloat(*p, 5, 2, 15);
  }
}
__device__ void encode(unsigned char* p, int type, float v) {
  if (type == kF32) {
    *reinterpret_cast<float*>(p) = v;
  } else if (type == kF16) {
    unsigned short r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    *reinterpret_cast<unsigned short*>(p) = r;
  } else if (type == kBf16) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    *reinterpret_cast<unsigned short*>(p) = r;
  } else {
    unsigned short r;
    if (type == kE4m3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(r) : "f"(v));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %1;" : "=h"(r) : "f"(v));
    }
    *p = static_cast<unsigned char>(r);
  }
}

}  // namespace

struct CacheLayout {
  unsigned char* data[2];  // K, V
  int64 page_stride;       // bytes
  int64 token_stride;
  int64 head_stride;
  const int* table;
  int max_pages;
  int page_size;
  int kv_heads;
  int head_dim;
  int type;
};

__device__ unsigned char* cache_element(const CacheLayout& c, int which, int request, int position,
                                        int head, int d) {
  const int page = c.table[static_cast<int64>(request) * c.max_pages + position / c.page_size];
  return c.data[which] + page * c.page_stride + position % c.page_size * c.token_stride +
         head * c.head_stride + d * bytes_of(c.type);
}

// Token contents depend on (seed, content, position, head, d), not on the page.
extern "C" __global__ void harness_fill_cache(CacheLayout c, int request, int content, int length,
                                              uint64 seed) {
  const int64 count = static_cast<int64>(length) * c.kv_heads * c.head_dim;
  for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64>(gridDim.x) * blockDim.x) {
    const int d = static_cast<int>(i % c.head_dim);
    const int head = static_cast<int>(i / c.head_dim % c.kv_heads);
    const int position = static_cast<int>(i / c.head_dim / c.kv_heads);
    for (int which = 0; which < 2; ++which) {
      encode(cache_element(c, which, request, position, head, d), c.type,
             normal(i * 2 + which, seed + content * 7919ull));
    }
  }
}
extern "C" __global__ void harness_fill(unsigned char* p, int64 count, int type, uint64 seed,
                                        float scale) {
  for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64>(gridDim.x) * blockDim.x) {
    encode(p + i * bytes_of(type), type, scale * normal(i, seed + 12345));
  }
}

struct ReferenceArgs {
  CacheLayout cache;
  const unsigned char* q;  // contiguous [rows, q_heads, head_dim]
  int q_type;
  int q_heads;
  int request;
  int first_row;
  int query_len;
  int length;
  int causal;
  int window;
  double scale;
  double softcap;
  double k_scale;
  double v_scale;
  const float* sinks;
  double* scores;  // [query_len * q_heads, length]
  double* out;     // [rows, q_heads, head_dim], zero
  double* lse;     // [rows, q_heads]
};

extern "C" __global__ void harness_scores(ReferenceArgs a) {
  const int key = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y;
  if (key >= a.length) return;
  const int token = row / a.q_heads;
  const int head = row % a.q_heads;
  const int end = a.causal ? a.length - a.query_len + token + 1 : a.length;
  const int begin = a.window > 0 ? end - a.window : 0;
  double* const target = a.scores + static_cast<int64>(row) * a.length + key;
  if (key >= end || key < begin) {
    *target = -infinity();
    return;
  }
  const int kv_head = head / (a.q_heads / a.cache.kv_heads);
  const unsigned char* k = cache_element(a.cache, 0, a.request, key, kv_head, 0);
  const unsigned char* q = a.q + (static_cast<int64>(a.first_row + token) * a.q_heads + head) *
                                     a.cache.head_dim * bytes_of(a.q_type);
  double sum = 0.0;
  for (int d = 0; d < a.cache.head_dim; ++d) {
    sum += decode(q + d * bytes_of(a.q_type), a.q_type) *
           decode(k + d * bytes_of(a.cache.type), a.cache.type);
  }
  sum *= a.scale * a.k_scale;
  *target = a.softcap > 0 ? a.softcap * tanh(sum / a.softcap) : sum;
}

extern "C" __global__ void harness_softmax(ReferenceArgs a) {
  __shared__ double shared[256];
  const int row = blockIdx.x;
  double* const scores = a.scores + static_cast<int64>(row) * a.length;
  double value = -infinity();
  for (int i = threadIdx.x; i < a.length; i += 256) value = fmax(value, scores[i]);
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int k = 128; k > 0; k >>= 1) {
    if (threadIdx.x < k) shared[threadIdx.x] = fmax(shared[threadIdx.x], shared[threadIdx.x + k]);
    __syncthreads();
  }
  const double top = shared[0];
  __syncthreads();
  value = 0.0;
  for (int i = threadIdx.x; i < a.length; i += 256) {
    const double e = top == -infinity() ? 0.0 : exp(scores[i] - top);
    scores[i] = e;
    value += e;
  }
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int k = 128; k > 0; k >>= 1) {
    if (threadIdx.x < k) shared[threadIdx.x] += shared[threadIdx.x + k];
    __syncthreads();
  }
  double sum = shared[0];
  const int64 target =
      static_cast<int64>(a.first_row + row / a.q_heads) * a.q_heads + row % a.q_heads;
  if (top != -infinity() && a.sinks != nullptr) sum += exp(a.sinks[row % a.q_heads] - top);
  if (threadIdx.x == 0) a.lse[target] = top == -infinity() ? top : top + log(sum);
  for (int i = threadIdx.x; i < a.length; i += 256)
    scores[i] = top == -infinity() ? 0.0 : scores[i] / sum;
}

extern "C" __global__ void harness_output(ReferenceArgs a) {
  const int row = blockIdx.x;
  const int d = threadIdx.x;
  const int chunk = (a.length + gridDim.y - 1) / gridDim.y;
  const int begin = blockIdx.y * chunk;
  const int end = begin + chunk < a.length ? begin + chunk : a.length;
  const int kv_head = row % a.q_heads / (a.q_heads / a.cache.kv_heads);
  double sum = 0.0;
  for (int key = begin; key < end; ++key) {
    const double weight = a.scores[static_cast<int64>(row) * a.length + key];
    if (weight == 0.0) continue;
    sum += weight * decode(cache_element(a.cache, 1, a.request, key, kv_head, d), a.cache.type);
  }
  const int64 target =
      static_cast<int64>(a.first_row + row / a.q_heads) * a.q_heads + row % a.q_heads;
  atomicAdd(&a.out[target * a.cache.head_dim + d], sum * a.v_scale);
}

// The byte floor: the cache read once, by loads that leave L2 alone.
extern "C" __global__ void harness_read(const uint4* p, int64 count, uint32* sink) {
  uint32 x = 0;
  const int64 stride = static_cast<int64>(gridDim.x) * blockDim.x;
  int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = __ldcs(p + i);
    const uint4 b = __ldcs(p + i + stride);
    const uint4 c = __ldcs(p + i + 2 * stride);
    const uint4 d = __ldcs(p + i + 3 * stride);
    x ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^
         d.w;
  }
  for (; i < count; i += stride) {
    const uint4 a = __ldcs(p + i);
    x ^= a.x ^ a.y ^ a.z ^ a.w;
  }
  if (x == 0x12345677u) *sink = x;
}
