#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "python/bindings/api.h"
#include "python/bindings/errors.h"
#include "python/bindings/module.h"
#include "python/bindings/tensor.h"

namespace nb = nanobind;

namespace flashverify::bindings {
namespace {

constexpr ArgumentSpec kQ{"q", "float32, float16 or bfloat16 [rows, q_heads, head_dim]"};
constexpr ArgumentSpec kPageTable{"page_table", "int32 [batch, max_pages]"};
constexpr ArgumentSpec kSeqLens{"seq_lens", "int32 [batch]"};
constexpr ArgumentSpec kQueryStartLoc{"query_start_loc", "int32 [batch + 1]"};
constexpr ArgumentSpec kSinks{"sinks", "float32 [q_heads]"};
constexpr ArgumentSpec kOut{"out", "float32, float16 or bfloat16 [rows, q_heads, head_dim]"};
constexpr ArgumentSpec kLse{"lse", "float32 [rows, q_heads]"};

thread_local const char* last_image = nullptr;

// The arguments of one call, converted and held.
class AttentionCall {
 public:
  AttentionCall(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle page_table,
                nb::handle seq_lens, nb::handle query_start_loc, nb::handle sinks,
                nb::handle k_dequant_scale, nb::handle v_dequant_scale, nb::handle out,
                nb::handle lse, int32_t kv_dtype, int32_t route, double softmax_scale,
                double softcap, bool causal, int64_t window, int32_t cpu_isa, int32_t num_threads,
                uintptr_t stream, nb::handle cuda_image, int32_t splits)
      : q_(q, kQ, &device_),
        k_cache_(k_cache, kKCacheSpec, &device_, kv_dtype),
        v_cache_(v_cache, kVCacheSpec, &device_, kv_dtype),
        page_table_(page_table, kPageTable, &device_),
        seq_lens_(seq_lens, kSeqLens, &device_),
        query_start_loc_(TensorArgument::optional(query_start_loc, kQueryStartLoc, &device_)),
        sinks_(TensorArgument::optional(sinks, kSinks, &device_)),
        k_dequant_scale_(k_dequant_scale, kKScaleSpec, &device_),
        v_dequant_scale_(v_dequant_scale, kVScaleSpec, &device_),
        out_(out, kOut, &device_),
        lse_(TensorArgument::optional(lse, kLse, &device_)) {
    check_same_storage(k_cache_, v_cache_);
    params.struct_size = sizeof params;
    params.route = route;
    params.device_type = device_.type;
    params.device_index = device_.index;
    params.stream = reinterpret_cast<void*>(stream);
    params.q = q_.view();
    params.k_cache = k_cache_.view();
    params.v_cache = v_cache_.view();
    params.page_table = page_table_.view();
    params.seq_lens = seq_lens_.view();
    params.query_start_loc = query_start_loc_.view();
    params.sinks = sinks_.view();
    params.k_dequant_scale = k_dequant_scale_.view();
    params.v_dequant_scale = v_dequant_scale_.view();
    params.out = out_.view();
    params.lse = lse_.view();
    params.softmax_scale = to_float(softmax_scale, "scale");
    params.softcap = to_float(softcap, "softcap");
    params.causal = causal ? 1 : 0;
    params.window = window;
    params.num_threads = num_threads;
    // What belongs to one kind of device is left out of calls on the other.
    if (device_.type == FV_DEVICE_CUDA) {
      params.cuda_image = name_or_null(cuda_image);
      params.splits = splits;
    } else {
      params.cpu_isa = cpu_isa;
    }
  }

  fv_attention_params params{};

