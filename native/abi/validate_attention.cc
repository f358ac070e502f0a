#include <cinttypes>
#include <cmath>

#include "native/abi/error.h"
#include "native/abi/names.h"
#include "native/abi/overlap.h"
#include "native/abi/validate.h"

namespace flashverify::abi {
namespace {

bool is_grouped_head_dim(int64_t head_dim) {
  switch (head_dim) {
    case 64:
    case 80:
    case 96:
    case 112:
    case 128:
    case 192:
    case 256:
    case 512:
      return true;
    default:
      return false;
  }
}

fv_status check_route(const fv_attention_params& params) {
  if (params.route <= FV_ROUTE_NONE || params.route >= FV_ROUTE_COUNT) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "route",
                "%s (code %" PRId32
                "); accepted: grouped_fp32, scalar_fp32, grouped_half, "
                "scalar_half or xqa_half",
                params.route == FV_ROUTE_NONE ? "none" : "unknown", params.route);
  }
  return FV_OK;
}

fv_status check_numbers(const fv_attention_params& params) {
  if (!std::isfinite(params.softmax_scale)) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "scale", "%.9g; accepted: finite values",
                static_cast<double>(params.softmax_scale));
  }
  if (!std::isfinite(params.softcap) || params.softcap < 0) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "softcap",
                "%.9g; accepted: finite values above 0, or 0 for none",
                static_cast<double>(params.softcap));
  }
  if (params.causal != 0 && params.causal != 1) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "causal", "%" PRId32 "; accepted: 0 or 1",
                params.causal);
  }
  if (params.window < 0) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "window",
                "%" PRId64 "; accepted: 1 or more keys, or 0 for all", params.window);
  }
  const bool cuda = params.device_type == FV_DEVICE_CUDA;
  const int32_t splits = params.splits;
  if (splits != 0 && (!cuda || splits < 1 || splits > kMaxSplits || (splits & (splits - 1)) != 0)) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "splits", "%" PRId32 "; accepted: %s", splits,
                cuda ? "powers of two up to 128, or 0 for the default" : "0 on the CPU");
  }
  return FV_OK;
}

fv_status resolve_isa(int32_t requested, fv_cpu_isa* isa) {
  const fv_cpu_isa best = cpu::best_isa();
  if (requested == FV_CPU_ISA_AUTO) {
    *isa = best;
    return FV_OK;
  }
  if (requested < 0 || requested > FV_CPU_ISA_AVX512) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "cpu_isa",
                "unknown code %" PRId32 "; accepted: 0 (auto) to %d (avx512)", requested,
                FV_CPU_ISA_AVX512);
  }
  *isa = static_cast<fv_cpu_isa>(requested);
  if (cpu::has_isa(*isa)) return FV_OK;
  return fail(FV_ERROR_UNSUPPORTED, "cpu_isa", "%s; accepted: auto, or %s at best on this CPU",
              cpu_isa_name(requested), cpu_isa_name(best));
}

// The route against the shapes that its CPU kernel is written for; what CUDA's
// kernels take depends on the device, and is theirs to say.
fv_status check_route_supports(fv_route route, int64_t head_dim, bool on_cpu) {
  if (head_dim > kMaxHeadDim) {
    return fail(FV_ERROR_UNSUPPORTED, "q", "head_dim %" PRId64 "; accepted: 1 to %" PRId64,
                head_dim, kMaxHeadDim);
  }
  const bool scalar = route == FV_ROUTE_SCALAR_FP32 || route == FV_ROUTE_SCALAR_HALF;
  if (scalar || !on_cpu || is_grouped_head_dim(head_dim)) return FV_OK;
  return fail(FV_ERROR_UNSUPPORTED, "q",
              "head_dim %" PRId64
              " for route %s; accepted: 64, 80, 96, 112, 128, 192, 256 or 512 "
              "(any up to 512 for route %s)",
              head_dim, route_name(route),
              route == FV_ROUTE_GROUPED_FP32 ? "scalar_fp32" : "scalar_half");
}

