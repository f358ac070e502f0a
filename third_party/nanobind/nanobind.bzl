"""nanobind extension modules in split mode, for the stable ABI of Python 3.10."""

load("//native:cc.bzl", "CXX_COPTS")

def nanobind_extension(name, srcs, shared_library, deps = [], visibility = None, **kwargs):
    """Builds <name>.abi3.so, which finds its shared library in its own folder.

    nanobind's compiled half is the package nanobind-backend, so the extension
    must be imported with @pypi//:nanobind-backend.

    Args:
      name: the module's name.
      srcs: C++17 sources and private headers.
      shared_library: the one library of ours that it is linked to.
      deps: further C++ libraries, headers mostly.
      visibility: of the extension.
      **kwargs: what cc_binary takes.
    """
    native.cc_binary(
        name = name + ".abi3.so",
        srcs = srcs,
        # Not srcs: Bazel would add a search path into its own tree.
        additional_linker_inputs = [shared_library],
        # Built for size: the kernels are in the shared library.
        copts = CXX_COPTS + [
            "-Os",
            "-fno-stack-protector",
            "-fno-strict-aliasing",
        ],
        linkopts = [
            "$(execpath %s)" % shared_library,
            # Without a name given, the linker writes the path of its output.
            "-Wl,-soname,%s.abi3.so" % name,
            "-Wl,-rpath,$$ORIGIN",
            "-Wl,--gc-sections",
            "-Wl,-z,relro,-z,now",
            "-Wl,-s",
        ],
        linkshared = True,
        linkstatic = True,
        visibility = visibility,
        deps = deps + ["@pypi_nanobind//:headers"],
        **kwargs
    )

def _nanobind_stub_impl(ctx):
    module = ctx.file.extension.basename.split(".")[0]
    ctx.actions.run(
        arguments = [
            "--quiet",
            "--import=" + ctx.file.extension.dirname,
            "--module=" + module,
            "--output-file=" + ctx.outputs.out.path,
        ],
        executable = ctx.executable._stubgen,
        inputs = [ctx.file.extension] + ctx.files.data,
        mnemonic = "NanobindStub",
        outputs = [ctx.outputs.out],
        progress_message = "Writing the stub of " + module,
    )
    return [DefaultInfo(files = depset([ctx.outputs.out]))]

nanobind_stub = rule(
    implementation = _nanobind_stub_impl,
    attrs = {
        "data": attr.label_list(
            allow_files = True,
            doc = "The libraries that the extension loads from its own folder.",
        ),
        "extension": attr.label(
            allow_single_file = True,
            mandatory = True,
        ),
        "out": attr.output(mandatory = True),
        "_stubgen": attr.label(
            cfg = "exec",
            default = "//third_party/nanobind:stubgen",
            executable = True,
        ),
    },
    doc = "Writes the .pyi of an extension by importing it.",
)
