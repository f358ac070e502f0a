"""Device code by NVRTC, embedded into a cc_library."""

CudaImagesInfo = provider(
    doc = "Device code of some sources.",
    fields = {
        "images": "list of structs (source, arch, image, report)",
    },
)

def _cuda_image_impl(ctx):
    library = [f for f in ctx.files._nvrtc if f.basename.startswith("libnvrtc.so")][0]
    images = []
    for arch in ctx.attr.archs:
        stem = "%s.%s" % (ctx.label.name, arch)
        image = ctx.actions.declare_file(stem + (".cubin" if arch.startswith("sm_") else ".ptx"))
        report = ctx.actions.declare_file(stem + ".resources.tsv")
        args = ctx.actions.args()
        args.add("--nvrtc", library)
        args.add("--arch", arch)
        args.add("--image", image)
        args.add("--report", report)
        args.add(ctx.file.src)
        args.add("--")
        args.add("-I.")
        args.add("--std=c++17")
        args.add_all(ctx.attr.defines, format_each = "-D%s")
        ctx.actions.run(
            executable = ctx.executable._compiler,
            arguments = [args],
            inputs = [ctx.file.src] + ctx.files.hdrs + ctx.files._nvrtc,
            outputs = [image, report],
            mnemonic = "Nvrtc",
            progress_message = "Compiling %s for %s" % (ctx.label.name, arch),
        )
        images.append(struct(source = ctx.label.name, arch = arch, image = image, report = report))
    return [
        DefaultInfo(files = depset([image.image for image in images])),
        OutputGroupInfo(
            images = depset([image.image for image in images]),
            reports = depset([image.report for image in images]),
            **{image.arch: depset([image.image]) for image in images}
        ),
        CudaImagesInfo(images = images),
    ]

cuda_image = rule(
    doc = "One source compiled for several architectures. The target's name is the " +
          "source's name in the table that the library searches. Output groups: " +
          "each architecture's image by its name, \"images\" and \"reports\".",
    implementation = _cuda_image_impl,
    attrs = {
        "src": attr.label(mandatory = True, allow_single_file = [".cu"]),
        "hdrs": attr.label_list(allow_files = [".cuh", ".h"]),
        "archs": attr.string_list(
            mandatory = True,
            doc = "sm_NN for machine code, compute_NN for PTX.",
        ),
        "defines": attr.string_list(),
        "_compiler": attr.label(default = "//third_party/cuda:nvrtc", executable = True, cfg = "exec"),
        "_nvrtc": attr.label(default = "@pypi_nvidia_cuda_nvrtc_cu12//:libs", cfg = "exec"),
    },
)

# Images are taken from the host configuration, of which there is one: the test that
# builds the wheel twice would otherwise compile them for ten more minutes.
_IMAGES = attr.label_list(
    mandatory = True,
    cfg = "host",  # buildifier: disable=attr-cfg
    providers = [CudaImagesInfo],
)

def _cuda_image_files_impl(ctx):
    groups = [image[OutputGroupInfo][ctx.attr.group] for image in ctx.attr.images]
    files = depset(transitive = groups)
    return [DefaultInfo(files = files, runfiles = ctx.runfiles(transitive_files = files))]

cuda_image_files = rule(
    doc = "One output group of some cuda_image targets, as the library's table has them.",
    implementation = _cuda_image_files_impl,
    attrs = {
        "images": _IMAGES,
        "group": attr.string(
            mandatory = True,
            doc = "An architecture's name, \"images\" or \"reports\".",
        ),
    },
)

def _cuda_table_impl(ctx):
    images = [image for target in ctx.attr.images for image in target[CudaImagesInfo].images]
    assembly = ctx.actions.declare_file(ctx.label.name + ".S")
    args = ctx.actions.args()
    args.add("--symbol", ctx.attr.symbol)
    args.add("--out", assembly)
    for image in images:
        args.add_all("--image", [image.source, image.arch, image.image])
    ctx.actions.run(
        executable = ctx.executable._writer,
        arguments = [args],
        inputs = [image.image for image in images],
        outputs = [assembly],
        mnemonic = "CudaTable",
        progress_message = "Writing %s" % ctx.label,
    )
    return [
        DefaultInfo(files = depset([assembly])),
        OutputGroupInfo(images = depset([image.image for image in images])),
    ]

_cuda_table = rule(
    implementation = _cuda_table_impl,
    attrs = {
        "images": _IMAGES,
        "symbol": attr.string(mandatory = True),
        "_writer": attr.label(
            default = "//third_party/cuda:images_table",
            executable = True,
            cfg = "exec",
        ),
    },
)

def cuda_image_library(name, images, symbol, **kwargs):
    """A cc_library that holds device code.

    It defines the hidden symbol `symbol`, an array of {const char* source, *arch;
    const unsigned char *begin, *end} that a null source ends.

    Args:
      name: the target's name.
      images: cuda_image targets.
      symbol: the array's name.
      **kwargs: what cc_library takes.
    """
    _cuda_table(name = name + "_table", images = images, symbol = symbol, tags = ["manual"])
    native.filegroup(
        name = name + "_images",
        srcs = [name + "_table"],
        output_group = "images",
        tags = ["manual"],
    )
    native.cc_library(
        name = name,
        srcs = [name + "_table"],
        linkstatic = True,
        textual_hdrs = [name + "_images"],
        **kwargs
    )
