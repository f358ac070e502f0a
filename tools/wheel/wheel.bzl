"""The wheel, and tests that run against it as it is installed."""

load("//tools:pytest.bzl", "pytest_test")

def _wheel_impl(ctx):
    root = ctx.attr.root + "/"
    stem = "%s-%s" % (ctx.attr.distribution.replace("-", "_"), ctx.attr.version)
    wheel = ctx.actions.declare_file("%s-%s.whl" % (stem, ctx.attr.tag))

    # Everything that the libraries have in a source tree, so that no module and no
    # native file can be forgotten here.
    members = {}
    for library in ctx.attr.libraries:
        for file in library[DefaultInfo].default_runfiles.files.to_list():
            if file.short_path.startswith(root):
                members[file.short_path[len(root):]] = file
    for target, name in ctx.attr.files.items():
        (members[name],) = target[DefaultInfo].files.to_list()
    licenses = {}
    for target, name in ctx.attr.license_texts.items():
        (licenses[name],) = target[DefaultInfo].files.to_list()

    arguments = ctx.actions.args()
    arguments.add("--out", wheel)
    arguments.add("--distribution", ctx.attr.distribution)
    arguments.add("--version", ctx.attr.version)
    arguments.add("--tag", ctx.attr.tag)
    arguments.add("--metadata", ctx.file.metadata)
    for name, file in members.items():
        arguments.add("--file", "%s=%s" % (name, file.path))
    for name, file in licenses.items():
        arguments.add("--license", "%s=%s" % (name, file.path))
    if ctx.file.description:
        arguments.add("--description", ctx.file.description)
    if ctx.file.entry_points:
        arguments.add("--entry_points", ctx.file.entry_points)
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    ctx.actions.run(
        arguments = [arguments],
        executable = ctx.executable._pack,
        inputs = members.values() + licenses.values() + [ctx.file.metadata] +
                 ctx.files.description + ctx.files.entry_points,
        mnemonic = "Wheel",
        outputs = [wheel],
        progress_message = "Packing " + wheel.basename,
    )
    return [DefaultInfo(
        files = depset([wheel]),
        runfiles = ctx.runfiles([wheel]),
    )]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "description": attr.label(
            allow_single_file = [".md"],
            doc = "The long description.",
        ),
        "distribution": attr.string(mandatory = True),
        "entry_points": attr.label(
            allow_single_file = [".txt"],
            doc = "What other programs find of the distribution, as entry_points.txt.",
        ),
        "files": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "{file: its name in the wheel}, besides what the libraries bring.",
        ),
        "libraries": attr.label_list(
            doc = "py_library targets: their sources and data under root go into the wheel.",
            mandatory = True,
            providers = [PyInfo],
        ),
        "license_texts": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "{license text: its name in the wheel's folder of licenses}.",
        ),
        "metadata": attr.label(
            allow_single_file = True,
            doc = "METADATA without the fields that the other attributes give.",
            mandatory = True,
        ),
        "root": attr.string(
            doc = "The folder whose contents become site-packages.",
            mandatory = True,
        ),
        "tag": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
        "_pack": attr.label(
            cfg = "exec",
            default = "//tools/wheel:pack",
            executable = True,
        ),
    },
    doc = "Packs <distribution>-<version>-<tag>.whl; equal contents give equal bytes.",
)

_WHEEL = "//python:wheel"

def wheel_pytest_test(name, srcs, deps = [], data = [], args = [], tags = [], **kwargs):
    """Runs test files against the wheel, installed into a fresh environment.

    The package is importable from that environment alone: of the deps, packages
    of @pypi and helpers by their workspace path (tests.support, say) can be
    imported, modules below python/ cannot.

    Args:
      name: the target's name.
      srcs: test files, as for pytest_test.
      deps: as for pytest_test.
      data: as for pytest_test.
      args: further options for pytest.
      tags: the target's tags.
      **kwargs: what py_test takes.
    """
    runner = "//tools/wheel:installed_main.py"
    native.py_test(
        name = name,
        srcs = srcs + [runner],
        args = ["--wheel=$(rootpath %s)" % _WHEEL] + [
            "$(rootpath %s)" % src
            for src in srcs
            if not src.endswith("conftest.py")
        ] + args,
        data = data + [
            _WHEEL,
            "//tools:pytest_main.py",
        ],
        main = runner,
        tags = tags + ["wheel"],
        deps = deps + [
            "//tools/wheel:environment",
            "@pypi//:pytest",
        ],
        **kwargs
    )

def api_pytest_test(name, srcs, **kwargs):
    """A pytest_test, and the same test against the installed wheel.

    Args:
      name: the target's name; <name>_wheel is the other one's.
      srcs: test files.
      **kwargs: what pytest_test takes.
    """
    pytest_test(
        name = name,
        srcs = srcs,
        **kwargs
    )
    wheel_pytest_test(
        name = name + "_wheel",
        srcs = srcs,
        **kwargs
    )
