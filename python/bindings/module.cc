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

  module.def("use_torch", &use_torch, nb::arg("tensor_type"), nb::arg("to_dlpack"),
             "Takes torch.Tensor and torch.utils.dlpack.to_dlpack. Before any call with tensors.");

  bind_attention(module);
  bind_append(module);
  bind_merge(module);
}
