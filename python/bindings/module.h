// What the files of the extension share.
#ifndef FLASHVERIFY_PYTHON_BINDINGS_MODULE_H_
#define FLASHVERIFY_PYTHON_BINDINGS_MODULE_H_

#include <nanobind/nanobind.h>

#include "python/bindings/errors.h"
#include "python/bindings/tensor.h"

namespace flashverify::bindings {

inline constexpr ArgumentSpec kKCacheSpec{
    "k_cache",
    "float8_e4m3fn, float8_e5m2, float16, bfloat16, or uint8 with an FP8 kv_dtype; "
    "[pages, page_size, kv_heads, head_dim]"};
inline constexpr ArgumentSpec kVCacheSpec{
    "v_cache", "the dtype of k_cache; [pages, page_size, kv_heads, head_dim]"};
inline constexpr ArgumentSpec kKScaleSpec{"k_dequant_scale",
                                          "None, a number, or float32 of 1 or kv_heads elements"};
inline constexpr ArgumentSpec kVScaleSpec{"v_dequant_scale",
                                          "None, a number, or float32 of 1 or kv_heads elements"};

// A format named for the bytes of one cache says nothing of the other's.
inline void check_same_storage(const TensorArgument& k_cache, const TensorArgument& v_cache) {
  if (k_cache.is_uint8() == v_cache.is_uint8()) return;
  raise_invalid(kVCacheSpec.name,
                v_cache.is_uint8() ? "dtype uint8 beside a k_cache of another"
                                   : "another dtype beside a k_cache of uint8",
                kVCacheSpec.accepted);
}

// A name, which lives as long as the object; null for None.
inline const char* name_or_null(nanobind::handle name) {
  return name.is_none() ? nullptr : nanobind::cast<const char*>(name);
}

void bind_attention(nanobind::module_& module);
void bind_append(nanobind::module_& module);
void bind_merge(nanobind::module_& module);

}  // namespace flashverify::bindings

#endif  // FLASHVERIFY_PYTHON_BINDINGS_MODULE_H_
