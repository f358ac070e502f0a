// Checks of one tensor argument: everything that its descriptor alone can tell.
#ifndef FLASHVERIFY_NATIVE_ABI_TENSOR_H_
#define FLASHVERIFY_NATIVE_ABI_TENSOR_H_

#include <cstdint>

#include "flashverify/flashverify.h"

namespace flashverify::abi {

// A set of fv_dtype values, one bit each.
using DtypeSet = uint32_t;

constexpr DtypeSet dtype_bit(fv_dtype dtype) { return DtypeSet{1} << dtype; }

constexpr DtypeSet kFloat32 = dtype_bit(FV_DTYPE_FLOAT32);
constexpr DtypeSet kInt32 = dtype_bit(FV_DTYPE_INT32);
constexpr DtypeSet kActivationDtypes =
    kFloat32 | dtype_bit(FV_DTYPE_FLOAT16) | dtype_bit(FV_DTYPE_BFLOAT16);
constexpr DtypeSet kCacheDtypes = dtype_bit(FV_DTYPE_FLOAT8_E4M3) |
                                  dtype_bit(FV_DTYPE_FLOAT8_E5M2) | dtype_bit(FV_DTYPE_FLOAT16) |
                                  dtype_bit(FV_DTYPE_BFLOAT16);

// An argument under the name that callers know it by.
struct Argument {
  const char* name;
  const fv_tensor& tensor;
};

enum class LastAxis { kContiguous, kStrided };
enum class DataPointer { kRequired, kIgnored };

struct TensorRule {
  int32_t rank;
  DtypeSet dtypes;
  LastAxis last_axis = LastAxis::kContiguous;
  DataPointer data = DataPointer::kRequired;
};

// Checks dtype, rank, shape, strides, pointer and alignment. Afterwards the
// tensor's span is a valid address range of at most kMaxSpanBytes.
fv_status check_tensor(const Argument& argument, const TensorRule& rule);

// Checks that an axis has `expected` elements; `meaning` tells where that number
// comes from, as in "head_dim of q".
fv_status check_axis(const Argument& argument, int32_t axis, int64_t expected, const char* meaning);

// Checks that an axis has between `least` and `most` elements.
fv_status check_axis_range(const Argument& argument, int32_t axis, const char* meaning,
                           int64_t least, int64_t most);

// A span beyond this is refused, so that sums and differences of spans cannot
// overflow. It is far above every address space.
constexpr int64_t kMaxSpanBytes = int64_t{1} << 60;

inline bool is_absent(const fv_tensor& tensor) {
  return tensor.dtype == FV_DTYPE_NONE && tensor.data == nullptr;
}

int64_t item_bytes(int32_t dtype);

// The stride to use for an axis. Axes of at most one element may carry any
// stride, as in DLPack; they read as 0.
inline int64_t axis_stride(const fv_tensor& tensor, int32_t axis) {
  return tensor.shape[axis] > 1 ? tensor.stride[axis] : 0;
}

// Bytes from the start of the first element to the end of the last; 0 without
// elements. For tensors that passed check_tensor().
int64_t span_bytes(const fv_tensor& tensor);

}  // namespace flashverify::abi

#endif  // FLASHVERIFY_NATIVE_ABI_TENSOR_H_
