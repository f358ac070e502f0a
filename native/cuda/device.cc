#include "native/cuda/device.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "native/cuda/cuda.h"
#include "native/cuda/images.h"

namespace flashverify::cuda {
namespace {

constexpr const char* kRuntimeSource = "runtime";
constexpr const char* kStatesSymbol = "flashverify_launch_states";
constexpr size_t kStateBytes = 64;

bool is_ptx(const std::string& arch) { return arch.rfind("compute_", 0) == 0; }

}  // namespace

int arch_number(const std::string& arch) {
  return arch.empty() ? 0 : std::atoi(arch.c_str() + arch.find('_') + 1);
}

const char* const* image_names() {
  static const std::vector<const char*>& names = *[] {
    auto* distinct = new std::vector<const char*>;
    for (const Image* image = flashverify_cuda_images; image->arch != nullptr; ++image) {
      bool known = false;
      for (const char* name : *distinct) known |= std::strcmp(name, image->arch) == 0;
      if (!known) distinct->push_back(image->arch);
    }
    distinct->push_back(nullptr);
    return distinct;
  }();
  return names.data();
}

Status Device::get(int index, Device** device) {
  const Driver* driver = nullptr;
  FV_CUDA_RETURN_IF_ERROR(get_driver(&driver));
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Device>>& devices = *new std::vector<std::unique_ptr<Device>>;
  const std::lock_guard<std::mutex> lock(mutex);
  int count = 0;
  FV_CUDA_RETURN_IF_ERROR(check(*driver, driver->device_count(&count), "cuDeviceGetCount"));
  if (index < 0 || index >= count) {
    return Status::error(FV_ERROR_INVALID_ARGUMENT, "device: index " + std::to_string(index) +
                                                        ", but this machine has " +
                                                        std::to_string(count) + " CUDA devices");
  }
  if (devices.size() < static_cast<size_t>(count)) devices.resize(static_cast<size_t>(count));
  std::unique_ptr<Device>& slot = devices[static_cast<size_t>(index)];
  if (slot == nullptr) {
    auto fresh = std::make_unique<Device>();
    fresh->driver_ = driver;
    FV_CUDA_RETURN_IF_ERROR(fresh->set_up(index));
    slot = std::move(fresh);
  }
  *device = slot.get();
  return {};
}

Status Device::set_up(int index) {
  index_ = index;
  int handle = 0;
  FV_CUDA_RETURN_IF_ERROR(check(*driver_, driver_->device_get(&handle, index), "cuDeviceGet"));
  char name[256] = {};
  FV_CUDA_RETURN_IF_ERROR(
      check(*driver_, driver_->device_name(name, sizeof(name), handle), "cuDeviceGetName"));
  name_ = name;
  const struct {
    int* value;
    int attribute;
  } attributes[] = {{&major_, kAttributeMajor},
                    {&minor_, kAttributeMinor},
                    {&multiprocessors_, kAttributeMultiprocessors},
                    {&shared_bytes_, kAttributeSharedBytesPerBlock}};
  for (const auto& a : attributes) {
    FV_CUDA_RETURN_IF_ERROR(check(*driver_, driver_->device_attribute(a.value, a.attribute, handle),
                                  "cuDeviceGetAttribute"));
  }
  return check(*driver_, driver_->primary_retain(&context_, handle), "cuDevicePrimaryCtxRetain");
}

Device::Scope::Scope(const Device& device) : device_(device), capture_mode_(kCaptureRelaxed) {
  // Loading code must work while a stream of this thread is being captured.
  device.driver().exchange_capture_mode(&capture_mode_);
  status_ =
      check(device.driver(), device.driver().push_context(device.context_), "cuCtxPushCurrent");
}
Device::Scope::~Scope() {
  Context popped = nullptr;
  if (status_.ok()) device_.driver().pop_context(&popped);
  device_.driver().exchange_capture_mode(&capture_mode_);
}

bool Device::runs(const std::string& arch) const {
  const int number = arch_number(arch);
  const int here = major_ * 10 + minor_;
  if (is_ptx(arch)) return number <= here;
  if (arch.back() == 'a') return number == here;
  return number / 10 == major_ && number <= here;
}

// Kept by source: a walk over all images takes longer than the rest of a call.
std::string Device::best_image(const std::string& source) const {
  const std::lock_guard<std::mutex> lock(best_mutex_);
  const auto found = best_images_.find(source);
  if (found != best_images_.end()) return found->second;
  std::string best;
  for (const Image* image = flashverify_cuda_images; image->arch != nullptr; ++image) {
    if (source != image->source || !runs(image->arch)) continue;
    // Machine code before PTX, then the newest.
    const auto rank = [](const std::string& arch) {
      return (is_ptx(arch) ? 0 : 1000) + arch_number(arch);
    };
    if (best.empty() || rank(image->arch) > rank(best)) best = image->arch;
  }
  best_images_[source] = best;
  return best;
}

const char* Device::own_image() const {
  for (const char* source :
       {"grouped_sm90_e4m3_d256", "grouped_sm80_e4m3_d256", "grouped_sm70_e4m3_d256", "scalar"}) {
    const std::string best = best_image(source);
    for (const Image* image = flashverify_cuda_images; image->arch != nullptr; ++image) {
      if (best == image->arch) return image->arch;
    }
  }
  return nullptr;
}

Status Device::load(const std::string& source, const std::string& image, Module* module,
                    const char** arch) {
  const std::string wanted = image.empty() ? best_image(source) : image;
  const auto key = std::make_pair(source, wanted);
  const auto found = modules_.find(key);
  if (found != modules_.end()) {
    *module = found->second.first;
    *arch = found->second.second;
    return {};
  }
  const Image* match = nullptr;
  std::string available;
  for (const Image* i = flashverify_cuda_images; i->arch != nullptr; ++i) {
    if (source != i->source) continue;
    available += (available.empty() ? "" : ", ") + std::string(i->arch);
    if (wanted == i->arch) match = i;
  }
  if (match == nullptr || !runs(wanted)) {
    return Status::error(FV_ERROR_UNSUPPORTED, "image: no code of " + source + " for " +
                                                   (wanted.empty() ? "this device" : wanted) +
                                                   " runs on " + name_ + " (sm_" +
                                                   std::to_string(major_ * 10 + minor_) +
                                                   "); built: " + available);
  }
  FV_CUDA_RETURN_IF_ERROR(check(*driver_,
                                driver_->module_load(module, match->begin, 0, nullptr, nullptr),
                                ("loading " + source + " for " + wanted).c_str()));
  *arch = match->arch;
  modules_[key] = {*module, *arch};
  return {};
}

Status Device::kernel(const std::string& source, const std::string& name, const std::string& image,
                      int shared_bytes, Kernel* kernel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto key = std::make_pair(name, image);
  const auto found = kernels_.find(key);
  if (found != kernels_.end()) {
    *kernel = found->second;
    return {};
  }
  Module module = nullptr;
  FV_CUDA_RETURN_IF_ERROR(load(source, image, &module, &kernel->arch));
  FV_CUDA_RETURN_IF_ERROR(check(
      *driver_, driver_->module_function(&kernel->function, module, name.c_str()), name.c_str()));
  if (shared_bytes > 0) {
    FV_CUDA_RETURN_IF_ERROR(check(
        *driver_, driver_->function_set(kernel->function, kFunctionMaxDynamicShared, shared_bytes),
        ("shared memory of " + name).c_str()));
  }
  kernels_[key] = *kernel;
  return {};
}

Status Device::launch_state(const void* workspace, DevicePointer* state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (states_ == 0) {
    Module module = nullptr;
    const char* arch = nullptr;
    FV_CUDA_RETURN_IF_ERROR(load(kRuntimeSource, "", &module, &arch));
    size_t bytes = 0;
    FV_CUDA_RETURN_IF_ERROR(check(
        *driver_, driver_->module_global(&states_, &bytes, module, kStatesSymbol), kStatesSymbol));
    state_count_ = bytes / kStateBytes;
  }
  const auto found = state_of_.find(workspace);
  size_t index = 0;
  if (found != state_of_.end()) {
    index = found->second;
  } else {
    // More workspaces than states: the oldest state is given on.
    index = next_state_++ % state_count_;
    for (auto i = state_of_.begin(); i != state_of_.end();) {
      i = i->second == index ? state_of_.erase(i) : std::next(i);
    }
    state_of_[workspace] = index;
  }
  *state = states_ + index * kStateBytes;
  return {};
}

}  // namespace flashverify::cuda
