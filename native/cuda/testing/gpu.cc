#include "native/cuda/testing/gpu.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "native/cuda/device.h"

namespace flashverify::cuda::testing {
namespace {

constexpr size_t kFlushBytes = size_t{256} << 20;

struct Extra {
  Result (*alloc)(DevicePointer*, size_t);
  Result (*free)(DevicePointer);
  Result (*to_device)(DevicePointer, const void*, size_t);
  Result (*fill)(DevicePointer, unsigned char, size_t);
  Result (*fill_async)(DevicePointer, unsigned char, size_t, Stream);
  Result (*stream_create)(Stream*, unsigned);
  Result (*stream_synchronize)(Stream);
  Result (*begin_capture)(Stream, int);
  Result (*end_capture)(Stream, void**);
  Result (*instantiate)(void**, void*, unsigned long long);
  Result (*graph_launch)(void*, Stream);
  Result (*event_create)(void**, unsigned);
  Result (*event_record)(void*, Stream);
  Result (*event_elapsed)(float*, void*, void*);
  Result (*push)(Context);
};
Extra extra;
const Driver* driver = nullptr;
Device* device = nullptr;

void must(Result result, const char* what) { require(check(*driver, result, what)); }

}  // namespace

void require(const Status& status) {
  if (status.ok()) return;
  std::printf("FAILED: %s\n", status.message.c_str());
  std::fflush(stdout);
  std::exit(1);
}

Gpu::Gpu() {
  require(get_driver(&driver));
  require(Device::get(0, &device));
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  const auto need = [&](const char* name, auto* target) {
    *target = reinterpret_cast<std::remove_reference_t<decltype(*target)>>(dlsym(library, name));
    if (*target == nullptr) std::exit(2);
  };
  need("cuMemAlloc_v2", &extra.alloc);
  need("cuMemFree_v2", &extra.free);
  need("cuMemcpyHtoD_v2", &extra.to_device);
  need("cuMemsetD8_v2", &extra.fill);
  need("cuMemsetD8Async", &extra.fill_async);
  need("cuStreamCreate", &extra.stream_create);
  need("cuStreamSynchronize", &extra.stream_synchronize);
  need("cuStreamBeginCapture_v2", &extra.begin_capture);
  need("cuStreamEndCapture", &extra.end_capture);
  need("cuGraphInstantiateWithFlags", &extra.instantiate);
  need("cuGraphLaunch", &extra.graph_launch);
  need("cuEventCreate", &extra.event_create);
  need("cuEventRecord", &extra.event_record);
  need("cuEventElapsedTime", &extra.event_elapsed);
  static Device::Scope* const scope = new Device::Scope(*device);  // current for good
  require(scope->status());
  must(extra.stream_create(&stream, 0), "cuStreamCreate");
  flush_ = allocate(kFlushBytes);
  sink_ = allocate(64);
  fill(flush_, 1, kFlushBytes);
}

DevicePointer Gpu::allocate(size_t bytes) {
  DevicePointer p = 0;
  must(extra.alloc(&p, std::max<size_t>(bytes, 256)), "cuMemAlloc");
  return p;
}
void Gpu::release(DevicePointer p) { must(extra.free(p), "cuMemFree"); }
void Gpu::to_device(DevicePointer target, const void* source, size_t bytes) {
  must(extra.to_device(target, source, bytes), "cuMemcpyHtoD");
}
void Gpu::to_host(void* target, DevicePointer source, size_t bytes) {
  synchronize();
  must(driver->copy_to_host(target, source, bytes), "cuMemcpyDtoH");
}
void Gpu::fill(DevicePointer target, int byte, size_t bytes) {
  must(extra.fill_async(target, static_cast<unsigned char>(byte), bytes, stream),
       "cuMemsetD8Async");
}
void Gpu::synchronize() { must(extra.stream_synchronize(stream), "cuStreamSynchronize"); }

void Gpu::launch(const char* name, unsigned grid_x, unsigned grid_y, unsigned block,
                 void** arguments) {
  Kernel kernel;
  require(device->kernel("harness", name, "", 0, &kernel));
  LaunchConfig config = {};
  config.grid[0] = grid_x;
  config.grid[1] = grid_y;
  config.grid[2] = 1;
  config.block[0] = block;
  config.block[1] = config.block[2] = 1;
  config.stream = stream;
  must(driver->launch(&config, kernel.function, arguments, nullptr), name);
}

void* Gpu::capture(const std::function<void()>& work) {
  void* graph = nullptr;
  void* executable = nullptr;
  must(extra.begin_capture(stream, 0), "cuStreamBeginCapture");
  work();
  must(extra.end_capture(stream, &graph), "cuStreamEndCapture");
  must(extra.instantiate(&executable, graph, 0), "cuGraphInstantiate");
  return executable;
}
void Gpu::replay(void* graph) { must(extra.graph_launch(graph, stream), "cuGraphLaunch"); }

double Gpu::graph_us(const std::function<void()>& work, Flush flush, int replays) {
  work();
  synchronize();
  void* const graph = capture(work);
  for (int i = 0; i < 3; ++i) replay(graph);
  static void* begin = nullptr;
  static void* end = nullptr;
  if (begin == nullptr) {
    must(extra.event_create(&begin, 0), "cuEventCreate");
    must(extra.event_create(&end, 0), "cuEventCreate");
  }
  std::vector<float> times;
  for (int i = 0; i < replays; ++i) {
    if (flush == Flush::kMemset) {
      must(extra.fill_async(flush_, 0, kFlushBytes, stream), "cuMemsetD8Async");
    } else if (flush == Flush::kRead) {
      long long count = kFlushBytes / 16;
      void* arguments[] = {&flush_, &count, &sink_};
      launch("harness_read", 132 * 8, 1, 256, arguments);
    }
    must(extra.event_record(begin, stream), "cuEventRecord");
    replay(graph);
    must(extra.event_record(end, stream), "cuEventRecord");
    synchronize();
    float ms = 0;
    must(extra.event_elapsed(&ms, begin, end), "cuEventElapsedTime");
    times.push_back(ms * 1e3f);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace flashverify::cuda::testing
