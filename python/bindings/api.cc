#include "python/bindings/api.h"

#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "native/abi/build_id.h"

namespace flashverify::bindings {

const char* const kBuildId = FV_BUILD_ID;

namespace {

std::string describe(uint32_t precision_revision, uint32_t abi_version, const char* build_id) {
  return "precision revision " + std::to_string(precision_revision) + ", ABI version " +
         std::to_string(abi_version) + ", build id " + build_id;
}

}  // namespace

void check_library() {
  const fv_api& library = api();
  // The table's head never moves. What lies behind it is read only where the
  // numbers say that it is there.
  const bool same_layout =
      library.abi_version == FLASHVERIFY_ABI_VERSION && library.struct_size == sizeof(fv_api);
  const bool same_revision = library.precision_revision == FLASHVERIFY_PRECISION_REVISION;
  const bool same_build = same_layout && std::strcmp(library.build_id, kBuildId) == 0;
  if (same_layout && same_revision && same_build) return;
  const std::string message =
      "the extension is bound to " + library_path() + " (" +
      describe(library.precision_revision, library.abi_version,
               same_layout ? library.build_id : "unknown") +
      "), and was built for " +
      describe(FLASHVERIFY_PRECISION_REVISION, FLASHVERIFY_ABI_VERSION, kBuildId);
  throw nanobind::import_error(message.c_str());
}

const fv_api& api() { return *fv_get_api(); }

std::string library_path() {
  Dl_info info;
  if (dladdr(fv_get_api(), &info) == 0 || info.dli_fname == nullptr) return "an unknown file";
  return info.dli_fname;
}

}  // namespace flashverify::bindings
