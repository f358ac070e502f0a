// The overlap checks against a count of every byte.

#include "native/abi/overlap.h"

#include <cstring>
#include <vector>

#include "native/abi/error.h"
#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify::abi {
namespace {

using testing::Random;

fv_tensor tensor_at(uintptr_t address, int32_t dtype, const std::vector<int64_t>& shape,
                    const std::vector<int64_t>& stride) {
  fv_tensor tensor = {};
  tensor.data = reinterpret_cast<void*>(address);
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(shape.size());
  std::memcpy(tensor.shape, shape.data(), shape.size() * sizeof(int64_t));
  std::memcpy(tensor.stride, stride.data(), stride.size() * sizeof(int64_t));
  return tensor;
}

// How often each byte from address 0 on belongs to an element.
std::vector<int> coverage(const fv_tensor& tensor, size_t bytes) {
  std::vector<int> counts(bytes, 0);
  std::vector<int64_t> index(static_cast<size_t>(tensor.rank), 0);
  for (;;) {
    int64_t offset = 0;
    for (int32_t axis = 0; axis < tensor.rank; ++axis) {
      if (tensor.shape[axis] == 0) return counts;
      offset += index[static_cast<size_t>(axis)] * tensor.stride[axis];
    }
    const int64_t item = item_bytes(tensor.dtype);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
    for (int64_t i = 0; i < item; ++i) ++counts[begin + static_cast<size_t>(offset * item + i)];
    int32_t axis = tensor.rank - 1;
    while (axis >= 0 && ++index[static_cast<size_t>(axis)] == tensor.shape[axis]) {
      index[static_cast<size_t>(axis--)] = 0;
    }
    if (axis < 0) return counts;
  }
}

constexpr size_t kSpace = 4096;

bool really_share(const fv_tensor& a, const fv_tensor& b) {
  const std::vector<int> of_a = coverage(a, kSpace);
  const std::vector<int> of_b = coverage(b, kSpace);
  for (size_t i = 0; i < kSpace; ++i) {
    if (of_a[i] > 0 && of_b[i] > 0) return true;
  }
  return false;
}

fv_tensor random_tensor(Random& random) {
  const int32_t dtype = random.pick({FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT16, FV_DTYPE_FLOAT32});
  const int64_t rank = random.integer(1, 4);
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;
  for (int64_t axis = 0; axis < rank; ++axis) {
    shape.push_back(random.integer(random.chance(5) ? 0 : 1, 4));
    stride.push_back(random.chance(50) ? random.integer(0, 60)
                                       : random.pick<int64_t>({1, 2, 4, 8, 16, 32}));
  }
  return tensor_at(static_cast<uintptr_t>(random.integer(0, 200) * 4), dtype, shape, stride);
}

TEST(no_sharing_is_ever_missed) {
  Random random(1);
  int shared = 0;
  int false_alarms = 0;
  for (int i = 0; i < 20000; ++i) {
    TRACE("pair %d", i);
    const fv_tensor a = random_tensor(random);
    const fv_tensor b = random_tensor(random);
    const bool really = really_share(a, b);
    const bool answer = may_share_bytes(a, b);
    CHECK_EQ(answer, may_share_bytes(b, a));
    if (really) CHECK(answer);
    shared += really ? 1 : 0;
    false_alarms += answer && !really ? 1 : 0;
  }
  // The search is exact for tensors this small.
  CHECK(shared > 1000);
  CHECK_EQ(false_alarms, 0);
}

TEST(no_self_overlap_is_ever_missed) {
  Random random(2);
  int refused = 0;
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    TRACE("tensor %d", i);
    const fv_tensor tensor = random_tensor(random);
    bool overlaps = false;
    for (const int count : coverage(tensor, kSpace)) overlaps |= count > 1;
    const bool answer = check_no_self_overlap({"t", tensor}) != FV_OK;
    if (overlaps) CHECK(answer);
    (answer ? refused : accepted) += 1;
  }
  CHECK(refused > 1000 && accepted > 1000);
}

