#include "python/bindings/tensor.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>

#include "python/bindings/dlpack.h"
#include "python/bindings/errors.h"

namespace nb = nanobind;

namespace flashverify::bindings {
namespace {

// What this module uses of torch, as use_torch() was given it. Never destroyed:
// the interpreter may be gone before this library's destructors run.
struct Torch {
  nb::object tensor_type;
  nb::object to_dlpack;
  nb::object no_dispatch;  // __torch_dispatch__ of tensors that hold plain memory
  nb::object is_negated;   // torch.Tensor.is_neg
};
const Torch* torch = nullptr;

std::string text(nb::handle object) { return nb::str(object).c_str(); }

// Some of torch's errors list every kernel that it has.
std::string first_line(const std::string& message) {
  constexpr size_t kMost = 200;
  return message.substr(0, std::min(message.find('\n'), kMost));
}

std::string type_of(nb::handle object) { return text(object.type().attr("__name__")); }

// "float64", as this package's other messages spell it.
std::string dtype_of(nb::handle tensor) {
  const std::string name = text(tensor.attr("dtype"));
  return name.rfind("torch.", 0) == 0 ? name.substr(6) : name;
}

void require_plain_tensor(nb::handle tensor, const ArgumentSpec& spec) {
  if (torch == nullptr) raise_status(FV_ERROR_INTERNAL, "use_torch() was never called");
  if (tensor.type().is(torch->tensor_type)) return;
  if (!nb::isinstance(tensor, torch->tensor_type)) {
    raise_invalid(spec.name, type_of(tensor), std::string("a torch.Tensor, ") + spec.accepted);
  }
  // A parameter is a tensor like any other; a subclass that dispatches, such as
  // a FakeTensor or a DTensor, may have no memory of its own.
  if (!tensor.type().attr("__torch_dispatch__").is(torch->no_dispatch)) {
    raise_invalid(spec.name, "a " + type_of(tensor),
                  std::string("a tensor that holds plain memory, ") + spec.accepted);
  }
}

// A real number: Python's own, or another that says so, as NumPy's scalars do.
bool is_number(nb::handle object) {
  if (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr())) return !PyBool_Check(object.ptr());
  if (nb::isinstance(object, torch->tensor_type)) return false;
  return nb::isinstance(object, nb::module_::import_("numbers").attr("Real"));
}

int32_t to_fv_dtype(const dlpack::Dtype& dtype) {
  if (dtype.lanes != 1) return FV_DTYPE_NONE;
  switch (dtype.code) {
    case dlpack::kFloat:
      return dtype.bits == 32   ? FV_DTYPE_FLOAT32
             : dtype.bits == 16 ? FV_DTYPE_FLOAT16
                                : FV_DTYPE_NONE;
    case dlpack::kBfloat:
      return dtype.bits == 16 ? FV_DTYPE_BFLOAT16 : FV_DTYPE_NONE;
    case dlpack::kInt:
      return dtype.bits == 32 ? FV_DTYPE_INT32 : dtype.bits == 64 ? FV_DTYPE_INT64 : FV_DTYPE_NONE;
    case dlpack::kFloat8E4m3fn:
      return FV_DTYPE_FLOAT8_E4M3;
    case dlpack::kFloat8E5m2:
      return FV_DTYPE_FLOAT8_E5M2;
    default:
      return FV_DTYPE_NONE;
  }
}

void check_device(const dlpack::Device& found, const ArgumentSpec& spec, nb::handle tensor,
                  CallDevice* device) {
  if (found.type != dlpack::kCpu && found.type != dlpack::kCuda) {
    raise_invalid(spec.name, "on device " + text(tensor.attr("device")), "cpu or cuda");
  }
  if (device->first_argument == nullptr) {
    *device = {spec.name, found.type == dlpack::kCpu ? FV_DEVICE_CPU : FV_DEVICE_CUDA, found.index};
    return;
  }
  const bool same = (found.type == dlpack::kCpu) == (device->type == FV_DEVICE_CPU) &&
                    found.index == device->index;
  if (same) return;
  const std::string expected =
      device->type == FV_DEVICE_CPU ? "cpu" : "cuda:" + std::to_string(device->index);
  raise_invalid(spec.name, "on device " + text(tensor.attr("device")),
                expected + ", the device of " + device->first_argument);
}

}  // namespace