fv_status check_query(const fv_attention_params& params, DataPointer data, const CacheShape& cache,
                      AttentionProblem* problem) {
  const Argument q{"q", params.q};
  FV_RETURN_IF_ERROR(check_tensor(q, {3, kActivationDtypes, LastAxis::kContiguous, data}));
  FV_RETURN_IF_ERROR(check_axis_range(q, 0, "rows", 0, kMaxRows));
  FV_RETURN_IF_ERROR(check_axis_range(q, 1, "q_heads", 1, kMaxHeads));
  FV_RETURN_IF_ERROR(check_axis(q, 2, cache.head_dim, "head_dim of k_cache"));
  if (params.q.shape[1] % cache.kv_heads != 0) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "q",
                "axis 1 (q_heads) has %" PRId64 " elements; accepted: multiples of %" PRId64
                " (kv_heads of k_cache)",
                params.q.shape[1], cache.kv_heads);
  }
  problem->rows = params.q.shape[0];
  problem->q_heads = params.q.shape[1];
  problem->q_dtype = static_cast<fv_dtype>(params.q.dtype);
  problem->q = params.q.data;
  problem->q_row_stride = axis_stride(params.q, 0);
  problem->q_head_stride = axis_stride(params.q, 1);
  return FV_OK;
}

// Finds the batch: page_table and seq_lens both tell it.
fv_status check_tables(const fv_attention_params& params, Purpose purpose,
                       AttentionProblem* problem) {
  const Argument page_table{"page_table", params.page_table};
  const Argument seq_lens{"seq_lens", params.seq_lens};
  const Argument query_start_loc{"query_start_loc", params.query_start_loc};
  const bool has_table = purpose == Purpose::kRun || !is_absent(params.page_table);
  const bool has_lengths = purpose == Purpose::kRun || !is_absent(params.seq_lens);
  if (has_table) {
    FV_RETURN_IF_ERROR(
        check_tensor(page_table, {2, kInt32, LastAxis::kContiguous, data_pointer(purpose)}));
    FV_RETURN_IF_ERROR(check_axis_range(page_table, 0, "batch", 0, kMaxRows));
    FV_RETURN_IF_ERROR(check_axis_range(page_table, 1, "max_pages", 0, INT32_MAX));
    problem->batch = params.page_table.shape[0];
    problem->max_pages = params.page_table.shape[1];
    problem->page_table = static_cast<const int32_t*>(params.page_table.data);
    problem->page_table_row_stride = axis_stride(params.page_table, 0);
  }
  if (has_lengths) {
    FV_RETURN_IF_ERROR(check_tensor(seq_lens, {1, kInt32}));
    if (has_table) {
      FV_RETURN_IF_ERROR(check_axis(seq_lens, 0, problem->batch, "batch of page_table"));
    } else {
      FV_RETURN_IF_ERROR(check_axis_range(seq_lens, 0, "batch", 0, kMaxRows));
      problem->batch = params.seq_lens.shape[0];
      // Without a table every length is as good as any other.
      problem->max_pages = INT32_MAX;
    }
    problem->seq_lens = static_cast<const int32_t*>(params.seq_lens.data);
  } else if (!has_table) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "page_table",
                "absent, and seq_lens too; accepted: one of them, as a capacity");
  }
  if (!is_absent(params.query_start_loc)) {
    FV_RETURN_IF_ERROR(check_tensor(query_start_loc, {1, kInt32}));
    FV_RETURN_IF_ERROR(check_axis(query_start_loc, 0, problem->batch + 1, "batch + 1"));
    problem->query_start_loc = static_cast<const int32_t*>(params.query_start_loc.data);
  } else if (purpose == Purpose::kRun &&
             (problem->batch == 0 ? problem->rows != 0 : problem->rows % problem->batch != 0)) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "q",
                "%" PRId64 " rows for a batch of %" PRId64
                "; accepted: a multiple of the batch, or query_start_loc",
                problem->rows, problem->batch);
  }
  return FV_OK;
}

