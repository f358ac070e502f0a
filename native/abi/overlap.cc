#include "native/abi/overlap.h"

#include <algorithm>
#include <cinttypes>

#include "native/abi/error.h"

namespace flashverify::abi {
namespace {

struct Axis {
  int32_t number;  // in the tensor's shape
  int64_t count;
  int64_t stride_bytes;
};

// The bytes that a tensor covers: one item at every combination of its axes'
// steps. Axes of one element are left out; the longest stride comes first.
struct Footprint {
  Axis axes[FV_MAX_RANK];
  int count = 0;
  int64_t item_bytes;

  explicit Footprint(const fv_tensor& tensor) : item_bytes(abi::item_bytes(tensor.dtype)) {
    for (int32_t number = 0; number < tensor.rank; ++number) {
      if (tensor.shape[number] <= 1) continue;
      const Axis axis = {number, tensor.shape[number], tensor.stride[number] * item_bytes};
      int at = count++;
      for (; at > 0 && axes[at - 1].stride_bytes < axis.stride_bytes; --at) axes[at] = axes[at - 1];
      axes[at] = axis;
    }
  }
};

// The axes of a footprint from `level` inwards, which reach over `span` bytes.
struct Part {
  const Footprint& footprint;
  int level;
  int64_t span;

  const Axis& axis() const { return footprint.axes[level]; }
  // 0 where an item is all that is left: axes of stride 0 only repeat it.
  int64_t stride() const { return level == footprint.count ? 0 : axis().stride_bytes; }
  Part inner() const {
    return {footprint, level + 1, span - (axis().count - 1) * axis().stride_bytes};
  }
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// True where `b`, placed `offset` bytes after `a`, shares a byte with it.
// Descends through the longer stride, or through both where they are equal,
// into those steps alone whose ranges meet. `budget` bounds the search: when it
// is spent, the answer is the safe one.
bool parts_meet(const Part& a, const Part& b, int64_t offset, int* budget) {
  if (offset >= a.span || -offset >= b.span) return false;
  const int64_t stride = std::max(a.stride(), b.stride());
  if (stride == 0 || --*budget < 0) return true;

  const bool step_a = a.stride() == stride;
  const bool step_b = b.stride() == stride;
  const Part inner_a = step_a ? a.inner() : a;
  const Part inner_b = step_b ? b.inner() : b;
  // a at step i and b at step j are offset - (i - j) * stride bytes apart, and
  // meet where that lies between -inner_b.span and inner_a.span.
  const int64_t least = step_b ? 1 - b.axis().count : 0;
  const int64_t most = step_a ? a.axis().count - 1 : 0;
  const int64_t first = std::max(least, floor_div(offset - inner_a.span, stride) + 1);
  const int64_t last = std::min(most, floor_div(offset + inner_b.span - 1, stride));
  for (int64_t step = first; step <= last; ++step) {
    if (parts_meet(inner_a, inner_b, offset - step * stride, budget)) return true;
  }
  return false;
}

}  // namespace

bool may_share_bytes(const fv_tensor& a, const fv_tensor& b) {
  const int64_t span_a = span_bytes(a);
  const int64_t span_b = span_bytes(b);
  if (span_a == 0 || span_b == 0) return false;
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data);
  const auto begin_b = reinterpret_cast<uintptr_t>(b.data);
  if (begin_a >= begin_b + static_cast<uintptr_t>(span_b) ||
      begin_b >= begin_a + static_cast<uintptr_t>(span_a)) {
    return false;
  }
  const Footprint footprint_a(a);
  const Footprint footprint_b(b);
  int budget = 256;
  return parts_meet({footprint_a, 0, span_a}, {footprint_b, 0, span_b},
                    static_cast<int64_t>(begin_b - begin_a), &budget);
}

fv_status check_no_self_overlap(const Argument& argument) {
  const fv_tensor& tensor = argument.tensor;
  if (span_bytes(tensor) == 0) return FV_OK;
  // From the shortest stride up, every axis must step over all that lies inside it.
  const Footprint footprint(tensor);
  int64_t reach = footprint.item_bytes;
  for (int i = footprint.count - 1; i >= 0; --i) {
    const Axis& axis = footprint.axes[i];
    if (axis.stride_bytes < reach) {
      return fail(FV_ERROR_INVALID_ARGUMENT, argument.name,
                  "overlaps itself: axis %" PRId32 " has stride %" PRId64 "; accepted: %" PRId64
                  " or more, as this tensor is written",
                  axis.number, tensor.stride[axis.number], reach / footprint.item_bytes);
    }
    reach += (axis.count - 1) * axis.stride_bytes;
  }
  return FV_OK;
}

void RegionList::add(const Argument& argument, Access access) {
  if (is_absent(argument.tensor)) return;
  const int64_t bytes = span_bytes(argument.tensor);
  add(argument.name, argument.tensor.data, static_cast<size_t>(bytes), access);
  if (bytes > 0) regions_[count_ - 1].tensor = &argument.tensor;
}

void RegionList::add(const char* name, const void* data, size_t bytes, Access access) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  regions_[count_++] = {name, nullptr, begin, begin + bytes, access};
}

bool RegionList::share_bytes(const Region& a, const Region& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  // Plain memory has no gaps in which the other region could lie.
  if (a.tensor == nullptr || b.tensor == nullptr) return true;
  return may_share_bytes(*a.tensor, *b.tensor);
}

fv_status RegionList::check() const {
  for (int i = 0; i < count_; ++i) {
    if (regions_[i].access != Access::kWritten) continue;
    for (int j = 0; j < count_; ++j) {
      if (i == j || !share_bytes(regions_[i], regions_[j])) continue;
      return fail(FV_ERROR_INVALID_ARGUMENT, regions_[i].name,
                  "overlaps %s in memory; accepted: memory of its own, as it is written",
                  regions_[j].name);
    }
  }
  return FV_OK;
}

}  // namespace flashverify::abi
