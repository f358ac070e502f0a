// Thousands of damaged calls: none crashes, and one that fails writes nothing.
//
// The library cannot know how much memory lies behind a pointer, so that a call
// whose sane-looking strides leave the test's memory is passed over.

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/testing/arena.h"
#include "native/testing/attention_case.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify {
namespace {

using testing::Arena;
using testing::AttentionCase;
using testing::AttentionOptions;
using testing::CacheLayout;
using testing::Random;

const fv_api& api() { return *fv_get_api(); }

int64_t extreme_integer(Random& random, int64_t around) {
  switch (random.integer(0, 5)) {
    case 0:
      return around + random.integer(-2, 2);
    case 1:
      return random.integer(-3, 70);
    case 2:
      return random.pick({INT64_MIN, INT64_MAX, INT64_MIN + 1, INT64_MAX - 1});
    case 3:
      return static_cast<int64_t>(random.bits());
    default:
      return (int64_t{1} << random.integer(0, 62)) + random.integer(-1, 1);
  }
}

int32_t extreme_int32(Random& random, int32_t around) {
  return static_cast<int32_t>(extreme_integer(random, around));
}

float extreme_float(Random& random) {
  using Limits = std::numeric_limits<float>;
  return random.pick({0.0f, -0.0f, 1.0f, -1.0f, 1e-30f, 1e30f, Limits::quiet_NaN(),
                      Limits::infinity(), -Limits::infinity(), Limits::denorm_min(),
                      Limits::max()});
}

void damage_tensor(fv_tensor& tensor, const std::vector<fv_tensor*>& tensors, Random& random) {
  const auto axis = random.integer(0, FV_MAX_RANK - 1);
  switch (random.integer(0, 7)) {
    case 0:
      tensor.dtype = extreme_int32(random, tensor.dtype);
      return;
    case 1:
      tensor.dtype = static_cast<int32_t>(random.integer(-1, 9));
      return;
    case 2:
      tensor.rank = extreme_int32(random, tensor.rank);
      return;
    case 3:
    case 4:
      tensor.shape[axis] = extreme_integer(random, tensor.shape[axis]);
      return;
    case 5:
      tensor.stride[axis] = extreme_integer(random, tensor.stride[axis]);
      return;
    case 6: {
      const auto address = reinterpret_cast<uintptr_t>(tensor.data);
      const auto moved = address + static_cast<uintptr_t>(random.integer(-9, 9));
      tensor.data = random.chance(30) ? nullptr : reinterpret_cast<void*>(moved);
      return;
    }
    default:
      const fv_tensor& other = *tensors[static_cast<size_t>(
          random.integer(0, static_cast<int64_t>(tensors.size()) - 1))];
      if (random.chance(50)) tensor = other;
      tensor.data = other.data;
  }
}

// Overwrites one element of an integer or FP32 tensor that was valid before.
void damage_contents(const fv_tensor& original, Random& random) {
  if (original.data == nullptr || original.shape[0] == 0) return;
  const int64_t count =
      original.rank == 2 ? original.shape[0] * original.stride[0] : original.shape[0];
  const int64_t at = random.integer(0, count - 1);
  if (original.dtype == FV_DTYPE_INT32) {
    auto& element = static_cast<int32_t*>(original.data)[at];
    element = extreme_int32(random, element);
  } else if (original.dtype == FV_DTYPE_INT64) {
    auto& element = static_cast<int64_t*>(original.data)[at];
    element = extreme_integer(random, element);
  } else {
    static_cast<float*>(original.data)[at] = extreme_float(random);
  }
}

// False where a caller would be lying about memory: the descriptor is in order
// by itself, and reaches outside the arena.
bool is_backed(const fv_tensor& tensor, const Arena& arena) {
  if (tensor.data == nullptr || tensor.rank < 0 || tensor.rank > FV_MAX_RANK) return true;
  long double bytes = 1;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] <= 0) return true;
    if (tensor.shape[axis] == 1) continue;
    if (tensor.stride[axis] < 0) return true;
    bytes += static_cast<long double>(tensor.shape[axis] - 1) *
             static_cast<long double>(tensor.stride[axis]);
  }
  bytes *= static_cast<long double>(testing::item_bytes(tensor.dtype));
  if (bytes > 0x1p60L) return true;
  return arena.holds(tensor.data, static_cast<size_t>(bytes));
}

struct Tally {
  int accepted = 0;
  int refused = 0;
  int passed_over = 0;

