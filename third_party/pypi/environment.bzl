"""One environment of many wheels, pinned by hash in a lock file of its own.

For programs that bring so many packages, and so many versions of them, that they are
kept apart from @pypi: engines that the tests drive.
"""

load("//third_party/python:python.bzl", "find_python")

_BUILD = """\
package(default_visibility = ["//visibility:public"])

# One directory, as in @pypi: content.sha256 stands for what is inside.
py_library(
    name = "pkg",
    testonly = True,
    data = [
        "content.sha256",
        "site-packages",
    ],
    imports = ["site-packages"],
)
"""

_REMOVE_SCRIPTS = """
import pathlib, sys
for path in pathlib.Path(sys.argv[1]).glob("bin/*"):
    path.unlink()
"""

def _run(repository_ctx, arguments, failure):
    result = repository_ctx.execute(arguments, timeout = 3600)
    if result.return_code:
        fail("%s: %s\n%s" % (repository_ctx.name, failure, result.stdout + result.stderr))
    return result.stdout

def _pypi_environment_impl(repository_ctx):
    python = find_python(repository_ctx)
    lock = repository_ctx.path(repository_ctx.attr.lock)
    _run(repository_ctx, [
        python.path,
        "-I",
        "-m",
        "pip",
        "install",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        "--no-compile",
        "--ignore-installed",
        "--root-user-action=ignore",
        "--no-warn-script-location",
        "--target=site-packages",
        "--requirement=" + str(lock),
    ], "pip could not install the lock file's packages")

    # Console scripts name this machine's folders in their first line.
    _run(repository_ctx, [python.path, "-I", "-c", _REMOVE_SCRIPTS, "site-packages"], "bin")
    digest = _run(repository_ctx, [
        python.path,
        "-I",
        "-c",
        "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())",
        str(lock),
    ], "digest of the lock file")
    repository_ctx.file("content.sha256", digest)

    # As in pypi.bzl; a file that is meant for another Python is no error.
    repository_ctx.execute([
        python.path,
        "-I",
        "-m",
        "compileall",
        "-q",
        "-j",
        "0",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        "site-packages",
        "site-packages",
    ], timeout = 1800)
    repository_ctx.file("BUILD.bazel", _BUILD)

pypi_environment = repository_rule(
    implementation = _pypi_environment_impl,
    attrs = {
        "lock": attr.label(
            allow_single_file = True,
            doc = "A pip requirements file, each entry with its hashes.",
            mandatory = True,
        ),
    },
    doc = """Installs a lock file's packages, all of them, into one folder.

@<name>//:pkg is the py_library that imports from it. Nothing is fetched before a
target that needs it is built.""",
    environ = ["FLASHVERIFY_PYTHON"],
)
