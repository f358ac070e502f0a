// From torch tensors to fv_tensor views, without a copy.
#ifndef FLASHVERIFY_PYTHON_BINDINGS_TENSOR_H_
#define FLASHVERIFY_PYTHON_BINDINGS_TENSOR_H_

#include <nanobind/nanobind.h>

#include <cstdint>

#include "flashverify/flashverify.h"

namespace flashverify::bindings {

// Tells this module what a tensor is, and how to look into one. Given rather than
// imported here on first use: an import gives the GIL away, and another thread
// would then wait for this one's first use with the GIL held.
void use_torch(nanobind::object tensor_type, nanobind::object to_dlpack);

// What an argument is called, and what it may be, for messages.
struct ArgumentSpec {
  const char* name;
  const char* accepted;
};

// The device of a call: that of its first tensor, which all the others share.
struct CallDevice {
  const char* first_argument = nullptr;
  int32_t type = FV_DEVICE_CPU;
  int32_t index = 0;
};

// A tensor argument for the time of one call. It holds a DLPack capsule, so that
// the storage outlives the call whatever other threads do to the Python object.
// Made and destroyed with the GIL held.
class TensorArgument {
 public:
  // The absent tensor.
  TensorArgument() = default;

  // `uint8_format` is the fv_dtype that the caller names for a cache of bytes,
  // and must agree with the dtype of any other tensor; FV_DTYPE_NONE elsewhere.
  TensorArgument(nanobind::handle tensor, const ArgumentSpec& spec, CallDevice* device,
                 int32_t uint8_format = FV_DTYPE_NONE);

  // As above, and the absent tensor for None.
  static TensorArgument optional(nanobind::handle tensor, const ArgumentSpec& spec,
                                 CallDevice* device);

  const fv_tensor& view() const { return view_; }

  // Whether the elements are plain bytes, whose format the caller named.
  bool is_uint8() const { return is_uint8_; }

 protected:
  nanobind::object capsule_;
  fv_tensor view_{};
  bool is_uint8_ = false;
};

// A dequantisation scale: None, a number, or a tensor of any rank, whose elements
// are taken in order. The view may point into this object.
class ScaleArgument : public TensorArgument {
 public:
  ScaleArgument(nanobind::handle scale, const ArgumentSpec& spec, CallDevice* device);
  ScaleArgument(const ScaleArgument&) = delete;
  ScaleArgument& operator=(const ScaleArgument&) = delete;

 private:
  float number_ = 1.0f;
};

// A float32 of this value; raises where it is finite and float32 has no such value.
float to_float(double value, const char* argument);

}  // namespace flashverify::bindings

#endif  // FLASHVERIFY_PYTHON_BINDINGS_TENSOR_H_
