#include "native/abi/tensor.h"

#include <cinttypes>
#include <cstddef>
#include <cstdio>

#include "native/abi/error.h"
#include "native/abi/names.h"

namespace flashverify::abi {
namespace {

constexpr int32_t kLastDtype = FV_DTYPE_INT64;

// "float32, float16 or bfloat16", for messages.
struct DtypeList {
  char text[128] = "";

  explicit DtypeList(DtypeSet dtypes) {
    size_t used = 0;
    for (int32_t dtype = 1; dtype <= kLastDtype; ++dtype) {
      if ((dtypes >> dtype & 1) == 0) continue;
      const DtypeSet later = dtypes >> (dtype + 1);
      const char* separator = used == 0 ? "" : later == 0 ? " or " : ", ";
      used += static_cast<size_t>(
          std::snprintf(text + used, sizeof text - used, "%s%s", separator, dtype_name(dtype)));
    }
  }
};

fv_status check_dtype(const Argument& argument, DtypeSet accepted) {
  const int32_t dtype = argument.tensor.dtype;
  if (dtype >= 0 && dtype <= kLastDtype && (accepted >> dtype & 1) != 0) return FV_OK;
  if (is_absent(argument.tensor)) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name, "absent; accepted: a tensor of %s",
                DtypeList(accepted).text);
  }
  const char* name = dtype_name(dtype);
  if (name == nullptr) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                "unknown dtype code %" PRId32 "; accepted: %s", dtype, DtypeList(accepted).text);
  }
  return fail(FV_ERROR_INVALID_ARGUMENT, argument.name, "dtype %s; accepted: %s", name,
              DtypeList(accepted).text);
}

// Checks the strides and finds the span, or fails where the span is too large.
fv_status check_strides(const Argument& argument, int64_t* bytes) {
  const fv_tensor& tensor = argument.tensor;
  bool empty = false;
  bool overflow = false;
  int64_t last_element = 0;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    empty |= tensor.shape[axis] == 0;
    const int64_t stride = axis_stride(tensor, axis);
    if (stride < 0) {
      return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                  "axis %" PRId32 " has stride %" PRId64 "; accepted: 0 or more", axis, stride);
    }
    int64_t reach = 0;
    overflow |= __builtin_mul_overflow(tensor.shape[axis] - 1, stride, &reach);
    overflow |= __builtin_add_overflow(last_element, reach, &last_element);
  }
  if (empty) {
    *bytes = 0;
    return FV_OK;
  }
  const int64_t item = item_bytes(tensor.dtype);
  if (overflow || last_element >= kMaxSpanBytes / item) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                "shape and strides span more than 2^60 bytes; accepted: what memory can hold");
  }
  *bytes = (last_element + 1) * item;
  return FV_OK;
}

fv_status check_pointer(const Argument& argument, int64_t bytes) {
  if (bytes == 0) return FV_OK;
  const void* data = argument.tensor.data;
  if (data == nullptr) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                "data is NULL; accepted: a pointer to %" PRId64 " bytes", bytes);
  }
  const auto address = reinterpret_cast<uintptr_t>(data);
  const int64_t item = item_bytes(argument.tensor.dtype);
  if (address % static_cast<uintptr_t>(item) != 0) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                "data %p is misaligned; accepted: a multiple of %" PRId64 " bytes for %s", data,
                item, dtype_name(argument.tensor.dtype));
  }
  if (address > UINTPTR_MAX - static_cast<uintptr_t>(bytes)) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                "%" PRId64 " bytes from %p pass the end of memory; accepted: what memory can hold",
                bytes, data);
  }
  return FV_OK;
}

}  // namespace

int64_t item_bytes(int32_t dtype) {
  switch (dtype) {
    case FV_DTYPE_FLOAT8_E4M3:
    case FV_DTYPE_FLOAT8_E5M2:
      return 1;
    case FV_DTYPE_FLOAT16:
    case FV_DTYPE_BFLOAT16:
      return 2;
    case FV_DTYPE_INT64:
      return 8;
    default:
      return 4;
  }
}

int64_t span_bytes(const fv_tensor& tensor) {
  int64_t last_element = 0;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] == 0) return 0;
    last_element += (tensor.shape[axis] - 1) * axis_stride(tensor, axis);
  }
  return (last_element + 1) * item_bytes(tensor.dtype);
}

fv_status check_tensor(const Argument& argument, const TensorRule& rule) {
  const fv_tensor& tensor = argument.tensor;
  FV_RETURN_IF_ERROR(check_dtype(argument, rule.dtypes));
  if (tensor.rank != rule.rank) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name, "rank %" PRId32 "; accepted: %" PRId32,
                tensor.rank, rule.rank);
  }
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] < 0) {
      return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                  "axis %" PRId32 " has %" PRId64 " elements; accepted: 0 or more", axis,
                  tensor.shape[axis]);
    }
  }
  const int32_t last = tensor.rank - 1;
  if (rule.last_axis == LastAxis::kContiguous && last >= 0 && tensor.shape[last] > 1 &&
      tensor.stride[last] != 1) {
    return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                "the last axis has stride %" PRId64 "; accepted: 1", tensor.stride[last]);
  }
  int64_t bytes = 0;
  FV_RETURN_IF_ERROR(check_strides(argument, &bytes));
  return rule.data == DataPointer::kRequired ? check_pointer(argument, bytes) : FV_OK;
}

fv_status check_axis(const Argument& argument, int32_t axis, int64_t expected,
                     const char* meaning) {
  const int64_t found = argument.tensor.shape[axis];
  if (found == expected) return FV_OK;
  return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
              "axis %" PRId32 " has %" PRId64 " elements; accepted: %" PRId64 " (%s)", axis, found,
              expected, meaning);
}

fv_status check_axis_range(const Argument& argument, int32_t axis, const char* meaning,
                           int64_t least, int64_t most) {
  const int64_t found = argument.tensor.shape[axis];
  if (found >= least && found <= most) return FV_OK;
  return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
              "axis %" PRId32 " (%s) has %" PRId64 " elements; accepted: %" PRId64 " to %" PRId64,
              axis, meaning, found, least, most);
}

}  // namespace flashverify::abi