TEST(interleaved_views_of_one_array_are_disjoint) {
  const int64_t pages = 100000;
  const int64_t page_size = 3296;
  const int64_t heads = 8;
  const int64_t dim = 256;
  const int64_t half = page_size * heads * dim;
  struct Layout {
    const char* name;
    std::vector<int64_t> stride;
    int64_t v_offset;
  };
  const std::vector<Layout> layouts = {
      {"[pages, 2, page_size, heads, dim]", {2 * half, heads * dim, dim, 1}, half},
      {"[pages, 2, heads, page_size, dim]", {2 * half, dim, page_size * dim, 1}, half},
      {"[pages, page_size, 2, heads, dim]", {2 * half, 2 * heads * dim, dim, 1}, heads * dim},
      {"[pages, page_size, heads, 2, dim]", {2 * half, 2 * heads * dim, 2 * dim, 1}, dim},
      {"[2, pages, page_size, heads, dim]", {half, heads * dim, dim, 1}, pages * half},
  };
  for (const Layout& layout : layouts) {
    TRACE("%s", layout.name);
    const std::vector<int64_t> shape = {pages, page_size, heads, dim};
    const uintptr_t base = 1 << 20;
    const fv_tensor k = tensor_at(base, FV_DTYPE_FLOAT16, shape, layout.stride);
    const auto v_base = base + static_cast<uintptr_t>(2 * layout.v_offset);
    const fv_tensor v = tensor_at(v_base, FV_DTYPE_FLOAT16, shape, layout.stride);
    CHECK(!may_share_bytes(k, v));
    CHECK_EQ(check_no_self_overlap({"k", k}), FV_OK);
    // One element into K's last row.
    const fv_tensor near = tensor_at(v_base - 2, FV_DTYPE_FLOAT16, shape, layout.stride);
    CHECK(may_share_bytes(k, near));
    CHECK(may_share_bytes(k, k));
  }
}

TEST(a_hard_question_gets_the_safe_answer_soon) {
  // Coprime strides: which elements meet is a search without end in sight.
  const fv_tensor a = tensor_at(1 << 20, FV_DTYPE_FLOAT8_E4M3, {1000, 1000, 1000, 2},
                                {1000003, 1009, 2, 1000000007});
  const fv_tensor b = tensor_at((1 << 20) + 1, FV_DTYPE_FLOAT8_E4M3, {1000, 1000, 1000, 2},
                                {1000033, 1013, 2, 1000000009});
  for (int i = 0; i < 10000; ++i) CHECK(may_share_bytes(a, b));
}

TEST(a_list_names_the_written_region_and_what_it_overlaps) {
  using Access = RegionList::Access;
  const fv_tensor out = tensor_at(1024, FV_DTYPE_FLOAT32, {4, 4}, {4, 1});
  const fv_tensor q = tensor_at(1024 + 60, FV_DTYPE_FLOAT32, {2}, {1});
  const fv_tensor absent = {};
  const fv_tensor empty = tensor_at(1024, FV_DTYPE_FLOAT32, {0, 4}, {4, 1});
  RegionList reads;
  reads.add({"out", out}, Access::kRead);
  reads.add({"q", q}, Access::kRead);
  CHECK_EQ(reads.check(), FV_OK);
  RegionList list;
  list.add({"lse", absent}, Access::kWritten);
  list.add({"table", empty}, Access::kWritten);
  list.add({"q", q}, Access::kRead);
  list.add({"out", out}, Access::kWritten);
  CHECK_EQ(list.check(), FV_ERROR_INVALID_ARGUMENT);
  CHECK_CONTAINS(last_error(), "out: overlaps q ");
  RegionList memory;
  memory.add("workspace", reinterpret_cast<void*>(1024 + 63), 1, Access::kWritten);
  memory.add({"out", out}, Access::kRead);
  CHECK_EQ(memory.check(), FV_ERROR_INVALID_ARGUMENT);
  CHECK_CONTAINS(last_error(), "workspace: overlaps out ");
}

}  // namespace
}  // namespace flashverify::abi

TEST_MAIN()
