"""A digest of everything that a library is compiled from."""

_SourcesInfo = provider(
    doc = "The sources and flags of a C++ target and of all that it depends on.",
    fields = {
        "files": "depset of File",
        "flags": "depset of string",
    },
)

def _collect_sources_impl(target, ctx):
    # Headers and libraries of other repositories are pinned by the lock file.
    if target.label.workspace_name:
        return [_SourcesInfo(files = depset(), flags = depset())]
    attr = ctx.rule.attr
    files = []
    for name in ["srcs", "hdrs", "textual_hdrs"]:
        for source in getattr(attr, name, []):
            if DefaultInfo in source:
                files.append(source[DefaultInfo].files)
    flags = []
    for name in ["copts", "defines", "local_defines"]:
        flags += getattr(attr, name, [])
    deps = [dep[_SourcesInfo] for dep in getattr(attr, "deps", []) if _SourcesInfo in dep]
    return [_SourcesInfo(
        files = depset(transitive = files + [dep.files for dep in deps]),
        flags = depset(flags, transitive = [dep.flags for dep in deps]),
    )]

_collect_sources = aspect(
    implementation = _collect_sources_impl,
    attr_aspects = ["deps"],
)

def _build_id_impl(ctx):
    infos = [dep[_SourcesInfo] for dep in ctx.attr.deps]
    files = depset(ctx.files.srcs, transitive = [info.files for info in infos]).to_list()
    flags = depset(transitive = [info.flags for info in infos]).to_list()

    by_path = {file.path: file for file in files}
    arguments = ctx.actions.args()
    arguments.add(ctx.outputs.out)
    arguments.add(" ".join([ctx.var["COMPILATION_MODE"]] + sorted(flags)))
    arguments.add_all([by_path[path] for path in sorted(by_path)])
    ctx.actions.run_shell(
        arguments = [arguments],
        command = """\
set -eu
out=$1
mode_and_flags=$2
shift 2
id=$({ echo "$mode_and_flags"; sha256sum -- "$@"; } | sha256sum | cut -c 1-16)
printf '%s\\n' \
    '// Generated: a digest of the native sources, their flags and the build mode.' \
    '// The tests build libraries of another id with -D.' \
    '#ifndef FV_BUILD_ID' \
    "#define FV_BUILD_ID \\"$id\\"" \
    '#endif' > "$out"
""",
        inputs = files,
        mnemonic = "BuildId",
        outputs = [ctx.outputs.out],
    )
    return [DefaultInfo(files = depset([ctx.outputs.out]))]

build_id = rule(
    implementation = _build_id_impl,
    attrs = {
        "deps": attr.label_list(
            aspects = [_collect_sources],
            doc = "C++ targets: their sources count, and those of all that they depend on.",
        ),
        "out": attr.output(mandatory = True),
        "srcs": attr.label_list(
            allow_files = True,
            doc = "Sources that belong to no target of deps.",
        ),
    },
    doc = "Writes a header that defines FV_BUILD_ID, 16 hexadecimal digits.",
)
