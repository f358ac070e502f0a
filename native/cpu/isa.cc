#include "native/cpu/cpu.h"

namespace flashverify::cpu {

bool has_isa(fv_cpu_isa isa) {
  switch (isa) {
    case FV_CPU_ISA_PORTABLE:
      return true;
#if defined(__x86_64__)
    // The compiler's run-time checks ask the operating system's XSAVE mask too.
    case FV_CPU_ISA_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case FV_CPU_ISA_AVX512:
      return has_isa(FV_CPU_ISA_AVX2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

fv_cpu_isa best_isa() {
  static const fv_cpu_isa best = has_isa(FV_CPU_ISA_AVX512) ? FV_CPU_ISA_AVX512
                                 : has_isa(FV_CPU_ISA_AVX2) ? FV_CPU_ISA_AVX2
                                                            : FV_CPU_ISA_PORTABLE;
  return best;
}

}  // namespace flashverify::cpu
