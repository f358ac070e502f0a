// The names that messages and callers use for the ABI's enumerations.
#ifndef FLASHVERIFY_NATIVE_ABI_NAMES_H_
#define FLASHVERIFY_NATIVE_ABI_NAMES_H_

#include <cstdint>

namespace flashverify::abi {

// Null for a value outside the enumeration.
const char* status_name(int32_t status) noexcept;
const char* route_name(int32_t route) noexcept;
const char* cpu_isa_name(int32_t isa) noexcept;
const char* dtype_name(int32_t dtype) noexcept;

}  // namespace flashverify::abi

#endif  // FLASHVERIFY_NATIVE_ABI_NAMES_H_
