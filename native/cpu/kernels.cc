// The CPU kernels of one instruction set. The build compiles this file three
// times, with FV_CPU_ISA naming the set; nothing but the table below may have
// external linkage (a test looks), so that the linker cannot choose one set's
// code for another.

#include "native/cpu/kernels.h"

#include <type_traits>

#include "native/cpu/grouped.h"
#include "native/cpu/item.h"
#include "native/cpu/scalar.h"

namespace flashverify::cpu {
namespace {

template <template <class> class Kernel, bool kHalf>
void run_item_of(const Call& call, int64_t item, void* scratch) {
  switch (call.problem->kv_dtype) {
    case FV_DTYPE_FLOAT8_E4M3:
      return run_item<Kernel<E4M3>, kHalf>(call, item, scratch);
    case FV_DTYPE_FLOAT8_E5M2:
      return run_item<Kernel<E5M2>, kHalf>(call, item, scratch);
    case FV_DTYPE_FLOAT16:
      return run_item<Kernel<Half>, kHalf>(call, item, scratch);
    default:
      return run_item<Kernel<BFloat>, kHalf>(call, item, scratch);
  }
}

fv_route run_any_item(const Call& call, int64_t item, void* scratch) {
  switch (call.problem->route) {
    case FV_ROUTE_GROUPED_FP32:
      run_item_of<GroupedKernel, false>(call, item, scratch);
      return FV_ROUTE_GROUPED_FP32;
    case FV_ROUTE_SCALAR_FP32:
      run_item_of<ScalarKernel, false>(call, item, scratch);
      return FV_ROUTE_SCALAR_FP32;
    case FV_ROUTE_GROUPED_HALF:
      run_item_of<GroupedKernel, true>(call, item, scratch);
      return FV_ROUTE_GROUPED_HALF;
    case FV_ROUTE_SCALAR_HALF:
      run_item_of<ScalarKernel, true>(call, item, scratch);
      return FV_ROUTE_SCALAR_HALF;
    case FV_ROUTE_XQA_HALF:
      // The decode kernel of the old path is the grouped one at q = 1.
      run_item_of<GroupedKernel, true>(call, item, scratch);
      return FV_ROUTE_XQA_HALF;
    default:
      return FV_ROUTE_NONE;
  }
}

}  // namespace

#define FV_JOIN_(a, b) a##b
#define FV_JOIN(a, b) FV_JOIN_(a, b)
#define FV_ISA_avx512 FV_CPU_ISA_AVX512
#define FV_ISA_avx2 FV_CPU_ISA_AVX2
#define FV_ISA_portable FV_CPU_ISA_PORTABLE
#define FV_TABLE_avx512 kKernelsAvx512
#define FV_TABLE_avx2 kKernelsAvx2
#define FV_TABLE_portable kKernelsPortable

const Kernels FV_JOIN(FV_TABLE_, FV_CPU_ISA) = {FV_JOIN(FV_ISA_, FV_CPU_ISA), run_any_item};

}  // namespace flashverify::cpu
