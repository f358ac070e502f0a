// The native library that this extension is bound to.
#ifndef FLASHVERIFY_PYTHON_BINDINGS_API_H_
#define FLASHVERIFY_PYTHON_BINDINGS_API_H_

#include <string>

#include "flashverify/flashverify.h"

namespace flashverify::bindings {

// The build id of the library that this extension was compiled with.
extern const char* const kBuildId;

// Compares the library's precision revision, ABI version and build id with those
// compiled into this extension. Throws nb::import_error where they differ; until
// it has returned, nothing else of the library may be used.
void check_library();

// The library's table.
const fv_api& api();

// The file that the dynamic loader really bound this extension to.
std::string library_path();

}  // namespace flashverify::bindings

#endif  // FLASHVERIFY_PYTHON_BINDINGS_API_H_
