#include "native/abi/names.h"

#include "flashverify/flashverify.h"

namespace flashverify::abi {

const char* status_name(int32_t status) noexcept {
  switch (status) {
    case FV_OK:
      return "ok";
    case FV_ERROR_INVALID_ARGUMENT:
      return "invalid_argument";
    case FV_ERROR_OUT_OF_RANGE:
      return "out_of_range";
    case FV_ERROR_UNSUPPORTED:
      return "unsupported";
    case FV_ERROR_WORKSPACE_TOO_SMALL:
      return "workspace_too_small";
    case FV_ERROR_OUT_OF_MEMORY:
      return "out_of_memory";
    case FV_ERROR_DEVICE:
      return "device";
    case FV_ERROR_INTERNAL:
      return "internal";
    default:
      return nullptr;
  }
}

const char* route_name(int32_t route) noexcept {
  switch (route) {
    case FV_ROUTE_NONE:
      return "none";
    case FV_ROUTE_GROUPED_FP32:
      return "grouped_fp32";
    case FV_ROUTE_SCALAR_FP32:
      return "scalar_fp32";
    case FV_ROUTE_GROUPED_HALF:
      return "grouped_half";
    case FV_ROUTE_SCALAR_HALF:
      return "scalar_half";
    case FV_ROUTE_XQA_HALF:
      return "xqa_half";
    default:
      return nullptr;
  }
}

const char* cpu_isa_name(int32_t isa) noexcept {
  switch (isa) {
    case FV_CPU_ISA_AUTO:
      return "auto";
    case FV_CPU_ISA_PORTABLE:
      return "portable";
    case FV_CPU_ISA_AVX2:
      return "avx2";
    case FV_CPU_ISA_AVX512:
      return "avx512";
    default:
      return nullptr;
  }
}

const char* dtype_name(int32_t dtype) noexcept {
  switch (dtype) {
    case FV_DTYPE_NONE:
      return "none";
    case FV_DTYPE_FLOAT32:
      return "float32";
    case FV_DTYPE_FLOAT16:
      return "float16";
    case FV_DTYPE_BFLOAT16:
      return "bfloat16";
    case FV_DTYPE_FLOAT8_E4M3:
      return "float8_e4m3fn";
    case FV_DTYPE_FLOAT8_E5M2:
      return "float8_e5m2";
    case FV_DTYPE_INT32:
      return "int32";
    case FV_DTYPE_INT64:
      return "int64";
    default:
      return nullptr;
  }
}

}  // namespace flashverify::abi
