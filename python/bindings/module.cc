// flashverify._native: the C ABI of libflashverify as a Python module.
//
// It knows tensors and status codes, and no policy: routes are named by the
// caller, workspaces are the caller's memory. The package in python/flashverify
// is the API for people.

#include "python/bindings/module.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>

#include "python/bindings/api.h"
#include "python/bindings/errors.h"
#include "python/bindings/tensor.h"

namespace nb = nanobind;

namespace flashverify::bindings {
namespace {

using NumbersByName = nb::typed<nb::dict, nb::str, int>;

// {name: code} of an enumeration of the library, its zero code left out.
NumbersByName names(const char* (*name_of)(int32_t)) {
  NumbersByName codes;
  for (int32_t code = 1; name_of(code) != nullptr; ++code) codes[name_of(code)] = code;
  return codes;
}

using Names = nb::typed<nb::list, nb::str>;

Names cuda_images() {
  Names images;
  for (const char* const* image = api().cuda_images(); *image != nullptr; ++image)
    images.append(*image);
  return images;
}

int32_t cuda_device_count() {
  int32_t count = 0;
  raise_unless_ok(api().cuda_device_count(&count));
  return count;
}

using Device = nb::typed<nb::dict, nb::str, nb::any>;

Device cuda_device(int32_t index) {
  fv_cuda_device found{};
  found.struct_size = sizeof found;
  fv_status status;
  {
    nb::gil_scoped_release release;
    status = api().cuda_device(index, &found);
  }
  raise_unless_ok(status);
  Device device;
  device["index"] = found.index;
  device["name"] = found.name;
  device["capability"] = nb::make_tuple(found.major, found.minor);
  device["image"] = found.image == nullptr ? nb::none() : nb::object(nb::str(found.image));
  return device;
}

uint32_t cuda_faults(int32_t device_index, uintptr_t workspace) {
  uint32_t faults = 0;
  fv_status status;
  {
    nb::gil_scoped_release release;
    status = api().cuda_faults(device_index, reinterpret_cast<const void*>(workspace), &faults);
  }
  raise_unless_ok(status);
  return faults;
}

NumbersByName route_counts() {
  uint64_t counts[FV_ROUTE_COUNT];
  api().route_counts(counts);
  NumbersByName result;
  for (int32_t route = 1; route < FV_ROUTE_COUNT; ++route) {
    result[api().route_name(route)] = counts[route];
  }
  return result;
}

}  // namespace
}  // namespace flashverify::bindings

NB_MODULE(_native, module) {
  using namespace flashverify::bindings;
  check_library();
  module.doc() = "The C ABI of libflashverify, bound without policy.";

  module.attr("PRECISION_REVISION") = FLASHVERIFY_PRECISION_REVISION;
  module.attr("ABI_VERSION") = FLASHVERIFY_ABI_VERSION;
  module.attr("BUILD_ID") = kBuildId;

  module.def("library_path", &library_path, "The library file that this extension is bound to.");
  module.def("route_codes", [] { return names(api().route_name); }, "fv_route by name.");
  module.def("cpu_isa_codes", [] { return names(api().cpu_isa_name); }, "fv_cpu_isa by name.");
  module.def(
      "best_cpu_isa", [] { return api().best_cpu_isa(); },
      "The fv_cpu_isa that runs where none is named.");
  module.def(
      "has_cpu_isa", [](int32_t isa) { return api().has_cpu_isa(isa) != 0; }, nb::arg("isa"),
      "Whether this CPU has an fv_cpu_isa.");
  module.def("route_counts", &route_counts,
             "Calls completed per route since the library was loaded.");

  module.def("cuda_images", &cuda_images, "The device code in the library, by architecture.");
  module.def("cuda_device_count", &cuda_device_count, "How many CUDA devices the driver has.");
  module.def("cuda_device", &cuda_device, nb::arg("index"),
             "Index, name, compute capability and image of a CUDA device.");
  module.def("cuda_faults", &cuda_faults, nb::arg("device_index"), nb::arg("workspace"),
             "Bits of fv_cuda_fault that calls with the workspace at this address set since the\n"
             "last time. Waits for the device.");

  module.def("use_torch", &use_torch, nb::arg("tensor_type"), nb::arg("to_dlpack"),
             "Takes torch.Tensor and torch.utils.dlpack.to_dlpack. Before any call with tensors.");

  bind_attention(module);
  bind_append(module);
  bind_merge(module);
}
