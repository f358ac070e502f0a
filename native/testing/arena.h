// Memory for a test's tensors that tells what was written to it.
#ifndef FLASHVERIFY_NATIVE_TESTING_ARENA_H_
#define FLASHVERIFY_NATIVE_TESTING_ARENA_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "flashverify/flashverify.h"

namespace flashverify::testing {

inline int64_t item_bytes(int32_t dtype) {
  switch (dtype) {
    case FV_DTYPE_FLOAT8_E4M3:
    case FV_DTYPE_FLOAT8_E5M2:
      return 1;
    case FV_DTYPE_FLOAT16:
    case FV_DTYPE_BFLOAT16:
      return 2;
    case FV_DTYPE_INT64:
      return 8;
    default:
      return 4;
  }
}

// Blocks filled with 0xFF: a NaN in every floating-point format, and -1 as an
// integer. So whatever a test does not write is poison to whoever reads it.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kMargin = 64;  // poison on either side

  uint8_t* allocate(size_t bytes) {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    Block block;
    block.bytes = rounded + 2 * kMargin;
    block.memory.reset(new (std::align_val_t(kAlignment)) uint8_t[block.bytes]);
    std::memset(block.memory.get(), 0xFF, block.bytes);
    blocks_.push_back(std::move(block));
    return blocks_.back().memory.get() + kMargin;
  }

  // A tensor whose axes lie in memory in `order`, outermost first, with
  // `padding` elements between the steps of the innermost axis but one.
  fv_tensor tensor(int32_t dtype, std::initializer_list<int64_t> shape,
                   const std::vector<int32_t>& order = {0, 1, 2, 3}, int64_t padding = 0) {
    fv_tensor tensor = {};
    tensor.dtype = dtype;
    tensor.rank = static_cast<int32_t>(shape.size());
    std::memcpy(tensor.shape, shape.begin(), shape.size() * sizeof(int64_t));
    int64_t stride = 1;
    bool padded = false;
    for (size_t i = order.size(); i-- > 0;) {
      const int32_t axis = order[i];
      if (axis >= tensor.rank) continue;
      tensor.stride[axis] = stride;
      stride *= tensor.shape[axis];
      if (!padded) stride += padding;
      padded = true;
    }
    tensor.data = allocate(static_cast<size_t>(stride * item_bytes(dtype)));
    return tensor;
  }

  template <typename T>
  fv_tensor vector(int32_t dtype, const std::vector<T>& values) {
    fv_tensor tensor = {};
    tensor.dtype = dtype;
    tensor.rank = 1;
    tensor.shape[0] = static_cast<int64_t>(values.size());
    tensor.stride[0] = 1;
    tensor.data = allocate(values.size() * sizeof(T));
    std::copy(values.begin(), values.end(), static_cast<T*>(tensor.data));
    return tensor;
  }

  // True where one block holds all of these bytes.
  bool holds(const void* data, size_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    for (const Block& block : blocks_) {
      const auto first = reinterpret_cast<uintptr_t>(block.memory.get());
      if (begin >= first && begin < first + block.bytes && bytes <= first + block.bytes - begin) {
        return true;
      }
    }
    return false;
  }

  // Every byte of every block, margins included.
  std::vector<std::vector<uint8_t>> snapshot() const {
    std::vector<std::vector<uint8_t>> copies;
    for (const Block& block : blocks_) {
      copies.emplace_back(block.memory.get(), block.memory.get() + block.bytes);
    }
    return copies;
  }

  // Puts a snapshot's bytes back.
  void restore(const std::vector<std::vector<uint8_t>>& copies) const {
    for (size_t i = 0; i < copies.size(); ++i) {
      std::memcpy(blocks_[i].memory.get(), copies[i].data(), copies[i].size());
    }
  }

 private:
  struct Free {
    void operator()(uint8_t* memory) const {
      ::operator delete[](memory, std::align_val_t(kAlignment));
    }
  };
  struct Block {
    std::unique_ptr<uint8_t[], Free> memory;
    size_t bytes;
  };

  std::vector<Block> blocks_;
};

}  // namespace flashverify::testing

#endif  // FLASHVERIFY_NATIVE_TESTING_ARENA_H_
