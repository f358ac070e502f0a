// The part of the DLPack exchange format that a consumer of torch.utils.dlpack
// capsules reads (DLPack 0.x and 1.x "dltensor" capsules share this layout).
#ifndef FLASHVERIFY_PYTHON_BINDINGS_DLPACK_H_
#define FLASHVERIFY_PYTHON_BINDINGS_DLPACK_H_

#include <cstdint>

namespace flashverify::bindings::dlpack {

constexpr const char* kCapsuleName = "dltensor";

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };

enum DtypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kFloat8E4m3fn = 10,
  kFloat8E5m2 = 12
};

struct Device {
  int32_t type;
  int32_t index;
};

struct Dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  Dtype dtype;
  int64_t* shape;
  int64_t* stride;  // in elements; null where the tensor is contiguous
  uint64_t byte_offset;
};

}  // namespace flashverify::bindings::dlpack

#endif  // FLASHVERIFY_PYTHON_BINDINGS_DLPACK_H_
