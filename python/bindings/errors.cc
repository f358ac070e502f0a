#include "python/bindings/errors.h"

#include <nanobind/nanobind.h>

#include "python/bindings/api.h"

namespace nb = nanobind;

namespace flashverify::bindings {
namespace {

const char* exception_name(fv_status status) {
  switch (status) {
    case FV_ERROR_INVALID_ARGUMENT:
      return "InvalidArgumentError";
    case FV_ERROR_OUT_OF_RANGE:
      return "OutOfRangeError";
    case FV_ERROR_UNSUPPORTED:
      return "UnsupportedError";
    case FV_ERROR_WORKSPACE_TOO_SMALL:
      return "WorkspaceTooSmallError";
    case FV_ERROR_OUT_OF_MEMORY:
      return "OutOfMemoryError";
    case FV_ERROR_DEVICE:
      return "DeviceError";
    case FV_OK:
    case FV_ERROR_INTERNAL:
      break;
  }
  return "InternalError";
}

}  // namespace

void raise_status(fv_status status, const std::string& message) {
  const nb::object type = nb::module_::import_("flashverify.errors").attr(exception_name(status));
  PyErr_SetString(type.ptr(), message.c_str());
  throw nb::python_error();
}

void raise_invalid(const char* argument, const std::string& finding, const std::string& accepted) {
  raise_status(FV_ERROR_INVALID_ARGUMENT,
               std::string(argument) + ": " + finding + "; accepted: " + accepted);
}

void raise_unless_ok(fv_status status) {
  if (status != FV_OK) raise_status(status, api().last_error());
}

}  // namespace flashverify::bindings