  void check() const {
    std::printf("%d accepted, %d refused, %d passed over\n", accepted, refused, passed_over);
    CHECK(accepted > 500);
    CHECK(refused > 5000);
  }
};

std::vector<fv_tensor*> tensors_of(fv_attention_params& p) {
  return {
      &p.q,     &p.k_cache, &p.v_cache,         &p.page_table,      &p.seq_lens, &p.query_start_loc,
      &p.sinks, &p.out,     &p.k_dequant_scale, &p.v_dequant_scale, &p.lse};
}

void damage_fields(fv_attention_params& p, Random& random) {
  switch (random.integer(0, 9)) {
    case 0:
      p.struct_size = static_cast<uint32_t>(extreme_integer(random, p.struct_size));
      return;
    case 1:
      p.route = static_cast<int32_t>(random.integer(-1, FV_ROUTE_COUNT));
      return;
    case 2:
      p.device_type = extreme_int32(random, p.device_type);
      return;
    case 3:
      p.softmax_scale = extreme_float(random);
      return;
    case 4:
      p.softcap = extreme_float(random);
      return;
    case 5:
      p.causal = static_cast<int32_t>(random.integer(-1, 2));
      return;
    case 6:
      p.window = extreme_integer(random, 20);
      return;
    case 7:
      p.num_threads = random.chance(50) ? static_cast<int32_t>(random.integer(-1, 5))
                                        : extreme_int32(random, 1024);
      return;
    case 8:
      p.cpu_isa = static_cast<int32_t>(random.integer(-1, 4));
      return;
    default:
      p.device_index = extreme_int32(random, 0);
  }
}

TEST(damaged_attention_calls) {
  constexpr size_t kWorkspaceBytes = 1 << 19;
  Tally tally;
  Random random(1);
  for (int base = 0; base < 60; ++base) {
    AttentionOptions options = testing::random_options(random);
    options.seq_lens.clear();
    for (int32_t& length : options.query_lens) {
      length = static_cast<int32_t>(random.integer(0, options.route == FV_ROUTE_XQA_HALF ? 1 : 4));
      if (options.equal_blocks) length = options.query_lens[0];
      options.seq_lens.push_back(static_cast<int32_t>(random.integer(0, 70)));
    }
    options.head_dim = 64;
    options.page_size = random.pick<int64_t>({1, 7, 16, 64});
    AttentionCase c(options, random);
    uint8_t* const workspace = c.arena.allocate(kWorkspaceBytes);
    const auto pristine = c.arena.snapshot();
    for (int i = 0; i < 400; ++i) {
      TRACE("base %d, call %d", base, i);
      fv_attention_params p = c.params;
      for (int64_t damages = random.integer(1, 3); damages > 0; --damages) {
        const auto tensors = tensors_of(p);
        const auto originals = tensors_of(c.params);
        const auto which = static_cast<size_t>(random.integer(0, 10));
        const int64_t kind = random.integer(0, 9);
        if (kind < 5) {
          damage_tensor(*tensors[which], originals, random);
        } else if (kind < 8) {
          damage_contents(*originals[random.pick<size_t>({3, 3, 4, 5, 6, 8, 9})], random);
        } else {
          damage_fields(p, random);
        }
      }
      bool backed = true;
      for (const fv_tensor* tensor : tensors_of(p)) backed &= is_backed(*tensor, c.arena);
      if (!backed) {
        ++tally.passed_over;
        c.arena.restore(pristine);
        continue;
      }
      // Mostly the workspace that is asked for, so that the damage decides.
      size_t bytes = 0;
      const bool planned =
          api().attention_workspace_bytes(&p, &bytes) == FV_OK && bytes <= kWorkspaceBytes;
      p.workspace = workspace;
      p.workspace_bytes = planned ? bytes : kWorkspaceBytes;
      if (random.chance(5)) {
        p.workspace_bytes = static_cast<size_t>(random.integer(0, kWorkspaceBytes));
      }
      if (random.chance(5) && p.workspace_bytes < kWorkspaceBytes - 64) {
        p.workspace = workspace + random.integer(-1, 64);
      }
      if (random.chance(1)) p.workspace = nullptr;
      const auto before = c.arena.snapshot();
      const fv_status status = api().paged_attention(&p);
      if (status == FV_OK) {
        ++tally.accepted;
      } else {
        ++tally.refused;
        TRACE("%s", api().last_error());
        CHECK(status != FV_ERROR_INTERNAL);
        CHECK(c.arena.snapshot() == before);
      }
      c.arena.restore(pristine);
    }
  }
  tally.check();
}