 private:
  CallDevice device_;
  TensorArgument q_;
  TensorArgument k_cache_;
  TensorArgument v_cache_;
  TensorArgument page_table_;
  TensorArgument seq_lens_;
  TensorArgument query_start_loc_;
  TensorArgument sinks_;
  ScaleArgument k_dequant_scale_;
  ScaleArgument v_dequant_scale_;
  TensorArgument out_;
  TensorArgument lse_;
};

int32_t paged_attention(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle page_table,
                        nb::handle seq_lens, nb::handle query_start_loc, nb::handle sinks,
                        nb::handle k_dequant_scale, nb::handle v_dequant_scale, nb::handle out,
                        nb::handle lse, int32_t kv_dtype, int32_t route, double softmax_scale,
                        double softcap, bool causal, int64_t window, int32_t cpu_isa,
                        int32_t num_threads, uintptr_t stream, nb::handle cuda_image,
                        int32_t splits, uintptr_t workspace, size_t workspace_bytes) {
  AttentionCall call(q, k_cache, v_cache, page_table, seq_lens, query_start_loc, sinks,
                     k_dequant_scale, v_dequant_scale, out, lse, kv_dtype, route, softmax_scale,
                     softcap, causal, window, cpu_isa, num_threads, stream, cuda_image, splits);
  call.params.workspace = reinterpret_cast<void*>(workspace);
  call.params.workspace_bytes = workspace_bytes;
  fv_status status;
  {
    nb::gil_scoped_release release;
    status = api().paged_attention(&call.params);
  }
  raise_unless_ok(status);
  const fv_attention_params& done = call.params;
  if (done.cpu_isa != FV_CPU_ISA_AUTO && done.ran_isa != done.cpu_isa) {
    raise_status(FV_ERROR_INTERNAL, std::string("cpu_isa: ") + api().cpu_isa_name(done.ran_isa) +
                                        " ran; accepted: " + api().cpu_isa_name(cpu_isa));
  }
  if (done.cuda_image != nullptr && done.ran_image != nullptr &&
      std::strcmp(done.ran_image, done.cuda_image) != 0) {
    raise_status(FV_ERROR_INTERNAL, std::string("cuda_image: ") + done.ran_image +
                                        " ran; accepted: " + done.cuda_image);
  }
  last_image = done.ran_image;
  return done.ran_route;
}

size_t attention_workspace_bytes(nb::handle q, nb::handle k_cache, nb::handle v_cache,
                                 nb::handle page_table, nb::handle seq_lens,
                                 nb::handle query_start_loc, nb::handle sinks,
                                 nb::handle k_dequant_scale, nb::handle v_dequant_scale,
                                 nb::handle out, nb::handle lse, int32_t kv_dtype, int32_t route,
                                 double softmax_scale, double softcap, bool causal, int64_t window,
                                 int32_t cpu_isa, int32_t num_threads, uintptr_t stream,
                                 nb::handle cuda_image, int32_t splits) {
  const AttentionCall call(q, k_cache, v_cache, page_table, seq_lens, query_start_loc, sinks,
                           k_dequant_scale, v_dequant_scale, out, lse, kv_dtype, route,
                           softmax_scale, softcap, causal, window, cpu_isa, num_threads, stream,
                           cuda_image, splits);
  size_t bytes = 0;
  raise_unless_ok(api().attention_workspace_bytes(&call.params, &bytes));
  return bytes;
}

fv_tensor shape_only(int32_t dtype, std::initializer_list<int64_t> shape) {
  fv_tensor tensor{};
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (int32_t axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.shape[axis] = shape.begin()[axis];
    tensor.stride[axis] = stride;
    // Shapes come from the caller: the library answers for absurd ones.
    if (__builtin_mul_overflow(stride, tensor.shape[axis], &stride)) stride = INT64_MAX;
  }
  return tensor;
}

size_t planned_workspace_bytes(int32_t route, int32_t device_type, int32_t device_index,
                               int32_t q_dtype, int32_t kv_dtype, int64_t batch, int64_t rows,
                               int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                               int64_t page_size, int64_t max_pages, int32_t cpu_isa,
                               int32_t num_threads, nb::handle cuda_image, int32_t splits) {
  fv_attention_params params{};
  params.struct_size = sizeof params;
  params.route = route;
  params.device_type = device_type;
  params.device_index = device_index;
  params.q = shape_only(q_dtype, {rows, q_heads, head_dim});
  params.k_cache = shape_only(kv_dtype, {1, page_size, kv_heads, head_dim});
  params.v_cache = params.k_cache;
  params.page_table = shape_only(FV_DTYPE_INT32, {batch, max_pages});
  params.out = params.q;
  params.softmax_scale = 1.0f;
  params.causal = 1;
  params.num_threads = num_threads;
  if (device_type == FV_DEVICE_CUDA) {
    params.cuda_image = name_or_null(cuda_image);
    params.splits = splits;
  } else {
    params.cpu_isa = cpu_isa;
  }
  size_t bytes = 0;
  raise_unless_ok(api().attention_workspace_bytes(&params, &bytes));
  return bytes;
}

// Query rows of the longest request; 0 where the offsets are no offsets, for the
// call itself then says what is wrong with them.
int64_t max_query_len(nb::handle query_start_loc) {
  CallDevice device;
  const TensorArgument offsets(query_start_loc, kQueryStartLoc, &device);
  const fv_tensor& view = offsets.view();
  if (device.type != FV_DEVICE_CPU || view.dtype != FV_DTYPE_INT32 || view.rank != 1 ||
      view.data == nullptr) {
    return 0;
  }
  const auto* values = static_cast<const int32_t*>(view.data);
  int64_t longest = 0;
  for (int64_t i = 1; i < view.shape[0]; ++i) {
    const int64_t length = int64_t{values[i * view.stride[0]]} - values[(i - 1) * view.stride[0]];
    longest = length > longest ? length : longest;
  }
  return longest;
}

}  // namespace

void bind_attention(nb::module_& module) {
  using nb::arg;
  module.def("paged_attention", &paged_attention, arg("q").none(), arg("k_cache").none(),
             arg("v_cache").none(), arg("page_table").none(), arg("seq_lens").none(),
             arg("query_start_loc").none(), arg("sinks").none(), arg("k_dequant_scale").none(),
             arg("v_dequant_scale").none(), arg("out").none(), arg("lse").none(), arg("kv_dtype"),
             arg("route"), arg("softmax_scale"), arg("softcap"), arg("causal"), arg("window"),
             arg("cpu_isa"), arg("num_threads"), arg("stream"), arg("cuda_image").none(),
             arg("splits"), arg("workspace"), arg("workspace_bytes"),
             "Runs one pass of attention into out and lse. Returns the fv_route that ran.\n\n"
             "kv_dtype is 0, or the fv_dtype of the caches, needed where they are uint8;\n"
             "workspace is the address of workspace_bytes bytes. The GIL is released.");
  module.def("attention_workspace_bytes", &attention_workspace_bytes, arg("q").none(),
             arg("k_cache").none(), arg("v_cache").none(), arg("page_table").none(),
             arg("seq_lens").none(), arg("query_start_loc").none(), arg("sinks").none(),
             arg("k_dequant_scale").none(), arg("v_dequant_scale").none(), arg("out").none(),
             arg("lse").none(), arg("kv_dtype"), arg("route"), arg("softmax_scale"), arg("softcap"),
             arg("causal"), arg("window"), arg("cpu_isa"), arg("num_threads"), arg("stream"),
             arg("cuda_image").none(), arg("splits"),
             "Bytes of workspace that paged_attention with these arguments needs.");
  module.def("planned_workspace_bytes", &planned_workspace_bytes, arg("route"), arg("device_type"),
             arg("device_index"), arg("q_dtype"), arg("kv_dtype"), arg("batch"), arg("rows"),
             arg("q_heads"), arg("kv_heads"), arg("head_dim"), arg("page_size"), arg("max_pages"),
             arg("cpu_isa"), arg("num_threads"), arg("cuda_image").none(), arg("splits"),
             "Bytes of workspace for a capacity: rows in all, dealt to batch requests in any\n"
             "way, each max_pages * page_size tokens long.");
  module.def(
      "last_cuda_image", [] { return last_image; },
      "The device code that ran in this thread's last paged_attention; None on the CPU.");
  module.def("max_query_len", &max_query_len, arg("query_start_loc").none(),
             "Query rows of the longest request.");
}

}  // namespace flashverify::bindings
