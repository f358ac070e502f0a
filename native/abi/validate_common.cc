#include <cinttypes>
#include <cmath>

#include "native/abi/error.h"
#include "native/abi/names.h"
#include "native/abi/validate.h"

namespace flashverify::abi {

fv_status fail_null_params() {
  return fail(FV_ERROR_INVALID_ARGUMENT, "params", "NULL; accepted: a pointer to the arguments");
}

fv_status check_struct_size(uint32_t found, size_t expected) {
  if (found == expected) return FV_OK;
  return fail(FV_ERROR_INVALID_ARGUMENT, "struct_size",
              "%" PRIu32 "; accepted: %zu (ABI version %d)", found, expected,
              FLASHVERIFY_ABI_VERSION);
}

fv_status check_header(const CallHeader& header) {
  if (header.device_type != FV_DEVICE_CPU && header.device_type != FV_DEVICE_CUDA) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "device_type",
                "unknown code %" PRId32 "; accepted: %d (cpu) or %d (cuda)", header.device_type,
                FV_DEVICE_CPU, FV_DEVICE_CUDA);
  }
  const bool on_cpu = header.device_type == FV_DEVICE_CPU;
  if (header.device_index < 0 || (on_cpu && header.device_index != 0)) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "device_index", "%" PRId32 "; accepted: %s",
                header.device_index, on_cpu ? "0 on the CPU" : "0 or more");
  }
  if (on_cpu && header.stream != nullptr) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "stream", "%p; accepted: NULL on the CPU",
                header.stream);
  }
  if (on_cpu && header.cuda_image != nullptr) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "cuda_image", "%.64s; accepted: NULL on the CPU",
                header.cuda_image);
  }
  if (header.num_threads < 1 || header.num_threads > kMaxThreads) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "num_threads", "%" PRId32 "; accepted: 1 to %" PRId32,
                header.num_threads, kMaxThreads);
  }
  return FV_OK;
}

fv_status check_scale(const Argument& scale, int64_t kv_heads, Purpose purpose, bool on_cpu,
                      ScaleView* view) {
  *view = ScaleView{};
  const fv_tensor& tensor = scale.tensor;
  if (is_absent(tensor)) return FV_OK;
  const bool number = tensor.rank == 0;
  FV_RETURN_IF_ERROR(check_tensor(
      scale, {number ? 0 : 1, kFloat32, LastAxis::kContiguous, data_pointer(purpose)}));
  const int64_t count = number ? 1 : tensor.shape[0];
  if (count != 1 && count != kv_heads) {
    return fail(FV_ERROR_INVALID_ARGUMENT, scale.name,
                "%" PRId64 " elements; accepted: 1 or %" PRId64 " (kv_heads)", count, kv_heads);
  }
  if (purpose == Purpose::kPlan) return FV_OK;
  const auto* values = static_cast<const float*>(tensor.data);
  for (int64_t i = 0; (on_cpu || number) && i < count; ++i) {
    if (std::isfinite(values[i]) && values[i] > 0) continue;
    return fail(FV_ERROR_INVALID_ARGUMENT, scale.name,
                "element %" PRId64 " is %.9g; accepted: finite values above 0", i,
                static_cast<double>(values[i]));
  }
  if (number) {
    view->number = *values;
  } else {
    view->data = values;
    view->stride = count == 1 ? 0 : 1;
  }
  return FV_OK;
}

fv_status check_caches(const Argument& k_cache, const Argument& v_cache, DataPointer data,
                       CacheShape* shape) {
  const TensorRule rule{4, kCacheDtypes, LastAxis::kContiguous, data};
  FV_RETURN_IF_ERROR(check_tensor(k_cache, rule));
  FV_RETURN_IF_ERROR(check_tensor(v_cache, rule));
  const fv_tensor& k = k_cache.tensor;
  FV_RETURN_IF_ERROR(check_axis_range(k_cache, 1, "page_size", 1, kMaxPageSize));
  FV_RETURN_IF_ERROR(check_axis_range(k_cache, 2, "kv_heads", 1, kMaxHeads));
  FV_RETURN_IF_ERROR(check_axis_range(k_cache, 3, "head_dim", 1, INT32_MAX));
  if (v_cache.tensor.dtype != k.dtype) {
    return fail(FV_ERROR_INVALID_ARGUMENT, v_cache.name, "dtype %s; accepted: %s (dtype of %s)",
                dtype_name(v_cache.tensor.dtype), dtype_name(k.dtype), k_cache.name);
  }
  static constexpr const char* kMeanings[] = {"pages of k_cache", "page_size of k_cache",
                                              "kv_heads of k_cache", "head_dim of k_cache"};
  for (int32_t axis = 0; axis < 4; ++axis) {
    FV_RETURN_IF_ERROR(check_axis(v_cache, axis, k.shape[axis], kMeanings[axis]));
  }
  *shape = {k.shape[0], k.shape[1], k.shape[2], k.shape[3]};
  return FV_OK;
}

CacheView cache_view(const fv_tensor& cache) {
  return {cache.data, axis_stride(cache, 0), axis_stride(cache, 1), axis_stride(cache, 2)};
}

}  // namespace flashverify::abi
