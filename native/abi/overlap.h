// Whether strided tensors share bytes: outputs must not share any with each
// other, with an input, or with themselves.
#ifndef FLASHVERIFY_NATIVE_ABI_OVERLAP_H_
#define FLASHVERIFY_NATIVE_ABI_OVERLAP_H_

#include <cstddef>
#include <cstdint>

#include "flashverify/flashverify.h"
#include "native/abi/tensor.h"

namespace flashverify::abi {

// True where a byte belongs to both tensors. Never false then; it may be true
// for disjoint tensors that are interleaved in a way that no common layout
// uses, as deciding that exactly is a hard integer problem. Exact for tensors
// whose address ranges are disjoint and for views of one array with equal
// strides, such as K and V of one [pages, 2, ...] cache.
bool may_share_bytes(const fv_tensor& a, const fv_tensor& b);

// Checks that two indices of the tensor never name the same bytes. Layouts in
// which an axis is shorter than the elements inside it reach are refused.
fv_status check_no_self_overlap(const Argument& argument);

// A list of the regions of one call, of which some are written.
class RegionList {
 public:
  enum class Access { kRead, kWritten };

  // Absent and empty tensors are left out.
  void add(const Argument& argument, Access access);
  void add(const char* name, const void* data, size_t bytes, Access access);

  // Fails naming the first written region that shares bytes with another.
  fv_status check() const;

 private:
  struct Region {
    const char* name;
    const fv_tensor* tensor;  // null for plain memory
    uintptr_t begin;
    uintptr_t end;
    Access access;
  };

  static bool share_bytes(const Region& a, const Region& b);

  static constexpr int kCapacity = 16;
  Region regions_[kCapacity];
  int count_ = 0;
};

}  // namespace flashverify::abi

#endif  // FLASHVERIFY_NATIVE_ABI_OVERLAP_H_
