// Memory, streams, graphs and events for the tests and benchmarks, over the
// driver API. A failed call prints the driver's text and ends the program.
#ifndef FLASHVERIFY_NATIVE_CUDA_TESTING_GPU_H_
#define FLASHVERIFY_NATIVE_CUDA_TESTING_GPU_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "native/cuda/driver.h"

namespace flashverify::cuda::testing {

struct Gpu {
  Gpu();

  DevicePointer allocate(size_t bytes);
  void release(DevicePointer p);
  void to_device(DevicePointer target, const void* source, size_t bytes);
  void to_host(void* target, DevicePointer source, size_t bytes);
  void fill(DevicePointer target, int byte, size_t bytes);
  void synchronize();

  // A kernel of harness.cu.
  void launch(const char* name, unsigned grid_x, unsigned grid_y, unsigned block, void** arguments);

  enum class Flush {
    kMemset,  // L2 left full of dirty lines
    kRead,    // L2 left full of clean lines of other data
    kNone,
  };
  // Median time of replays of `work` captured as a graph, L2 flushed before each.
  double graph_us(const std::function<void()>& work, Flush flush, int replays);

  // A graph of `work`, to be replayed by hand.
  void* capture(const std::function<void()>& work);
  void replay(void* graph);

  Stream stream = nullptr;

 private:
  DevicePointer flush_ = 0;
  DevicePointer sink_ = 0;
};

void require(const Status& status);

}  // namespace flashverify::cuda::testing

#endif  // FLASHVERIFY_NATIVE_CUDA_TESTING_GPU_H_
