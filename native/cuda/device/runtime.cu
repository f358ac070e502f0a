// State that outlives launches: per workspace two barrier counters and a status
// word, zero whenever no launch is running. In the module, so that nothing has
// to allocate or clear them.
#include "native/cuda/device/args.h"

extern "C" __device__ flashverify::cuda::uint32 flashverify_launch_states[4096][16] = {};