void use_torch(nb::object tensor_type, nb::object to_dlpack) {
  nb::object no_dispatch = tensor_type.attr("__torch_dispatch__");
  nb::object is_negated = tensor_type.attr("is_neg");
  torch = new Torch{std::move(tensor_type), std::move(to_dlpack), std::move(no_dispatch),
                    std::move(is_negated)};
}

TensorArgument::TensorArgument(nb::handle tensor, const ArgumentSpec& spec, CallDevice* device,
                               int32_t uint8_format) {
  require_plain_tensor(tensor, spec);
  try {
    capsule_ = torch->to_dlpack(tensor);
  } catch (const nb::python_error& error) {
    // A torch that exports no FP8 says so without the dtype. Caches come as bytes then.
    const std::string dtype = dtype_of(tensor);
    if (dtype.rfind("float8", 0) == 0) raise_invalid(spec.name, "dtype " + dtype, spec.accepted);
    raise_invalid(spec.name, first_line(text(error.value())),
                  std::string("a strided tensor on cpu or cuda, ") + spec.accepted);
  }
  // The capsule's DLManagedTensor begins with the tensor itself.
  const auto* source = static_cast<const dlpack::Tensor*>(
      PyCapsule_GetPointer(capsule_.ptr(), dlpack::kCapsuleName));
  if (source == nullptr) throw nb::python_error();

  check_device(source->device, spec, tensor, device);
  // A view that stands for its negation, which DLPack does not carry: torch makes one
  // of the imaginary part of a conjugate, so never of a cache of bytes or of indices.
  const bool may_be_negated =
      source->dtype.code == dlpack::kFloat || source->dtype.code == dlpack::kBfloat;
  if (may_be_negated && torch->is_negated(tensor).is(Py_True)) {
    raise_invalid(spec.name, "a view with torch's negative bit",
                  "a plain tensor, as of resolve_neg()");
  }
  is_uint8_ = source->dtype.code == dlpack::kUInt && source->dtype.bits == 8;
  view_.dtype = is_uint8_ ? uint8_format : to_fv_dtype(source->dtype);
  const bool contradiction = uint8_format != FV_DTYPE_NONE && view_.dtype != uint8_format;
  if (view_.dtype == FV_DTYPE_NONE || contradiction) {
    raise_invalid(spec.name, "dtype " + dtype_of(tensor), spec.accepted);
  }
  if (source->rank > FV_MAX_RANK) {
    raise_invalid(spec.name, "rank " + std::to_string(source->rank), spec.accepted);
  }
  view_.data = static_cast<char*>(source->data) + source->byte_offset;
  view_.rank = source->rank;
  int64_t contiguous = 1;
  for (int32_t axis = source->rank - 1; axis >= 0; --axis) {
    view_.shape[axis] = source->shape[axis];
    view_.stride[axis] = source->stride != nullptr ? source->stride[axis] : contiguous;
    contiguous *= source->shape[axis];
  }
}

TensorArgument TensorArgument::optional(nb::handle tensor, const ArgumentSpec& spec,
                                        CallDevice* device) {
  return tensor.is_none() ? TensorArgument() : TensorArgument(tensor, spec, device);
}

ScaleArgument::ScaleArgument(nb::handle scale, const ArgumentSpec& spec, CallDevice* device) {
  if (scale.is_none()) return;
  if (is_number(scale)) {
    const double number = PyFloat_AsDouble(scale.ptr());
    if (number == -1.0 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      raise_invalid(spec.name, text(scale), "a float32 value");
    }
    number_ = to_float(number, spec.name);
    view_.data = &number_;
    view_.dtype = FV_DTYPE_FLOAT32;
    view_.rank = 0;  // a number in host memory, wherever the call runs
    return;
  }
  TensorArgument::operator=(TensorArgument(scale, spec, device));
  int64_t count = 1;
  bool contiguous = true;
  for (int32_t axis = view_.rank - 1; axis >= 0; --axis) {
    contiguous &= view_.shape[axis] == 1 || view_.stride[axis] == count;
    count *= view_.shape[axis];
  }
  if (view_.rank != 1 && contiguous) {
    view_.rank = 1;
    view_.shape[0] = count;
    view_.stride[0] = 1;
  }
}

float to_float(double value, const char* argument) {
  if (std::isfinite(value) && std::fabs(value) > static_cast<double>(FLT_MAX)) {
    char found[32];
    std::snprintf(found, sizeof found, "%.9g", value);
    raise_invalid(argument, found, "a float32 value");
  }
  return static_cast<float>(value);
}

}  // namespace flashverify::bindings
