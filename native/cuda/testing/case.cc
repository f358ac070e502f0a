#include "native/cuda/testing/case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

namespace flashverify::cuda::testing {
namespace {

int bytes_of(fv_dtype type) {
  return type == FV_DTYPE_FLOAT32                                ? 4
         : type == FV_DTYPE_FLOAT16 || type == FV_DTYPE_BFLOAT16 ? 2
                                                                 : 1;
}
template <class T>
T* host_view(DevicePointer p) {
  return reinterpret_cast<T*>(p);
}

// The arguments of harness.cu.
struct CacheLayout {
  DevicePointer data[2];
  int64_t page_stride, token_stride, head_stride;
  DevicePointer table;
  int max_pages, page_size, kv_heads, head_dim, type;
};
struct ReferenceArgs {
  CacheLayout cache;
  DevicePointer q;
  int q_type, q_heads, request, first_row, query_len, length, causal, window;
  double scale, softcap, k_scale, v_scale;
  DevicePointer sinks, scores, out, lse;
};

// Rounds to FP16 or BF16, to nearest even.
double rounded(double v, fv_dtype type) {
  if (type == FV_DTYPE_FLOAT32) return static_cast<double>(static_cast<float>(v));
  if (v == 0.0 || !std::isfinite(v)) return v;
  const int bits = type == FV_DTYPE_FLOAT16 ? 11 : 8;
  const int lowest = type == FV_DTYPE_FLOAT16 ? -14 : -126;
  int exponent = 0;
  std::frexp(v, &exponent);
  const double ulp = std::ldexp(1.0, std::max(exponent - 1, lowest) - (bits - 1));
  return std::nearbyint(v / ulp) * ulp;
}

}  // namespace

double to_double(const unsigned char* p, fv_dtype type) {
  if (type == FV_DTYPE_FLOAT32) {
    float v;
    std::memcpy(&v, p, 4);
    return static_cast<double>(v);
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  const double sign = bits >> 15 ? -1.0 : 1.0;
  const int mantissa_bits = type == FV_DTYPE_FLOAT16 ? 10 : 7;
  const int exponent_mask = type == FV_DTYPE_FLOAT16 ? 31 : 255;
  const int bias = type == FV_DTYPE_FLOAT16 ? 15 : 127;
  const int exponent = bits >> mantissa_bits & exponent_mask;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  if (exponent == exponent_mask) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

Case::Case(Gpu& gpu, CaseSpec spec) : gpu_(gpu), spec_(std::move(spec)) {
  const int batch = static_cast<int>(spec_.lengths.size());
  starts_.assign(1, 0);
  for (const int q : spec_.query_lens) starts_.push_back(starts_.back() + q);
  rows_ = starts_.back();
  const int longest =
      std::max(*std::max_element(spec_.lengths.begin(), spec_.lengths.end()), spec_.capacity);
  max_pages_ = std::max((longest + spec_.page_size - 1) / spec_.page_size, 1);
  pages_ = batch * max_pages_;
  token_bytes_ =
      int64_t{spec_.kv_heads} * spec_.head_dim * bytes_of(spec_.kv_type) + spec_.token_padding;
  page_bytes_ = 2 * spec_.page_size * token_bytes_;  // K tokens, then V tokens
  cache_bytes_ = static_cast<size_t>(pages_ * page_bytes_);
  cache_ = gpu_.allocate(cache_bytes_);
  gpu_.fill(cache_, 0x7f, cache_bytes_);  // NaN codes wherever no token lies
  table_.resize(static_cast<size_t>(pages_));
  std::iota(table_.begin(), table_.end(), 0);
  std::mt19937_64 random(spec_.page_seed);
  std::shuffle(table_.begin(), table_.end(), random);
  table_device_ = gpu_.allocate(table_.size() * 4);
  gpu_.to_device(table_device_, table_.data(), table_.size() * 4);
  lengths_device_ = gpu_.allocate(static_cast<size_t>(batch) * 4);
  gpu_.to_device(lengths_device_, spec_.lengths.data(), static_cast<size_t>(batch) * 4);
  starts_device_ = gpu_.allocate(starts_.size() * 4);
  gpu_.to_device(starts_device_, starts_.data(), starts_.size() * 4);
  const size_t elements = static_cast<size_t>(rows_) * spec_.q_heads * spec_.head_dim;
  q_ = gpu_.allocate(elements * 4);
  out_ = gpu_.allocate(elements * 4);
  lse_ = gpu_.allocate(static_cast<size_t>(rows_) * spec_.q_heads * 4);
  std::vector<float> sinks;
  for (int i = 0; i < spec_.q_heads; ++i) sinks.push_back(0.5f * static_cast<float>(i % 5) - 1.0f);
  sinks_ = gpu_.allocate(sinks.size() * 4);
  gpu_.to_device(sinks_, sinks.data(), sinks.size() * 4);
  const float scales[2] = {spec_.k_scale, spec_.v_scale};
  scales_ = gpu_.allocate(8);
  gpu_.to_device(scales_, scales, 8);
  gpu_.synchronize();

  CacheLayout layout = {};
  layout.data[0] = cache_;
  layout.data[1] = cache_ + static_cast<DevicePointer>(spec_.page_size * token_bytes_);
  layout.page_stride = page_bytes_;
  layout.token_stride = token_bytes_;
  layout.head_stride = spec_.head_dim * bytes_of(spec_.kv_type);
  layout.table = table_device_;
  layout.max_pages = max_pages_;
  layout.page_size = spec_.page_size;
  layout.kv_heads = spec_.kv_heads;
  layout.head_dim = spec_.head_dim;
  layout.type = spec_.kv_type;
  for (int b = 0; b < batch; ++b) {
    int request = b, content = b, length = std::max(spec_.lengths[static_cast<size_t>(b)], 0);
    if (length > max_pages_ * spec_.page_size) continue;
    void* arguments[] = {&layout, &request, &content, &length, &spec_.seed};
    if (length > 0) gpu_.launch("harness_fill_cache", 2048, 1, 256, arguments);
  }
  long long count = static_cast<long long>(elements);
  int type = spec_.q_type;
  void* arguments[] = {&q_, &count, &type, &spec_.seed, &spec_.q_scale};
  gpu_.launch("harness_fill", 512, 1, 256, arguments);
  Target target;
  target.image = spec_.image;
  AttentionPlan plan;
  require(plan_attention(problem(), target, &plan));
  workspace_bytes_ = plan.workspace_bytes * 2 + (size_t{64} << 20);  // other plans fit too
  workspace_ = gpu_.allocate(workspace_bytes_);
  gpu_.fill(workspace_, 0xff, workspace_bytes_);
  poison_output();
  gpu_.synchronize();
}

Case::~Case() {
  for (const DevicePointer p : {cache_, table_device_, lengths_device_, starts_device_, q_, out_,
                                lse_, workspace_, sinks_, scales_}) {
    gpu_.release(p);
  }
}

void Case::poison_output() {
  gpu_.fill(out_, 0x7d, static_cast<size_t>(rows_) * spec_.q_heads * spec_.head_dim * 4);
  gpu_.fill(lse_, 0x7d, static_cast<size_t>(rows_) * spec_.q_heads * 4);
}

AttentionProblem Case::problem() const {
  AttentionProblem p;
  p.route = spec_.route;
  p.rows = rows_;
  p.batch = static_cast<int64_t>(spec_.lengths.size());
  p.q_heads = spec_.q_heads;
  p.kv_heads = spec_.kv_heads;
  p.head_dim = spec_.head_dim;
  p.pages = pages_;
  p.page_size = spec_.page_size;
  p.max_pages = max_pages_;
  p.q_dtype = spec_.q_type;
  p.q = host_view<void>(q_);
  p.q_head_stride = spec_.head_dim;
  p.q_row_stride = int64_t{spec_.q_heads} * spec_.head_dim;
  p.kv_dtype = spec_.kv_type;
  const int bytes = bytes_of(spec_.kv_type);
  for (CacheView* view : {&p.k, &p.v}) {
    view->page_stride = page_bytes_ / bytes;
    view->token_stride = token_bytes_ / bytes;
    view->head_stride = spec_.head_dim;
  }
  p.k.data = host_view<void>(cache_);
  p.v.data = host_view<void>(cache_ + static_cast<DevicePointer>(spec_.page_size * token_bytes_));
  p.page_table = host_view<int32_t>(table_device_);
  p.page_table_row_stride = max_pages_;
  p.seq_lens = host_view<int32_t>(lengths_device_);
  const bool equal = std::adjacent_find(spec_.query_lens.begin(), spec_.query_lens.end(),
                                        std::not_equal_to<int>()) == spec_.query_lens.end();
  if (!equal || spec_.force_query_start) p.query_start_loc = host_view<int32_t>(starts_device_);
  p.k_scale.data = host_view<float>(scales_);
  p.v_scale.data = host_view<float>(scales_ + 4);
  if (spec_.sinks) p.sinks = host_view<float>(sinks_);
  p.out_dtype = spec_.out_type;
  p.out = host_view<void>(out_);
  p.out_head_stride = spec_.head_dim;
  p.out_row_stride = int64_t{spec_.q_heads} * spec_.head_dim;
  p.lse = host_view<float>(lse_);
  p.lse_row_stride = spec_.q_heads;
  p.lse_head_stride = 1;
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(spec_.head_dim));
  p.softcap = spec_.softcap;
  p.causal = spec_.causal;
  p.window = spec_.window;
  return p;
}

DevicePointer Case::element(int which, int request, int position, int head, int d) const {
  const int page = table_[static_cast<size_t>(request * max_pages_ + position / spec_.page_size)];
  return cache_ +
         static_cast<DevicePointer>(page * page_bytes_ + which * spec_.page_size * token_bytes_ +
                                    position % spec_.page_size * token_bytes_ +
                                    (head * spec_.head_dim + d) * bytes_of(spec_.kv_type));
}

void Case::set_length(int request, int length) {
  spec_.lengths[static_cast<size_t>(request)] = length;
  gpu_.synchronize();
  gpu_.to_device(lengths_device_ + static_cast<DevicePointer>(request) * 4, &length, 4);
  expected_.clear();
}

void Case::copy_query(const Case& other, int row) {
  const size_t bytes = static_cast<size_t>(spec_.q_heads * spec_.head_dim * bytes_of(spec_.q_type));
  std::vector<unsigned char> buffer(bytes);
  gpu_.to_host(buffer.data(), other.q_ + static_cast<DevicePointer>(row) * bytes, bytes);
  gpu_.to_device(q_, buffer.data(), bytes);
  expected_.clear();
}

void Case::run(Target target) {
  target.stream = gpu_.stream;
  if (target.image.empty()) target.image = spec_.image;
  AttentionPlan plan;
  require(plan_attention(problem(), target, &plan));
  if (plan.workspace_bytes > workspace_bytes_) {
    require(Status::error(FV_ERROR_WORKSPACE_TOO_SMALL, "this plan needs a larger workspace"));
  }
  fv_route ran = FV_ROUTE_NONE;
  const char* image = "";
  require(run_attention(problem(), target, plan, host_view<void>(workspace_), &ran, &image));
  image_ = image;
}

uint32_t Case::status() {
  gpu_.synchronize();
  uint32_t bits = 0;
  require(read_status({}, host_view<void>(workspace_), &bits));
  return bits;
}

void Case::reference() {
  if (!expected_.empty()) return;
  const size_t elements = static_cast<size_t>(rows_) * spec_.q_heads * spec_.head_dim;
  const size_t row_heads = static_cast<size_t>(rows_) * spec_.q_heads;
  DevicePointer out = gpu_.allocate(elements * 8);
  DevicePointer lse = gpu_.allocate(row_heads * 8);
  gpu_.fill(out, 0, elements * 8);
  ReferenceArgs a = {};
  a.cache.data[0] = cache_;
  a.cache.data[1] = cache_ + static_cast<DevicePointer>(spec_.page_size * token_bytes_);
  a.cache.page_stride = page_bytes_;
  a.cache.token_stride = token_bytes_;
  a.cache.head_stride = spec_.head_dim * bytes_of(spec_.kv_type);
  a.cache.table = table_device_;
  a.cache.max_pages = max_pages_;
  a.cache.page_size = spec_.page_size;
  a.cache.kv_heads = spec_.kv_heads;
  a.cache.head_dim = spec_.head_dim;
  a.cache.type = spec_.kv_type;
  a.q = q_;
  a.q_type = spec_.q_type;
  a.q_heads = spec_.q_heads;
  a.causal = spec_.causal;
  a.window = spec_.window;
  a.scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(spec_.head_dim)));
  a.softcap = static_cast<double>(spec_.softcap);
  a.k_scale = static_cast<double>(spec_.k_scale);
  a.v_scale = static_cast<double>(spec_.v_scale);
  a.sinks = spec_.sinks ? sinks_ : 0;
  a.out = out;
  a.lse = lse;
  for (size_t b = 0; b < spec_.lengths.size(); ++b) {
    a.request = static_cast<int>(b);
    a.first_row = starts_[b];
    a.query_len = spec_.query_lens[b];
    a.length = std::max(spec_.lengths[b], 0);
    const unsigned rows = static_cast<unsigned>(a.query_len * spec_.q_heads);
    if (rows == 0) continue;
    DevicePointer scores = gpu_.allocate(size_t{rows} * static_cast<size_t>(a.length) * 8);
    a.scores = scores;
    void* arguments[] = {&a};
    if (a.length > 0) {
      gpu_.launch("harness_scores", static_cast<unsigned>(a.length + 255) / 256, rows, 256,
                  arguments);
    }
    gpu_.launch("harness_softmax", rows, 1, 256, arguments);
    if (a.length > 0) {
      gpu_.launch("harness_output", rows, std::max(1u, static_cast<unsigned>(a.length) / 4096),
                  static_cast<unsigned>(spec_.head_dim), arguments);
    }
    gpu_.synchronize();
    gpu_.release(scores);
  }
  expected_.resize(elements);
  expected_lse_.resize(row_heads);
  gpu_.to_host(expected_.data(), out, elements * 8);
  gpu_.to_host(expected_lse_.data(), lse, row_heads * 8);
  gpu_.release(out);
  gpu_.release(lse);
}

