// From status codes to the exception classes of flashverify.errors.
#ifndef FLASHVERIFY_PYTHON_BINDINGS_ERRORS_H_
#define FLASHVERIFY_PYTHON_BINDINGS_ERRORS_H_

#include <string>

#include "flashverify/flashverify.h"

namespace flashverify::bindings {

// Throws the Python exception that stands for `status`. Needs the GIL.
[[noreturn]] void raise_status(fv_status status, const std::string& message);

// Throws InvalidArgumentError: "argument: finding; accepted: accepted".
[[noreturn]] void raise_invalid(const char* argument, const std::string& finding,
                                const std::string& accepted);

// Throws for every status but FV_OK, with the message of this thread's last
// failed call. Needs the GIL.
void raise_unless_ok(fv_status status);

}  // namespace flashverify::bindings

#endif  // FLASHVERIFY_PYTHON_BINDINGS_ERRORS_H_
