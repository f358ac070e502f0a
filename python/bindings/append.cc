#include <nanobind/nanobind.h>

#include <cstdint>

#include "python/bindings/api.h"
#include "python/bindings/errors.h"
#include "python/bindings/module.h"
#include "python/bindings/tensor.h"

namespace nb = nanobind;

namespace flashverify::bindings {
namespace {

constexpr ArgumentSpec kKey{"key", "float32, float16 or bfloat16 [tokens, kv_heads, head_dim]"};
constexpr ArgumentSpec kValue{"value", "float32, float16 or bfloat16 [tokens, kv_heads, head_dim]"};
constexpr ArgumentSpec kSlotMapping{"slot_mapping", "int64 or int32 [tokens]"};

void append_kv(nb::handle key, nb::handle value, nb::handle k_cache, nb::handle v_cache,
               nb::handle slot_mapping, nb::handle k_dequant_scale, nb::handle v_dequant_scale,
               int32_t kv_dtype, int32_t num_threads, uintptr_t stream, nb::handle cuda_image) {
  CallDevice device;
  const TensorArgument key_argument(key, kKey, &device);
  const TensorArgument value_argument(value, kValue, &device);
  const TensorArgument k_cache_argument(k_cache, kKCacheSpec, &device, kv_dtype);
  const TensorArgument v_cache_argument(v_cache, kVCacheSpec, &device, kv_dtype);
  const TensorArgument slot_mapping_argument(slot_mapping, kSlotMapping, &device);
  const ScaleArgument k_scale_argument(k_dequant_scale, kKScaleSpec, &device);
  const ScaleArgument v_scale_argument(v_dequant_scale, kVScaleSpec, &device);

  check_same_storage(k_cache_argument, v_cache_argument);

  fv_append_params params{};
  params.struct_size = sizeof params;
  params.device_type = device.type;
  params.device_index = device.index;
  params.num_threads = num_threads;
  params.stream = reinterpret_cast<void*>(stream);
  if (device.type == FV_DEVICE_CUDA) params.cuda_image = name_or_null(cuda_image);
  params.key = key_argument.view();
  params.value = value_argument.view();
  params.k_cache = k_cache_argument.view();
  params.v_cache = v_cache_argument.view();
  params.slot_mapping = slot_mapping_argument.view();
  params.k_dequant_scale = k_scale_argument.view();
  params.v_dequant_scale = v_scale_argument.view();
  fv_status status;
  {
    nb::gil_scoped_release release;
    status = api().append_kv(&params);
  }
  raise_unless_ok(status);
}

}  // namespace

void bind_append(nb::module_& module) {
  using nb::arg;
  module.def("append_kv", &append_kv, arg("key").none(), arg("value").none(), arg("k_cache").none(),
             arg("v_cache").none(), arg("slot_mapping").none(), arg("k_dequant_scale").none(),
             arg("v_dequant_scale").none(), arg("kv_dtype"), arg("num_threads"), arg("stream"),
             arg("cuda_image").none(),
             "Writes key and value rows to cache slots. The GIL is released.");
}

}  // namespace flashverify::bindings
