"""The shared library libflashverify.so.<precision revision>."""

load(":cc.bzl", "CXX_COPTS")

SONAME = "libflashverify.so.4"

_LIBTBB = "@pypi_tbb//:libtbb.so.12"

def flashverify_shared_library(
        name,
        version_script = "//native/abi:libflashverify.map",
        local_defines = [],
        cuda_images = "//native/cuda:no_images",
        **kwargs):
    """Links the C ABI and all backends into one versioned shared library.

    It looks for libtbb.so.12 in its own folder. Besides //native, only the tests
    of the load gate use this macro, for libraries that must be refused: of another
    revision (FLASHVERIFY_PRECISION_REVISION=3), of another build
    (FV_BUILD_ID="..."), or without the export (another version script).

    Args:
      name: ends in libflashverify.so.4; may lie in a folder of its own.
      version_script: the linker's list of exported symbols.
      local_defines: preprocessor definitions for the file that holds the table.
      cuda_images: the library's device code.
      **kwargs: what cc_binary takes.
    """
    if name.split("/")[-1] != SONAME:
        fail("%s: the loader looks for %s" % (name, SONAME))
    native.cc_binary(
        name = name,
        srcs = ["//native/abi:api.cc"],
        # Not srcs: Bazel would add a search path into its own tree, and the wheel
        # would carry it.
        additional_linker_inputs = [
            version_script,
            _LIBTBB,
        ],
        copts = CXX_COPTS,
        linkopts = [
            "-Wl,-soname," + SONAME,
            "-Wl,--version-script=$(execpath %s)" % version_script,
            "-Wl,-z,defs",
            "-Wl,-z,relro,-z,now",
            "-Wl,-rpath,$$ORIGIN",
            "$(execpath %s)" % _LIBTBB,
        ],
        linkshared = True,
        linkstatic = True,
        local_defines = local_defines,
        deps = [
            "//native/abi:build_id",
            "//native/abi:implementation",
            cuda_images,
        ],
        **kwargs
    )
