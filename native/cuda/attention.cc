// Plans and launches the attention kernels.
#include <algorithm>

#include "native/cuda/cuda.h"
#include "native/cuda/device.h"
#include "native/cuda/device/args.h"
#include "native/cuda/grouped_plan.h"
#include "native/state/float_environment.h"

namespace flashverify::cuda {
namespace {

int64_t type_bytes(fv_dtype type) {
  switch (type) {
    case FV_DTYPE_FLOAT32:
      return 4;
    case FV_DTYPE_FLOAT16:
    case FV_DTYPE_BFLOAT16:
      return 2;
    default:
      return 1;
  }
}

Cache cache_arguments(const CacheView& view, int64_t bytes) {
  Cache cache = {};
  cache.data = static_cast<const unsigned char*>(view.data);
  cache.page_stride = view.page_stride * bytes;
  cache.token_stride = view.token_stride * bytes;
  cache.head_stride = view.head_stride * bytes;
  return cache;
}

bool is_aligned(const Cache& cache) {
  const auto low =
      reinterpret_cast<uintptr_t>(cache.data) | static_cast<uintptr_t>(cache.page_stride) |
      static_cast<uintptr_t>(cache.token_stride) | static_cast<uintptr_t>(cache.head_stride);
  return low % 16 == 0;
}

// Boxes of `tokens` rows and one 128-byte column (or the whole row, if shorter).
Status encode_map(const Driver& driver, const AttentionProblem& problem, const Cache& cache,
                  int row_bytes, int64_t used_bytes, int tokens, DriverTensorMap* map) {
  const uint64_t dims[4] = {
      static_cast<uint64_t>(used_bytes), static_cast<uint64_t>(problem.kv_heads),
      static_cast<uint64_t>(problem.page_size), static_cast<uint64_t>(problem.pages)};
  // The stride of an axis of one element means nothing, but must be legal.
  const int64_t head_stride =
      problem.kv_heads == 1 ? (used_bytes + 15) / 16 * 16 : cache.head_stride;
  const uint64_t strides[3] = {static_cast<uint64_t>(head_stride),
                               static_cast<uint64_t>(cache.token_stride),
                               static_cast<uint64_t>(cache.page_stride)};
  const unsigned box[4] = {static_cast<unsigned>(std::min(row_bytes, 128)), 1,
                           static_cast<unsigned>(tokens), 1};
  const unsigned ones[4] = {1, 1, 1, 1};
  return check(driver,
               driver.encode_tensor_map(
                   map, kTensorMapUint8, 4, const_cast<unsigned char*>(cache.data), dims, strides,
                   box, ones, 0, row_bytes >= 128 ? kTensorMapSwizzle128 : kTensorMapSwizzle64,
                   kTensorMapPromote256, 0),
               "cuTensorMapEncodeTiled");
}

// softmax_scale * log2(e). Volatile, since compilers move arithmetic across a
// change of the rounding mode, of which they know nothing.
float base_two_scale(float softmax_scale) {
  const DefaultFloatEnvironment environment;
  const volatile double scale = static_cast<double>(softmax_scale);
  const volatile float product = static_cast<float>(scale * 1.4426950408889634);
  return product;
}

AttentionArgs common_arguments(const AttentionProblem& problem) {
  AttentionArgs a = {};
  const int64_t q_bytes = type_bytes(problem.q_dtype);
  const int64_t kv_bytes = type_bytes(problem.kv_dtype);
  const int64_t out_bytes = type_bytes(problem.out_dtype);
  a.q = static_cast<const unsigned char*>(problem.q);
  a.q_row_stride = problem.q_row_stride * q_bytes;
  a.q_head_stride = problem.q_head_stride * q_bytes;
  a.k = cache_arguments(problem.k, kv_bytes);
  a.v = cache_arguments(problem.v, kv_bytes);
  a.page_table = problem.page_table;
  a.page_table_row_stride = problem.page_table_row_stride;
  a.seq_lens = problem.seq_lens;
  a.query_start_loc = problem.query_start_loc;
  a.k_scale = problem.k_scale.data;
  a.v_scale = problem.v_scale.data;
  a.k_scale_stride = problem.k_scale.stride;
  a.v_scale_stride = problem.v_scale.stride;
  a.k_scale_number = problem.k_scale.number;
  a.v_scale_number = problem.v_scale.number;
  a.sinks = problem.sinks;
  a.out = static_cast<unsigned char*>(problem.out);
  a.out_row_stride = problem.out_row_stride * out_bytes;
  a.out_head_stride = problem.out_head_stride * out_bytes;
  a.lse = problem.lse;
  a.lse_row_stride = problem.lse_row_stride;
  a.lse_head_stride = problem.lse_head_stride;
  a.rows = static_cast<int>(problem.rows);
  a.query_len = static_cast<int>(problem.rows / problem.batch);
  a.batch = static_cast<int>(problem.batch);
  a.group = static_cast<int>(problem.group());
  // index / group == mulhi(index, magic) while index * group < 2^32.
  if (problem.rows * problem.group() < 65536 && problem.group() > 1) {
    a.group_magic = static_cast<uint32>(((uint64_t{1} << 32) + static_cast<uint64_t>(a.group) - 1) /
                                        static_cast<uint64_t>(a.group));
  }
  a.kv_heads = static_cast<int>(problem.kv_heads);
  a.head_dim = static_cast<int>(problem.head_dim);
  a.pages = static_cast<int>(std::min<int64_t>(problem.pages, INT32_MAX));
  a.page_size = static_cast<int>(problem.page_size);
  a.max_pages = static_cast<int>(problem.max_pages);
  a.q_type = problem.q_dtype;
  a.out_type = problem.out_dtype;
  a.causal = problem.causal;
  a.window = static_cast<int>(std::min<int64_t>(problem.window, INT32_MAX));
  a.score_scale = base_two_scale(problem.softmax_scale);
  a.softcap = problem.softcap;
  return a;
}

int log2_of(int power_of_two) {
  int log2 = 0;
  while (1 << log2 < power_of_two) ++log2;
  return log2;
}

void set_schedule(AttentionArgs* a, int splits, int fold) {
  a->splits = splits;
  a->fold = fold;
  a->parts = splits / fold;
  a->splits_log2 = log2_of(splits);
  a->parts_log2 = log2_of(a->parts);
}

// Blocks of the grid, threads of a block.
LaunchConfig launch_config(int64_t blocks, int64_t blocks_y, int threads, int shared_bytes,
                           Stream stream) {
  LaunchConfig config = {};
  config.grid[0] = static_cast<unsigned>(blocks);
  config.grid[1] = static_cast<unsigned>(blocks_y);
  config.grid[2] = 1;
  config.block[0] = static_cast<unsigned>(threads);
  config.block[1] = config.block[2] = 1;
  config.shared_bytes = static_cast<unsigned>(shared_bytes);
  config.stream = stream;
  return config;
}

PlanDevice plan_device(const Device& device) {
  return {device.multiprocessors(),
          [&device](const std::string& source) { return device.best_image(source); }};
}

bool is_scalar(fv_route route) {
  return route == FV_ROUTE_SCALAR_FP32 || route == FV_ROUTE_SCALAR_HALF;
}

Status plan_scalar(const AttentionProblem& problem, const Target& target, ScalarPlan* plan,
                   size_t* workspace_bytes) {
  FV_CUDA_RETURN_IF_ERROR(check_schedule(target));
  constexpr int64_t kMaxDim = 512;
  if (problem.head_dim > kMaxDim) {
    return Status::error(FV_ERROR_UNSUPPORTED, "head_dim: " + std::to_string(problem.head_dim) +
                                                   "; the scalar kernels accept 1 to " +
                                                   std::to_string(kMaxDim));
  }
  plan->blocks = problem.rows * problem.q_heads;
  const int64_t parts = plan->blocks * target.splits;
  plan->stats_bytes = static_cast<size_t>((parts * 8 + 255) / 256 * 256);
  *workspace_bytes = plan->stats_bytes + static_cast<size_t>(parts * problem.head_dim * 4);
  return {};
}

Status run_scalar(Device* device, const AttentionProblem& problem, const Target& target,
                  const ScalarPlan& plan, AttentionArgs arguments, void* workspace,
                  const char** image) {
  set_schedule(&arguments, target.splits, 1);
  arguments.partial_stats = static_cast<float2*>(workspace);
  arguments.partials = static_cast<unsigned char*>(workspace) + plan.stats_bytes;
  const std::string family =
      problem.route == FV_ROUTE_SCALAR_HALF ? "scalar_half_" : "scalar_fp32_";
  const std::string names[2] = {family + dtype_name(problem.kv_dtype), family + "merge"};
  const Driver& driver = device->driver();
  for (int i = 0; i < 2; ++i) {
    Kernel kernel;
    FV_CUDA_RETURN_IF_ERROR(device->kernel("scalar", names[i], target.image, 0, &kernel));
    const LaunchConfig config =
        launch_config(plan.blocks, i == 0 ? target.splits : 1, 128, 0, target.stream);
    void* parameters[] = {&arguments};
    FV_CUDA_RETURN_IF_ERROR(check(
        driver, driver.launch(&config, kernel.function, parameters, nullptr), names[i].c_str()));
    *image = kernel.arch;
  }
  return {};
}

Status run_grouped(Device* device, const AttentionProblem& problem, const Target& target,
                   const GroupedPlan& plan, AttentionArgs arguments, void* workspace,
                   const char** image) {
  const Driver& driver = device->driver();
  set_schedule(&arguments, plan.splits, plan.fold);
  arguments.row_tiles = plan.row_tiles;
  arguments.partial_stats = static_cast<float2*>(workspace);
  arguments.partials = static_cast<unsigned char*>(workspace) + plan.stats_bytes;
  arguments.vector_copy = is_aligned(arguments.k) && is_aligned(arguments.v);

  struct alignas(64) {
    DriverTensorMap half[2];
    DriverTensorMap granule[2];
  } maps = {};
  const int page = arguments.page_size;
  arguments.granule_tokens = page % 16 == 0 ? 16 : 8;
  if (plan.has_bulk_copy && driver.encode_tensor_map != nullptr && page % 8 == 0 &&
      arguments.vector_copy) {
    arguments.bulk_copy = 1;
    const int row_bytes = static_cast<int>(plan.dim * type_bytes(problem.kv_dtype));
    const int64_t used = problem.head_dim * type_bytes(problem.kv_dtype);
    for (int i = 0; i < 2 && arguments.bulk_copy; ++i) {
      const Cache& cache = i == 0 ? arguments.k : arguments.v;
      Status status =
          encode_map(driver, problem, cache, row_bytes, used, std::min(page, 64), &maps.half[i]);
      if (status.ok()) {
        status = encode_map(driver, problem, cache, row_bytes, used, arguments.granule_tokens,
                            &maps.granule[i]);
      }
      // Strides that a descriptor cannot hold are gathered by plain loads.
      if (!status.ok()) arguments.bulk_copy = 0;
    }
  }

  Kernel kernel;
  FV_CUDA_RETURN_IF_ERROR(
      device->kernel(plan.source, plan.kernel, target.image, plan.shared_bytes, &kernel));
  LaunchConfig config =
      launch_config(plan.blocks, 1, plan.threads, plan.shared_bytes, target.stream);
  LaunchAttribute cooperative = {};
  cooperative.id = kLaunchCooperative;
  cooperative.value.cooperative = 1;
  // The merge waits for the whole grid.
  if (plan.fold < plan.splits) {
    config.attributes = &cooperative;
    config.attribute_count = 1;
  }
  void* parameters[] = {&arguments, &maps};
  FV_CUDA_RETURN_IF_ERROR(check(
      driver, driver.launch(&config, kernel.function, parameters, nullptr), plan.kernel.c_str()));
  *image = kernel.arch;
  return {};
}

}  // namespace

const char* dtype_name(fv_dtype type) {
  switch (type) {
    case FV_DTYPE_FLOAT8_E4M3:
      return "e4m3";
    case FV_DTYPE_FLOAT8_E5M2:
      return "e5m2";
    case FV_DTYPE_FLOAT16:
      return "f16";
    case FV_DTYPE_BFLOAT16:
      return "bf16";
    default:
      return "unknown";
  }
}

Status check_schedule(const Target& target) {
  if (target.splits >= 1 && target.splits <= kMaxSplits &&
      (target.splits & (target.splits - 1)) == 0)
    return {};
  return Status::error(FV_ERROR_INVALID_ARGUMENT, "schedule: n" + std::to_string(target.splits) +
                                                      "; powers of two from n1 to n" +
                                                      std::to_string(kMaxSplits) + " are accepted");
}

Status plan_attention(const AttentionProblem& problem, const Target& target, AttentionPlan* plan) {
  *plan = {};
  if (problem.rows == 0 || problem.batch == 0) return {};
  FV_CUDA_RETURN_IF_ERROR(Device::get(target.device, &plan->device));
  if (is_scalar(problem.route)) {
    return plan_scalar(problem, target, &plan->scalar, &plan->workspace_bytes);
  }
  FV_CUDA_RETURN_IF_ERROR(
      plan_grouped(problem, plan_device(*plan->device), target, &plan->grouped));
  plan->workspace_bytes = plan->grouped.workspace_bytes;
  return {};
}

Status capacity_workspace_bytes(const AttentionProblem& problem, const Target& target,
                                size_t* bytes) {
  AttentionPlan plan;
  if (is_scalar(problem.route) || problem.rows == 0 || problem.batch == 0) {
    FV_CUDA_RETURN_IF_ERROR(plan_attention(problem, target, &plan));
    *bytes = plan.workspace_bytes;
    return {};
  }
  FV_CUDA_RETURN_IF_ERROR(Device::get(target.device, &plan.device));
  return grouped_capacity_bytes(problem, plan_device(*plan.device), target, bytes);
}

Status run_attention(const AttentionProblem& problem, const Target& target,
                     const AttentionPlan& plan, void* workspace, fv_route* ran,
                     const char** image) {
  *ran = problem.route;
  Device* const device = plan.device;
  if (device == nullptr) return {};
  const Device::Scope scope(*device);
  FV_CUDA_RETURN_IF_ERROR(scope.status());
  AttentionArgs arguments = common_arguments(problem);
  DevicePointer state = 0;
  FV_CUDA_RETURN_IF_ERROR(device->launch_state(workspace, &state));
  arguments.barrier = reinterpret_cast<uint32*>(state);
  arguments.status = arguments.barrier + 2;
  return is_scalar(problem.route)
             ? run_scalar(device, problem, target, plan.scalar, arguments, workspace, image)
             : run_grouped(device, problem, target, plan.grouped, arguments, workspace, image);
}

Status run_append(const AppendProblem& problem, const Target& target) {
  if (problem.tokens == 0) return {};
  Device* device = nullptr;
  FV_CUDA_RETURN_IF_ERROR(Device::get(target.device, &device));
  const Device::Scope scope(*device);
  FV_CUDA_RETURN_IF_ERROR(scope.status());
  const int64_t source_bytes = type_bytes(problem.src_dtype);
  AppendArgs a = {};
  a.source[0] = static_cast<const unsigned char*>(problem.key);
  a.source[1] = static_cast<const unsigned char*>(problem.value);
  a.token_stride[0] = problem.key_token_stride * source_bytes;
  a.token_stride[1] = problem.value_token_stride * source_bytes;
  a.head_stride[0] = problem.key_head_stride * source_bytes;
  a.head_stride[1] = problem.value_head_stride * source_bytes;
  a.cache[0] = cache_arguments(problem.k, type_bytes(problem.kv_dtype));
  a.cache[1] = cache_arguments(problem.v, type_bytes(problem.kv_dtype));
  a.scale[0] = problem.k_scale.data;
  a.scale[1] = problem.v_scale.data;
  a.scale_stride[0] = problem.k_scale.stride;
  a.scale_stride[1] = problem.v_scale.stride;
  a.scale_number[0] = problem.k_scale.number;
  a.scale_number[1] = problem.v_scale.number;
  a.slots = problem.slots;
  a.slot_stride = problem.slot_stride;
  a.slots_are_int64 = problem.slots_are_int64;
  a.tokens = problem.tokens;
  a.kv_heads = static_cast<int>(problem.kv_heads);
  a.head_dim = static_cast<int>(problem.head_dim);
  a.page_size = static_cast<int>(problem.page_size);
  a.source_type = problem.src_dtype;
  a.slot_count = problem.pages * problem.page_size;
  // Writes belong to no workspace.
  DevicePointer state = 0;
  FV_CUDA_RETURN_IF_ERROR(device->launch_state(nullptr, &state));
  a.status = reinterpret_cast<uint32*>(state) + 2;
  const std::string name = std::string("append_kv_") + dtype_name(problem.kv_dtype);
  Kernel kernel;
  FV_CUDA_RETURN_IF_ERROR(device->kernel("cache_write", name, target.image, 0, &kernel));
  const LaunchConfig config =
      launch_config((problem.tokens * problem.kv_heads + 7) / 8, 1, 256, 0, target.stream);
  void* parameters[] = {&a};
  const Driver& driver = device->driver();
  return check(driver, driver.launch(&config, kernel.function, parameters, nullptr), name.c_str());
}

Status run_merge(const MergeProblem& problem, const Target& target) {
  if (problem.rows == 0 || problem.heads == 0) return {};
  Device* device = nullptr;
  FV_CUDA_RETURN_IF_ERROR(Device::get(target.device, &device));
  const Device::Scope scope(*device);
  FV_CUDA_RETURN_IF_ERROR(scope.status());
  MergeArgs a = {};
  a.outs = problem.outs;
  a.lses = problem.lses;
  for (int i = 0; i < 3; ++i) {
    a.outs_stride[i] = problem.outs_stride[i];
    a.lses_stride[i] = problem.lses_stride[i];
  }
  a.out = problem.out;
  a.out_lse = problem.out_lse;
  for (int i = 0; i < 2; ++i) {
    a.out_stride[i] = problem.out_stride[i];
    a.out_lse_stride[i] = problem.out_lse_stride[i];
  }
  a.states = problem.states;
  a.rows = problem.rows;
  a.heads = static_cast<int>(problem.heads);
  a.head_dim = static_cast<int>(problem.head_dim);
  Kernel kernel;
  FV_CUDA_RETURN_IF_ERROR(device->kernel("states", "merge_states", target.image, 0, &kernel));
  const LaunchConfig config = launch_config(problem.rows * problem.heads, 1, 128, 0, target.stream);
  void* parameters[] = {&a};
  const Driver& driver = device->driver();
  return check(driver, driver.launch(&config, kernel.function, parameters, nullptr),
               "merge_states");
}

Status read_status(const Target& target, const void* workspace, uint32_t* bits) {
  Device* device = nullptr;
  FV_CUDA_RETURN_IF_ERROR(Device::get(target.device, &device));
  const Device::Scope scope(*device);
  FV_CUDA_RETURN_IF_ERROR(scope.status());
  DevicePointer state = 0;
  FV_CUDA_RETURN_IF_ERROR(device->launch_state(workspace, &state));
  const DevicePointer word = state + 2 * sizeof(uint32_t);
  const Driver& driver = device->driver();
  FV_CUDA_RETURN_IF_ERROR(
      check(driver, driver.copy_to_host(bits, word, sizeof(*bits)), "cuMemcpyDtoH"));
  return check(driver, driver.set_words(word, 0, 1), "cuMemsetD32");
}

Status device_count(int* count) {
  const Driver* driver = nullptr;
  FV_CUDA_RETURN_IF_ERROR(get_driver(&driver));
  return check(*driver, driver->device_count(count), "cuDeviceGetCount");
}

Status describe_device(int index, DeviceInfo* info) {
  Device* device = nullptr;
  FV_CUDA_RETURN_IF_ERROR(Device::get(index, &device));
  *info = {device->name(), device->major(), device->minor(), device->own_image()};
  return {};
}

}  // namespace flashverify::cuda
