// Device code embedded in the library by third_party/cuda:cuda.bzl.
#ifndef FLASHVERIFY_NATIVE_CUDA_IMAGES_H_
#define FLASHVERIFY_NATIVE_CUDA_IMAGES_H_

#include <cstddef>

namespace flashverify::cuda {

// One source compiled for one architecture: a cubin, or PTX text that a null ends.
struct Image {
  const char* source;  // "grouped_sm90_e4m3_d256"
  const char* arch;    // "sm_90a", "compute_70"; null ends the table
  const unsigned char* begin;
  const unsigned char* end;
};

extern "C" const Image flashverify_cuda_images[];

}  // namespace flashverify::cuda

#endif  // FLASHVERIFY_NATIVE_CUDA_IMAGES_H_
