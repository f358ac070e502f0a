// The thread's last error message, and the one way to fail a call.
#ifndef FLASHVERIFY_NATIVE_ABI_ERROR_H_
#define FLASHVERIFY_NATIVE_ABI_ERROR_H_

#include "flashverify/flashverify.h"

namespace flashverify::abi {

// Stores "<argument>: <formatted text>" as this thread's message and returns
// `status`. The text says what was found and what is accepted. Never allocates
// and never throws; a message beyond the buffer is cut.
[[gnu::format(printf, 3, 4)]] fv_status fail(fv_status status, const char* argument,
                                             const char* format, ...) noexcept;

// The same for a whole message that begins with its argument's name.
fv_status fail_as_told(fv_status status, const char* text) noexcept;

// This thread's message; empty before its first failure.
const char* last_error() noexcept;

}  // namespace flashverify::abi

// Leaves the calling function with the status of `expression` unless it is FV_OK.
#define FV_RETURN_IF_ERROR(expression)                          \
  do {                                                          \
    const fv_status fv_status_of_check = (expression);          \
    if (fv_status_of_check != FV_OK) return fv_status_of_check; \
  } while (false)

#endif  // FLASHVERIFY_NATIVE_ABI_ERROR_H_
