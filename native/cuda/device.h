// One device: its context, its loaded code and its launch counters.
#ifndef FLASHVERIFY_NATIVE_CUDA_DEVICE_H_
#define FLASHVERIFY_NATIVE_CUDA_DEVICE_H_

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "native/cuda/driver.h"

namespace flashverify::cuda {

// "sm_90a" -> 90, "compute_70" -> 70, "" -> 0.
int arch_number(const std::string& arch);

struct Kernel {
  Function function = nullptr;
  const char* arch = nullptr;  // of the image that holds it
};

class Device {
 public:
  // The device of that index, set up on first use and kept.
  static Status get(int index, Device** device);

  const Driver& driver() const { return *driver_; }
  const std::string& name() const { return name_; }
  int major() const { return major_; }
  int minor() const { return minor_; }
  int multiprocessors() const { return multiprocessors_; }
  int shared_bytes() const { return shared_bytes_; }

  // Makes the device current for this scope, whatever the thread had.
  class Scope {
   public:
    explicit Scope(const Device& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    const Status& status() const { return status_; }

   private:
    const Device& device_;
    Status status_;
    int capture_mode_;
  };

  // True if code for `arch` runs here: same major version and no newer minor;
  // "sm_90a" on 9.0 alone; PTX on anything as new.
  bool runs(const std::string& arch) const;

  // The kernel `name` of `source`, loaded on first use from the best image, or
  // from the image named. Needs a Scope.
  Status kernel(const std::string& source, const std::string& name, const std::string& image,
                int shared_bytes, Kernel* kernel);
  // The image that kernel() would take; empty if none.
  std::string best_image(const std::string& source) const;
  // What best_image() gives for the grouped routes; null if none.
  const char* own_image() const;

  // Two barrier counters and the status word that belong to a workspace: device
  // memory that is zero when no launch uses it. Needs a Scope.
  Status launch_state(const void* workspace, DevicePointer* state);

 private:
  Status set_up(int index);
  Status load(const std::string& source, const std::string& image, Module* module,
              const char** arch);

  const Driver* driver_ = nullptr;
  int index_ = 0;
  std::string name_;
  int major_ = 0;
  int minor_ = 0;
  int multiprocessors_ = 0;
  int shared_bytes_ = 0;
  Context context_ = nullptr;

  mutable std::mutex best_mutex_;
  mutable std::unordered_map<std::string, std::string> best_images_;

  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::pair<Module, const char*>> modules_;
  std::map<std::pair<std::string, std::string>, Kernel> kernels_;
  DevicePointer states_ = 0;
  size_t state_count_ = 0;
  size_t next_state_ = 0;
  std::unordered_map<const void*, size_t> state_of_;
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_DEVICE_H_