fv_status check_sinks(const fv_attention_params& params, Purpose purpose,
                      AttentionProblem* problem) {
  if (is_absent(params.sinks)) return FV_OK;
  const Argument sinks{"sinks", params.sinks};
  FV_RETURN_IF_ERROR(
      check_tensor(sinks, {1, kFloat32, LastAxis::kContiguous, data_pointer(purpose)}));
  FV_RETURN_IF_ERROR(check_axis(sinks, 0, problem->q_heads, "q_heads of q"));
  problem->sinks = static_cast<const float*>(params.sinks.data);
  return FV_OK;
}

fv_status check_outputs(const fv_attention_params& params, DataPointer data,
                        AttentionProblem* problem) {
  const Argument out{"out", params.out};
  FV_RETURN_IF_ERROR(check_tensor(out, {3, kActivationDtypes, LastAxis::kContiguous, data}));
  FV_RETURN_IF_ERROR(check_axis(out, 0, problem->rows, "rows of q"));
  FV_RETURN_IF_ERROR(check_axis(out, 1, problem->q_heads, "q_heads of q"));
  FV_RETURN_IF_ERROR(check_axis(out, 2, problem->head_dim, "head_dim of q"));
  FV_RETURN_IF_ERROR(check_no_self_overlap(out));
  problem->out_dtype = static_cast<fv_dtype>(params.out.dtype);
  problem->out = params.out.data;
  problem->out_row_stride = axis_stride(params.out, 0);
  problem->out_head_stride = axis_stride(params.out, 1);

  if (is_absent(params.lse)) return FV_OK;
  const Argument lse{"lse", params.lse};
  FV_RETURN_IF_ERROR(check_tensor(lse, {2, kFloat32, LastAxis::kStrided, data}));
  FV_RETURN_IF_ERROR(check_axis(lse, 0, problem->rows, "rows of q"));
  FV_RETURN_IF_ERROR(check_axis(lse, 1, problem->q_heads, "q_heads of q"));
  FV_RETURN_IF_ERROR(check_no_self_overlap(lse));
  problem->lse = static_cast<float*>(params.lse.data);
  problem->lse_row_stride = axis_stride(params.lse, 0);
  problem->lse_head_stride = axis_stride(params.lse, 1);
  return FV_OK;
}

// Refuses capacities whose workspace no 64-bit arithmetic could count. On the CPU
// each row needs at most a padded FP32 partial of every started 1024 keys.
fv_status check_capacity(const AttentionProblem& problem, bool on_cpu) {
  // CUDA's kernels number their work items, 128 or fewer a row and head, in 32 bits.
  constexpr int64_t kMostOnCuda = int64_t{1} << 23;
  if (!on_cpu && (problem.rows * problem.q_heads > kMostOnCuda ||
                  problem.batch * problem.kv_heads > kMostOnCuda)) {
    return fail(FV_ERROR_OUT_OF_RANGE, "q",
                "%" PRId64 " rows of %" PRId64 " heads in %" PRId64
                " requests; accepted on cuda: 2^23 rows x q_heads, and batch x kv_heads",
                problem.rows, problem.q_heads, problem.batch);
  }
  const int64_t keys =
      problem.seq_lens != nullptr ? INT32_MAX : problem.max_pages * problem.page_size;
  const double bytes = static_cast<double>(problem.rows) * static_cast<double>(problem.q_heads) *
                       (static_cast<double>(keys) / 1024 + 2) *
                       (static_cast<double>(problem.head_dim) + 66) * sizeof(float);
  if (bytes < static_cast<double>(kMaxSpanBytes)) return FV_OK;
  return fail(FV_ERROR_OUT_OF_MEMORY, "workspace",
              "%" PRId64 " rows of %" PRId64 " heads over %" PRId64
              " keys need more than 2^60 bytes; accepted: what memory can hold",
              problem.rows, problem.q_heads, keys);
}

}  // namespace

