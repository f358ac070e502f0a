"""The host's CPython as a Bazel toolchain, plus its C headers."""

# The lock file's numpy and networkx need it; the wheel itself serves 3.10 too.
_MINIMUM_VERSION = (3, 11)

_PROBE = """
import json, os, sys, sysconfig
include = sysconfig.get_paths()["include"]
print(json.dumps({
    "executable": os.path.realpath(sys.executable),
    "include": include,
    "has_headers": os.path.exists(os.path.join(include, "Python.h")),
    "version": list(sys.version_info[:2]),
}))
"""

def find_python(repository_ctx):
    """Finds the interpreter that builds, tests and pip run with.

    $FLASHVERIFY_PYTHON wins; otherwise it is the first python3 on PATH. A shim
    (pyenv's, say) is followed to the real interpreter, because shims need a HOME
    that a sandbox does not promise.

    Args:
      repository_ctx: the calling repository rule's context.

    Returns:
      struct(path, version, include, has_headers): the interpreter's absolute
      path, its "major.minor", the folder of its C headers, and whether Python.h
      is there.
    """
    name = repository_ctx.os.environ.get("FLASHVERIFY_PYTHON", "python3")
    path = name if name.startswith("/") else repository_ctx.which(name)
    if not path:
        fail("no %s on PATH: install Python, or set FLASHVERIFY_PYTHON to an interpreter" % name)
    result = repository_ctx.execute([path, "-I", "-c", _PROBE])
    if result.return_code:
        fail("%s could not be asked for its version: %s" % (path, result.stderr))
    info = json.decode(result.stdout)
    version = "%d.%d" % (info["version"][0], info["version"][1])
    if tuple(info["version"]) < _MINIMUM_VERSION:
        fail("%s is Python %s; building needs %d.%d or newer (FLASHVERIFY_PYTHON names another)" %
             ((path, version) + _MINIMUM_VERSION))
    return struct(
        has_headers = info["has_headers"],
        include = info["include"],
        path = info["executable"],
        version = version,
    )

_BUILD = """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "py3_runtime",
    files = [
        "venv/bin/python3",
        "venv/pyvenv.cfg",
    ],
    interpreter = "venv/bin/python3",
    python_version = "PY3",
    # The default, "env python", finds nothing on Debian.
    stub_shebang = "#!/usr/bin/env python3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":py3_runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)
"""

def _python_host_impl(repository_ctx):
    python = find_python(repository_ctx)
    if not python.has_headers:
        fail("%s/Python.h is missing: install python%s-dev" % (python.include, python.version))
    repository_ctx.symlink(python.include, "include")

    # A bare virtual environment, written by hand: tests see the lock file's
    # packages and never those installed for the host's interpreter, and no path
    # of this machine's output base gets into an action's key.
    repository_ctx.symlink(python.path, "venv/bin/python3")
    repository_ctx.file("venv/pyvenv.cfg", "\n".join([
        "home = " + python.path.rsplit("/", 1)[0],
        "include-system-site-packages = false",
        "version = " + python.version,
        "",
    ]))
    repository_ctx.file("BUILD.bazel", _BUILD)

python_host = repository_rule(
    implementation = _python_host_impl,
    configure = True,
    doc = "Declares @python//:toolchain and @python//:headers around the host's interpreter.",
    environ = [
        "FLASHVERIFY_PYTHON",
        "PATH",
    ],
    local = True,
)
