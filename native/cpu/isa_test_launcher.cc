// Runs a program that was compiled for one instruction set, where the CPU has it.
// A program of its own: one instruction of the other, before its main() even,
// would end the test where the CPU lacks it.

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "native/cpu/cpu.h"

int main(int argc, char** argv) {
  using flashverify::cpu::has_isa;
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s portable|avx2|avx512 PROGRAM [ARGUMENT ...]\n", argv[0]);
    return 2;
  }
  const struct {
    const char* name;
    fv_cpu_isa isa;
  } known_isas[] = {
      {"portable", FV_CPU_ISA_PORTABLE}, {"avx2", FV_CPU_ISA_AVX2}, {"avx512", FV_CPU_ISA_AVX512}};
  for (const auto& known : known_isas) {
    if (std::strcmp(known.name, argv[1]) != 0) continue;
    if (!has_isa(known.isa)) {
      std::printf("skipped: this CPU has no %s\n", argv[1]);
      return 0;
    }
    execv(argv[2], argv + 2);
    std::perror(argv[2]);
    return 1;
  }
  std::fprintf(stderr, "unknown instruction set %s\n", argv[1]);
  return 2;
}