std::vector<unsigned char> Case::output_bytes() {
  std::vector<unsigned char> bytes(static_cast<size_t>(rows_) * spec_.q_heads * spec_.head_dim *
                                   bytes_of(spec_.out_type));
  gpu_.to_host(bytes.data(), out_, bytes.size());
  return bytes;
}
std::vector<float> Case::lse() {
  std::vector<float> values(static_cast<size_t>(rows_) * spec_.q_heads);
  gpu_.to_host(values.data(), lse_, values.size() * 4);
  return values;
}

Case::Error Case::compare() {
  reference();
  const std::vector<unsigned char> bytes = output_bytes();
  const std::vector<float> lses = lse();
  Error error;
  double difference = 0, norm = 0, floor = 0;
  const size_t dim = static_cast<size_t>(spec_.head_dim);
  for (size_t row = 0; row < expected_lse_.size(); ++row) {
    double row_difference = 0, row_norm = 0;
    for (size_t d = 0; d < dim; ++d) {
      const double x = expected_[row * dim + d];
      const double y =
          to_double(&bytes[(row * dim + d) * bytes_of(spec_.out_type)], spec_.out_type);
      if (!std::isfinite(y)) error.finite = false;
      row_difference += (x - y) * (x - y);
      row_norm += x * x;
      floor += (rounded(x, spec_.out_type) - x) * (rounded(x, spec_.out_type) - x);
    }
    if (row_norm > 0)
      error.worst_row = std::max(error.worst_row, std::sqrt(row_difference / row_norm));
    if (row_norm == 0 && row_difference > 0) error.worst_row = INFINITY;
    difference += row_difference;
    norm += row_norm;
    const double l = static_cast<double>(lses[row]);
    if (std::isinf(expected_lse_[row]) || std::isinf(l)) {
      if (l != expected_lse_[row]) error.lse = INFINITY;
    } else {
      error.lse = std::max(error.lse, std::fabs(l - expected_lse_[row]));
      if (std::isnan(l)) error.lse = INFINITY;
    }
  }
  error.relative = norm > 0 ? std::sqrt(difference / norm) : difference;
  error.floor = norm > 0 ? std::sqrt(floor / norm) : 0;
  return error;
}

}  // namespace flashverify::cuda::testing
