#include "native/cuda/driver.h"

#include <dlfcn.h>

namespace flashverify::cuda {
namespace {

struct Loaded {
  Driver driver = {};
  Status status;
};

template <class Pointer>
bool resolve(void* library, const char* name, Pointer* target) {
  *target = reinterpret_cast<Pointer>(dlsym(library, name));
  return *target != nullptr;
}

Loaded load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    loaded.status = Status::error(
        FV_ERROR_DEVICE, std::string("no CUDA driver on this machine: ") +
                             (reason != nullptr ? reason : "libcuda.so.1 could not be loaded"));
    return loaded;
  }
  Driver& d = loaded.driver;
  const char* missing = nullptr;
  const auto need = [&](const char* name, auto* target) {
    if (!resolve(library, name, target) && missing == nullptr) missing = name;
  };
  need("cuInit", &d.init);
  need("cuDriverGetVersion", &d.driver_version);
  need("cuGetErrorName", &d.error_name);
  need("cuGetErrorString", &d.error_string);
  need("cuDeviceGetCount", &d.device_count);
  need("cuDeviceGet", &d.device_get);
  need("cuDeviceGetName", &d.device_name);
  need("cuDeviceGetAttribute", &d.device_attribute);
  need("cuDevicePrimaryCtxRetain", &d.primary_retain);
  need("cuCtxPushCurrent_v2", &d.push_context);
  need("cuCtxPopCurrent_v2", &d.pop_context);
  need("cuModuleLoadDataEx", &d.module_load);
  need("cuModuleGetFunction", &d.module_function);
  need("cuModuleGetGlobal_v2", &d.module_global);
  need("cuFuncSetAttribute", &d.function_set);
  need("cuLaunchKernelEx", &d.launch);
  need("cuMemcpyDtoH_v2", &d.copy_to_host);
  need("cuMemsetD32_v2", &d.set_words);
  need("cuThreadExchangeStreamCaptureMode", &d.exchange_capture_mode);
  resolve(library, "cuTensorMapEncodeTiled", &d.encode_tensor_map);
  if (missing != nullptr) {
    loaded.status =
        Status::error(FV_ERROR_DEVICE, std::string("the CUDA driver is too old: it lacks ") +
                                           missing + "; 11.8 or newer is accepted");
    return loaded;
  }
  loaded.status = check(d, d.init(0), "cuInit");
  return loaded;
}

}  // namespace

Status get_driver(const Driver** driver) {
  static const Loaded loaded = load();
  *driver = &loaded.driver;
  return loaded.status;
}

Status check(const Driver& driver, Result result, const char* what) {
  if (result == kSuccess) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  driver.error_name(result, &name);
  driver.error_string(result, &text);
  const fv_status code = result == kErrorOutOfMemory ? FV_ERROR_OUT_OF_MEMORY : FV_ERROR_DEVICE;
  return Status::error(code, std::string(what) + ": " +
                                 (name != nullptr ? name : "CUDA error " + std::to_string(result)) +
                                 ": " + (text != nullptr ? text : "no text from the driver"));
}

}  // namespace flashverify::cuda