fv_status validate_attention(const fv_attention_params* params, Purpose purpose,
                             AttentionCall* call) {
  FV_RETURN_IF_ERROR(check_call(params));
  FV_RETURN_IF_ERROR(check_route(*params));
  FV_RETURN_IF_ERROR(check_numbers(*params));
  call->on_cpu = params->device_type == FV_DEVICE_CPU;
  FV_RETURN_IF_ERROR(resolve_isa(params->cpu_isa, &call->isa));
  if (!call->on_cpu) call->isa = FV_CPU_ISA_AUTO;

  const DataPointer data = data_pointer(purpose);
  AttentionProblem& problem = call->problem;
  problem.route = static_cast<fv_route>(params->route);
  CacheShape cache;
  FV_RETURN_IF_ERROR(
      check_caches({"k_cache", params->k_cache}, {"v_cache", params->v_cache}, data, &cache));
  FV_RETURN_IF_ERROR(check_query(*params, data, cache, &problem));
  FV_RETURN_IF_ERROR(check_route_supports(problem.route, cache.head_dim, call->on_cpu));
  problem.kv_heads = cache.kv_heads;
  problem.head_dim = cache.head_dim;
  problem.pages = cache.pages;
  problem.page_size = cache.page_size;
  problem.kv_dtype = static_cast<fv_dtype>(params->k_cache.dtype);
  problem.k = cache_view(params->k_cache);
  problem.v = cache_view(params->v_cache);
  FV_RETURN_IF_ERROR(check_tables(*params, purpose, &problem));
  FV_RETURN_IF_ERROR(check_sinks(*params, purpose, &problem));
  FV_RETURN_IF_ERROR(check_scale({"k_dequant_scale", params->k_dequant_scale}, problem.kv_heads,
                                 purpose, call->on_cpu, &problem.k_scale));
  FV_RETURN_IF_ERROR(check_scale({"v_dequant_scale", params->v_dequant_scale}, problem.kv_heads,
                                 purpose, call->on_cpu, &problem.v_scale));
  FV_RETURN_IF_ERROR(check_outputs(*params, data, &problem));
  problem.softmax_scale = params->softmax_scale;
  problem.softcap = params->softcap;
  problem.causal = params->causal != 0;
  problem.window = params->window;
  call->num_threads = params->num_threads;
  FV_RETURN_IF_ERROR(check_capacity(problem, call->on_cpu));
  return check_attention_values(*call, purpose, cache.pages);
}

fv_status check_attention_memory(const fv_attention_params& params, size_t needed_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(params.workspace);
  if (params.workspace_bytes < needed_bytes) {
    return fail(FV_ERROR_WORKSPACE_TOO_SMALL, "workspace",
                "%zu bytes; accepted: %zu or more for this call", params.workspace_bytes,
                needed_bytes);
  }
  if (params.workspace == nullptr && needed_bytes > 0) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "workspace", "NULL; accepted: a pointer to %zu bytes",
                needed_bytes);
  }
  if (address % kWorkspaceAlignment != 0) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "workspace",
                "%p is misaligned; accepted: a multiple of %zu bytes", params.workspace,
                kWorkspaceAlignment);
  }
  if (params.workspace_bytes > UINTPTR_MAX - address) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "workspace",
                "%zu bytes from %p pass the end of memory; accepted: what memory can hold",
                params.workspace_bytes, params.workspace);
  }
  using Access = RegionList::Access;
  RegionList regions;
  regions.add({"out", params.out}, Access::kWritten);
  regions.add({"lse", params.lse}, Access::kWritten);
  if (params.workspace != nullptr) {
    regions.add("workspace", params.workspace, params.workspace_bytes, Access::kWritten);
  }
  regions.add({"q", params.q}, Access::kRead);
  regions.add({"k_cache", params.k_cache}, Access::kRead);
  regions.add({"v_cache", params.v_cache}, Access::kRead);
  regions.add({"page_table", params.page_table}, Access::kRead);
  regions.add({"seq_lens", params.seq_lens}, Access::kRead);
  regions.add({"query_start_loc", params.query_start_loc}, Access::kRead);
  regions.add({"sinks", params.sinks}, Access::kRead);
  regions.add({"k_dequant_scale", params.k_dequant_scale}, Access::kRead);
  regions.add({"v_dequant_scale", params.v_dequant_scale}, Access::kRead);
  return regions.check();
}

}  // namespace flashverify::abi