TEST(damaged_appends) {
  Tally tally;
  Random random(2);
  for (int base = 0; base < 40; ++base) {
    Arena arena;
    fv_append_params valid = {};
    valid.struct_size = sizeof valid;
    valid.device_type = FV_DEVICE_CPU;
    valid.num_threads = 1;
    valid.key = arena.tensor(FV_DTYPE_FLOAT16, {5, 2, 16});
    valid.value = arena.tensor(FV_DTYPE_FLOAT16, {5, 2, 16}, {1, 0, 2});
    testing::make_caches(arena, static_cast<CacheLayout>(base % testing::kCacheLayouts),
                         random.pick({FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_BFLOAT16}), 3, 4, 2, 16,
                         &valid.k_cache, &valid.v_cache);
    valid.slot_mapping = base % 2 == 0
                             ? arena.vector(FV_DTYPE_INT64, std::vector<int64_t>{0, 11, -1, 5, 6})
                             : arena.vector(FV_DTYPE_INT32, std::vector<int32_t>{1, 0, 3, -7, 6});
    valid.k_dequant_scale = arena.vector(FV_DTYPE_FLOAT32, std::vector<float>{0.5f, 2.0f});
    valid.v_dequant_scale = arena.vector(FV_DTYPE_FLOAT32, std::vector<float>{1.5f});
    const auto pristine = arena.snapshot();
    for (int i = 0; i < 500; ++i) {
      TRACE("base %d, call %d", base, i);
      const auto tensors_of_append = [](fv_append_params& p) {
        return std::vector<fv_tensor*>{
            &p.key,          &p.value,           &p.k_cache,        &p.v_cache,
            &p.slot_mapping, &p.k_dequant_scale, &p.v_dequant_scale};
      };
      fv_append_params p = valid;
      const auto tensors = tensors_of_append(p);
      const auto originals = tensors_of_append(valid);
      for (int64_t damages = random.integer(1, 3); damages > 0; --damages) {
        if (random.chance(70)) {
          damage_tensor(*tensors[static_cast<size_t>(random.integer(0, 6))], originals, random);
        } else {
          damage_contents(*originals[static_cast<size_t>(random.integer(4, 6))], random);
        }
      }
      bool backed = true;
      for (const fv_tensor* tensor : tensors) backed &= is_backed(*tensor, arena);
      if (!backed) {
        ++tally.passed_over;
      } else {
        const auto before = arena.snapshot();
        const fv_status status = api().append_kv(&p);
        (status == FV_OK ? tally.accepted : tally.refused) += 1;
        TRACE("%s", api().last_error());
        if (status != FV_OK) CHECK(arena.snapshot() == before);
      }
      arena.restore(pristine);
    }
  }
  tally.check();
}

TEST(damaged_merges) {
  Tally tally;
  Random random(3);
  Arena arena;
  fv_merge_params valid = {};
  valid.struct_size = sizeof valid;
  valid.device_type = FV_DEVICE_CPU;
  valid.num_threads = 2;
  valid.outs = arena.tensor(FV_DTYPE_FLOAT32, {3, 2, 2, 16});
  valid.lses = arena.tensor(FV_DTYPE_FLOAT32, {3, 2, 2}, {2, 0, 1});
  valid.out = arena.tensor(FV_DTYPE_FLOAT32, {2, 2, 16}, {1, 0, 2}, 3);
  valid.out_lse = arena.tensor(FV_DTYPE_FLOAT32, {2, 2});
  const auto pristine = arena.snapshot();
  for (int i = 0; i < 20000; ++i) {
    TRACE("call %d", i);
    fv_merge_params p = valid;
    const std::vector<fv_tensor*> tensors = {&p.outs, &p.lses, &p.out, &p.out_lse};
    const std::vector<fv_tensor*> originals = {&valid.outs, &valid.lses, &valid.out,
                                               &valid.out_lse};
    for (int64_t damages = random.integer(1, 2); damages > 0; --damages) {
      damage_tensor(*tensors[static_cast<size_t>(random.integer(0, 3))], originals, random);
    }
    bool backed = true;
    for (const fv_tensor* tensor : tensors) backed &= is_backed(*tensor, arena);
    if (!backed) {
      ++tally.passed_over;
      continue;
    }
    const fv_status status = api().merge_states(&p);
    (status == FV_OK ? tally.accepted : tally.refused) += 1;
    TRACE("%s", api().last_error());
    if (status != FV_OK) CHECK(arena.snapshot() == pristine);
    arena.restore(pristine);
  }
  tally.check();
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
