"""Copies of files in other packages."""

def _copy_file_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.run(
        arguments = [ctx.file.src.path, out.path],
        executable = "/bin/cp",
        inputs = [ctx.file.src],
        mnemonic = "CopyFile",
        outputs = [out],
    )
    return [DefaultInfo(
        files = depset([out]),
        runfiles = ctx.runfiles([out]),
    )]

copy_file = rule(
    implementation = _copy_file_impl,
    attrs = {
        "src": attr.label(
            allow_single_file = True,
            mandatory = True,
        ),
    },
    doc = "Copies one file into this package, under the target's own name.",
)
