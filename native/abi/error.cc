#include "native/abi/error.h"

#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace flashverify::abi {
namespace {

// A plain array: no constructor runs in a new thread, and reporting that memory
// ran out needs no memory.
thread_local char message[1024] = "";

}  // namespace

fv_status fail(fv_status status, const char* argument, const char* format, ...) noexcept {
  const int prefix = std::snprintf(message, sizeof message, "%s: ", argument);
  const size_t start = std::min(static_cast<size_t>(std::max(prefix, 0)), sizeof message - 1);
  va_list values;
  va_start(values, format);
  std::vsnprintf(message + start, sizeof message - start, format, values);
  va_end(values);
  return status;
}

fv_status fail_as_told(fv_status status, const char* text) noexcept {
  std::snprintf(message, sizeof message, "%s", text);
  return status;
}

const char* last_error() noexcept { return message; }

}  // namespace flashverify::abi
