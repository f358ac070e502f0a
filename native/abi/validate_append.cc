#include <algorithm>
#include <cinttypes>
#include <vector>

#include "native/abi/error.h"
#include "native/abi/names.h"
#include "native/abi/overlap.h"
#include "native/abi/validate.h"

namespace flashverify::abi {
namespace {

// Which token named each slot: open addressing over a table at least twice as
// large as the slots, on the stack for small calls.
class SlotSet {
 public:
  static constexpr int64_t kAbsent = -1;

  explicit SlotSet(int64_t slots) {
    size_t places = kSmall;
    while (places < 2 * static_cast<size_t>(slots)) places *= 2;
    if (places > kSmall) {
      large_.resize(places);
      places_ = large_.data();
    }
    mask_ = places - 1;
  }

  // The token that named this slot before; kAbsent if `token` is the first.
  int64_t insert(int64_t slot, int64_t token) {
    // Fibonacci hashing: neighbouring slots spread over the table.
    size_t at = static_cast<size_t>((static_cast<uint64_t>(slot) * 0x9E3779B97F4A7C15u) >> 20);
    for (;; ++at) {
      Place& place = places_[at & mask_];
      if (place.slot == slot) return place.token;
      if (place.slot != kAbsent) continue;
      place = {slot, token};
      return kAbsent;
    }
  }

 private:
  struct Place {
    int64_t slot = kAbsent;
    int64_t token = kAbsent;
  };
  static constexpr size_t kSmall = 128;

  Place small_[kSmall];
  std::vector<Place> large_;
  Place* places_ = small_;
  size_t mask_;
};

int64_t slot_at(const cpu::AppendProblem& problem, int64_t token) {
  const int64_t i = token * problem.slot_stride;
  return problem.slots_are_int64 ? static_cast<const int64_t*>(problem.slots)[i]
                                 : static_cast<const int32_t*>(problem.slots)[i];
}

fv_status check_slots(const cpu::AppendProblem& problem, int64_t slots) {
  int64_t named = 0;
  for (int64_t token = 0; token < problem.tokens; ++token) {
    const int64_t slot = slot_at(problem, token);
    if (slot >= slots) {
      return fail(FV_ERROR_OUT_OF_RANGE, "slot_mapping",
                  "element %" PRId64 " is %" PRId64 "; accepted: less than %" PRId64
                  " (pages x page_size of k_cache), negative to skip",
                  token, slot, slots);
    }
    named += slot >= 0 ? 1 : 0;
  }
  // With more tokens than slots, the first slots + 1 hold a slot twice.
  SlotSet seen(std::min(named, slots + 1));
  for (int64_t token = 0; token < problem.tokens; ++token) {
    const int64_t slot = slot_at(problem, token);
    if (slot < 0) continue;
    const int64_t earlier = seen.insert(slot, token);
    if (earlier != SlotSet::kAbsent) {
      return fail(FV_ERROR_INVALID_ARGUMENT, "slot_mapping",
                  "elements %" PRId64 " and %" PRId64 " are both %" PRId64
                  "; accepted: each slot once",
                  earlier, token, slot);
    }
  }
  return FV_OK;
}

// Checks key or value against the caches.
fv_status check_source(const Argument& source, const CacheShape& cache) {
  FV_RETURN_IF_ERROR(check_tensor(source, {3, kActivationDtypes}));
  FV_RETURN_IF_ERROR(check_axis(source, 1, cache.kv_heads, "kv_heads of k_cache"));
  return check_axis(source, 2, cache.head_dim, "head_dim of k_cache");
}

fv_status check_memory(const fv_append_params& params) {
  using Access = RegionList::Access;
  FV_RETURN_IF_ERROR(check_no_self_overlap({"k_cache", params.k_cache}));
  FV_RETURN_IF_ERROR(check_no_self_overlap({"v_cache", params.v_cache}));
  RegionList regions;
  regions.add({"k_cache", params.k_cache}, Access::kWritten);
  regions.add({"v_cache", params.v_cache}, Access::kWritten);
  regions.add({"key", params.key}, Access::kRead);
  regions.add({"value", params.value}, Access::kRead);
  regions.add({"slot_mapping", params.slot_mapping}, Access::kRead);
  regions.add({"k_dequant_scale", params.k_dequant_scale}, Access::kRead);
  regions.add({"v_dequant_scale", params.v_dequant_scale}, Access::kRead);
  return regions.check();
}

}  // namespace

fv_status validate_append(const fv_append_params* params, cpu::AppendProblem* problem) {
  FV_RETURN_IF_ERROR(check_call(params));
  const Argument key{"key", params->key};
  const Argument value{"value", params->value};
  const Argument slot_mapping{"slot_mapping", params->slot_mapping};
  const bool on_cpu = params->device_type == FV_DEVICE_CPU;
  CacheShape cache;
  FV_RETURN_IF_ERROR(check_caches({"k_cache", params->k_cache}, {"v_cache", params->v_cache},
                                  DataPointer::kRequired, &cache));
  FV_RETURN_IF_ERROR(check_source(key, cache));
  FV_RETURN_IF_ERROR(check_source(value, cache));
  const int64_t tokens = params->key.shape[0];
  FV_RETURN_IF_ERROR(check_axis(value, 0, tokens, "tokens of key"));
  if (params->value.dtype != params->key.dtype) {
    return fail(FV_ERROR_INVALID_ARGUMENT, "value", "dtype %s; accepted: %s (dtype of key)",
                dtype_name(params->value.dtype), dtype_name(params->key.dtype));
  }
  FV_RETURN_IF_ERROR(
      check_tensor(slot_mapping, {1, kInt32 | dtype_bit(FV_DTYPE_INT64), LastAxis::kStrided}));
  FV_RETURN_IF_ERROR(check_axis(slot_mapping, 0, tokens, "tokens of key"));

  problem->tokens = tokens;
  problem->kv_heads = cache.kv_heads;
  problem->head_dim = cache.head_dim;
  problem->pages = cache.pages;
  problem->page_size = cache.page_size;
  problem->src_dtype = static_cast<fv_dtype>(params->key.dtype);
  problem->key = params->key.data;
  problem->key_token_stride = axis_stride(params->key, 0);
  problem->key_head_stride = axis_stride(params->key, 1);
  problem->value = params->value.data;
  problem->value_token_stride = axis_stride(params->value, 0);
  problem->value_head_stride = axis_stride(params->value, 1);
  problem->kv_dtype = static_cast<fv_dtype>(params->k_cache.dtype);
  problem->k = cache_view(params->k_cache);
  problem->v = cache_view(params->v_cache);
  problem->slots_are_int64 = params->slot_mapping.dtype == FV_DTYPE_INT64;
  problem->slots = params->slot_mapping.data;
  problem->slot_stride = axis_stride(params->slot_mapping, 0);
  FV_RETURN_IF_ERROR(check_scale({"k_dequant_scale", params->k_dequant_scale}, cache.kv_heads,
                                 Purpose::kRun, on_cpu, &problem->k_scale));
  FV_RETURN_IF_ERROR(check_scale({"v_dequant_scale", params->v_dequant_scale}, cache.kv_heads,
                                 Purpose::kRun, on_cpu, &problem->v_scale));
  FV_RETURN_IF_ERROR(check_memory(*params));
  if (!on_cpu) return FV_OK;
  return check_slots(*problem, cache.pages * cache.page_size);
}

}  // namespace flashverify::abi
