"""A second build of a target, in folders of its own."""

RebuildInfo = provider(doc = "The value of a build setting.", fields = {"value": "string"})

def _pass_impl(ctx):
    return RebuildInfo(value = ctx.build_setting_value)

build_pass = rule(
    implementation = _pass_impl,
    build_setting = config.string(),
    doc = "A setting that nothing reads: another value makes Bazel build everything again.",
)

_SETTING = "//tools/wheel:build_pass"

def _second_pass_impl(_settings, _attr):
    return {_SETTING: "second"}

_second_pass = transition(
    implementation = _second_pass_impl,
    inputs = [],
    outputs = [_SETTING],
)

def _rebuilt_impl(ctx):
    (file,) = ctx.files.target

    # Under a path of its own: in runfiles, both builds' files would have the same.
    out = ctx.actions.declare_file("%s/%s" % (ctx.label.name, file.basename))
    ctx.actions.run(
        arguments = [file.path, out.path],
        executable = "/bin/cp",
        inputs = [file],
        outputs = [out],
    )
    return [DefaultInfo(
        files = depset([out]),
        runfiles = ctx.runfiles([out]),
    )]

rebuilt = rule(
    implementation = _rebuilt_impl,
    attrs = {
        "target": attr.label(
            cfg = _second_pass,
            mandatory = True,
        ),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
    },
    doc = """Builds the one file of a target once more: every action runs again, under
other paths. The result is NAME/<the file's name>, for a test to compare.""",
)
