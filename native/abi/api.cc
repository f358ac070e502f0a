// The library's only exporter: every entry validates, plans, dispatches.

#include <atomic>
#include <exception>
#include <new>

#include "flashverify/flashverify.h"
#include "native/abi/build_id.h"
#include "native/abi/cuda_calls.h"
#include "native/abi/error.h"
#include "native/abi/names.h"
#include "native/abi/validate.h"
#include "native/cpu/cpu.h"

namespace flashverify::abi {
namespace {

std::atomic<uint64_t> completed_calls[FV_ROUTE_COUNT];

// Runs `call`, and turns whatever it throws into a status.
template <typename Call>
fv_status guarded(const Call& call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return fail(FV_ERROR_OUT_OF_MEMORY, "memory", "the host has none left for this call");
  } catch (const std::exception& error) {
    return fail(FV_ERROR_INTERNAL, "exception", "%s", error.what());
  } catch (...) {
    return fail(FV_ERROR_INTERNAL, "exception", "of an unknown type");
  }
}

fv_status attention_workspace_bytes(const fv_attention_params* params, size_t* bytes) noexcept {
  return guarded([&] {
    AttentionCall call;
    if (bytes == nullptr) {
      return fail(FV_ERROR_INVALID_ARGUMENT, "bytes", "NULL; accepted: a pointer to the result");
    }
    FV_RETURN_IF_ERROR(validate_attention(params, Purpose::kPlan, &call));
    size_t found = 0;  // a call without rows needs and runs no kernel
    if (call.problem.rows > 0 && !call.on_cpu) {
      FV_RETURN_IF_ERROR(cuda_workspace_bytes(*params, call, &found));
    } else if (call.problem.rows > 0) {
      found = cpu::attention_workspace_bytes(call.problem, call.num_threads);
    }
    *bytes = found;
    return FV_OK;
  });
}

fv_status cpu_attention(const fv_attention_params& params, const AttentionCall& call,
                        fv_route* ran) {
  FV_RETURN_IF_ERROR(check_attention_memory(
      params, cpu::attention_workspace_bytes(call.problem, call.num_threads)));
  *ran = cpu::run_attention(call.problem, call.isa, call.num_threads, params.workspace);
  return FV_OK;
}

fv_status paged_attention(fv_attention_params* params) noexcept {
  return guarded([&] {
    AttentionCall call;
    FV_RETURN_IF_ERROR(validate_attention(params, Purpose::kRun, &call));
    const AttentionProblem& problem = call.problem;
    fv_route ran = problem.route;
    const char* image = nullptr;
    if (problem.rows == 0) {
      FV_RETURN_IF_ERROR(check_attention_memory(*params, 0));
    } else if (call.on_cpu) {
      FV_RETURN_IF_ERROR(cpu_attention(*params, call, &ran));
    } else {
      FV_RETURN_IF_ERROR(cuda_attention(*params, call, &ran, &image));
    }
    params->ran_route = ran;
    params->ran_isa = call.isa;
    params->ran_image = image;
    if (ran != problem.route) {
      return fail(FV_ERROR_INTERNAL, "route", "%s ran; accepted: %s, as requested", route_name(ran),
                  route_name(problem.route));
    }
    completed_calls[ran].fetch_add(1, std::memory_order_relaxed);
    return FV_OK;
  });
}

fv_status append_kv(const fv_append_params* params) noexcept {
  return guarded([&] {
    cpu::AppendProblem problem;
    FV_RETURN_IF_ERROR(validate_append(params, &problem));
    if (problem.tokens == 0) return FV_OK;
    if (params->device_type == FV_DEVICE_CUDA) return cuda_append(*params, problem);
    cpu::run_append(problem, params->num_threads);
    return FV_OK;
  });
}

fv_status merge_states(const fv_merge_params* params) noexcept {
  return guarded([&] {
    cpu::MergeProblem problem;
    FV_RETURN_IF_ERROR(validate_merge(params, &problem));
    if (problem.rows == 0) return FV_OK;
    if (params->device_type == FV_DEVICE_CUDA) return cuda_merge(*params, problem);
    cpu::run_merge(problem, params->num_threads);
    return FV_OK;
  });
}

int32_t best_cpu_isa() noexcept { return cpu::best_isa(); }

int32_t has_cpu_isa(int32_t isa) noexcept {
  if (isa < FV_CPU_ISA_PORTABLE || isa > FV_CPU_ISA_AVX512) return 0;
  return cpu::has_isa(static_cast<fv_cpu_isa>(isa)) ? 1 : 0;
}

void route_counts(uint64_t* counts) noexcept {
  if (counts == nullptr) return;
  for (int route = 0; route < FV_ROUTE_COUNT; ++route) {
    counts[route] = completed_calls[route].load(std::memory_order_relaxed);
  }
}

const char* const* guarded_cuda_images() noexcept {
  const char* const* names = nullptr;
  const fv_status status = guarded([&] {
    names = cuda_images();
    return FV_OK;
  });
  static constexpr const char* kNone[] = {nullptr};
  return status == FV_OK ? names : kNone;
}

fv_status guarded_cuda_device_count(int32_t* count) noexcept {
  return guarded([&] { return cuda_device_count(count); });
}

fv_status guarded_cuda_device(int32_t index, fv_cuda_device* device) noexcept {
  return guarded([&] { return cuda_device(index, device); });
}

fv_status guarded_cuda_faults(int32_t device_index, const void* workspace,
                              uint32_t* faults) noexcept {
  return guarded([&] { return cuda_faults(device_index, workspace, faults); });
}

constexpr fv_api kApi = {
    sizeof(fv_api),
    FLASHVERIFY_ABI_VERSION,
    FLASHVERIFY_PRECISION_REVISION,
    0,
    FV_BUILD_ID,
    last_error,
    status_name,
    route_name,
    cpu_isa_name,
    best_cpu_isa,
    has_cpu_isa,
    attention_workspace_bytes,
    paged_attention,
    append_kv,
    merge_states,
    route_counts,
    guarded_cuda_images,
    guarded_cuda_device_count,
    guarded_cuda_device,
    guarded_cuda_faults,
};

}  // namespace
}  // namespace flashverify::abi

extern "C" FV_EXPORT const fv_api* fv_get_api(void) { return &flashverify::abi::kApi; }
