// Where and how a call runs.
#ifndef FLASHVERIFY_NATIVE_CUDA_TARGET_H_
#define FLASHVERIFY_NATIVE_CUDA_TARGET_H_

#include <string>

namespace flashverify::cuda {

struct Target {
  int device = 0;
  void* stream = nullptr;
  // The image to run: "" picks the device's own; "compute_70" runs the PTX of
  // the oldest target, on any device. Named images are never replaced.
  std::string image;
  // The schedule n<splits>, which names how positions are split. 128 serves every
  // shape; a workspace planned for large batches may name a smaller one.
  int splits = 128;
  // Blocks to occupy at most, 0: one per multiprocessor. No bit depends on it.
  int max_blocks = 0;
};

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_TARGET_H_
