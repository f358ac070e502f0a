// The table of a library without device code: for tests on the CPU, and for
// libraries that only have to be refused.
#include "native/cuda/images.h"

extern "C" const flashverify::cuda::Image flashverify_cuda_images[] = {
    {nullptr, nullptr, nullptr, nullptr}};
