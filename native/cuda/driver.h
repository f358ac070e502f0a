// The part of the CUDA driver API that this library uses, declared here so that
// no toolkit is needed to build, and loaded from libcuda.so.1 on first use so
// that one library serves machines with and without a GPU.
#ifndef FLASHVERIFY_NATIVE_CUDA_DRIVER_H_
#define FLASHVERIFY_NATIVE_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "flashverify/flashverify.h"

namespace flashverify::cuda {

struct Status {
  fv_status code = FV_OK;
  std::string message;

  bool ok() const { return code == FV_OK; }
  static Status error(fv_status code, std::string message) { return {code, std::move(message)}; }
};

// Returns from the calling function with the status of `expression` if it failed.
#define FV_CUDA_RETURN_IF_ERROR(expression)                    \
  do {                                                         \
    ::flashverify::cuda::Status status_of_call = (expression); \
    if (!status_of_call.ok()) return status_of_call;           \
  } while (false)

using Result = int;  // CUresult
using DevicePointer = uint64_t;
using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;

constexpr Result kSuccess = 0;
constexpr Result kErrorOutOfMemory = 2;

// CUdevice_attribute
constexpr int kAttributeMultiprocessors = 16;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeSharedBytesPerBlock = 97;  // with opt-in
constexpr int kAttributeCooperativeLaunch = 95;
// CUfunction_attribute
constexpr int kFunctionMaxDynamicShared = 8;

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  char padding[4];
  union {
    int cooperative;
    char bytes[64];
  } value;
};
constexpr int kLaunchCooperative = 2;

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct alignas(64) DriverTensorMap {  // CUtensorMap
  uint64_t opaque[16];
};
constexpr int kTensorMapUint8 = 0;
constexpr int kTensorMapSwizzle64 = 2;
constexpr int kTensorMapSwizzle128 = 3;
constexpr int kTensorMapPromoteNone = 0;
constexpr int kTensorMapPromote256 = 3;

// CUstreamCaptureMode
constexpr int kCaptureRelaxed = 2;

struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*error_name)(Result error, const char** text);
  Result (*error_string)(Result error, const char** text);
  Result (*device_count)(int* count);
  Result (*device_get)(int* device, int ordinal);
  Result (*device_name)(char* name, int length, int device);
  Result (*device_attribute)(int* value, int attribute, int device);
  Result (*primary_retain)(Context* context, int device);
  Result (*push_context)(Context context);
  Result (*pop_context)(Context* context);
  Result (*module_load)(Module* module, const void* image, unsigned options, int* keys,
                        void** values);
  Result (*module_function)(Function* function, Module module, const char* name);
  Result (*module_global)(DevicePointer* address, size_t* bytes, Module module, const char* name);
  Result (*function_set)(Function function, int attribute, int value);
  Result (*launch)(const LaunchConfig* config, Function function, void** arguments, void** extra);
  Result (*copy_to_host)(void* target, DevicePointer source, size_t bytes);
  Result (*set_words)(DevicePointer target, unsigned value, size_t words);
  Result (*exchange_capture_mode)(int* mode);
  // Null where the driver is older than the copy engine's descriptors.
  Result (*encode_tensor_map)(DriverTensorMap* map, int type, unsigned rank, void* address,
                              const uint64_t* dims, const uint64_t* strides, const unsigned* box,
                              const unsigned* element_strides, int interleave, int swizzle,
                              int promotion, int fill);
};

// The driver, initialised; or why there is none. Any thread, any number of times.
Status get_driver(const Driver** driver);

// "what: CUDA_ERROR_NAME: the driver's text". Out of memory keeps its own code.
Status check(const Driver& driver, Result result, const char* what);

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DRIVER_H_
