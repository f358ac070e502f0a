"""Wheels pinned by hash in lock files, fetched by the host's pip client.

No address appears in this repository: where a wheel comes from is the business
of the machine's pip configuration (index, mirror, find-links); that it is the
right one is the business of the hashes.
"""

load("//third_party/python:python.bzl", "find_python")

def _normalize(name):
    return name.strip().lower().replace("_", "-").replace(".", "-")

def _repo_name(hub, name):
    return hub + "_" + name.replace("-", "_")

def _parse_lock(text):
    """Reads what update_lock.py writes.

    Args:
      text: the lock file's text.

    Returns:
      ({name: [requirement lines]}, {name: [names it pulls in]}). A build with a
      local version label comes before the plain build of its name; who pulls in
      whom is read from the `# via` comments.
    """
    requirements = {}
    pulls_in = {}
    name = None
    in_via = False
    for line in text.replace("\\\n", " ").split("\n"):
        stripped = line.strip()
        if not stripped:
            continue
        if stripped.startswith("#"):
            if not line.startswith(" ") or name == None:
                continue
            who = stripped[1:].strip()
            if who.startswith("via"):
                in_via = True
                who = who[3:].strip()
            if in_via and who and not who.startswith("-"):
                pulls_in.setdefault(_normalize(who), []).append(name)
            continue
        if stripped.startswith("-"):
            fail("lock file: options belong in pip's configuration, not here: " + stripped)
        if "==" not in stripped or "--hash=sha256:" not in stripped:
            fail("lock file: not pinned by version and hash: " + stripped)
        pin = stripped.split(" ")[0]
        name = _normalize(pin.split("==")[0])
        in_via = False
        lines = requirements.setdefault(name, [])
        lines.insert(0 if "+" in pin else len(lines), " ".join([word for word in stripped.split(" ") if word]))
    return requirements, pulls_in

def _pypi_lock_impl(repository_ctx):
    attr = repository_ctx.attr
    requirements, pulls_in = _parse_lock(repository_ctx.read(attr.lock))
    files_only, _ = _parse_lock(repository_ctx.read(attr.files_lock))
    twice = [name for name in files_only if name in requirements]
    if twice:
        fail("in both lock files: " + ", ".join(twice))
    overlays = {name: str(label) for label, name in attr.overlays.items()}
    unknown = [name for name in overlays if name not in requirements and name not in files_only]
    if unknown:
        fail("overlays for packages that no lock file holds: " + ", ".join(unknown))

    hub = repository_ctx.name
    aliases = [
        'alias(name = "%s", actual = "@%s//:pkg")' % (name, _repo_name(hub, name))
        for name in sorted(requirements)
    ]
    calls = []
    for name in sorted(requirements.keys() + files_only.keys()):
        calls.append("    pypi_package(name = %r, hub = %r, requirements = %r, pulls_in = %r, overlay = %r, files_only = %r)" % (
            _repo_name(hub, name),
            hub,
            requirements.get(name, files_only.get(name)),
            sorted(pulls_in.get(name, [])),
            overlays.get(name),
            name in files_only,
        ))
    repository_ctx.file("BUILD.bazel", "\n".join(
        ['package(default_visibility = ["//visibility:public"])', ""] + aliases + [""],
    ))
    repository_ctx.file("packages.bzl", "\n".join([
        '"""One lazy repository per locked package."""',
        "",
        'load("@//third_party/pypi:pypi.bzl", "pypi_package")',
        "",
        "def pypi_packages():",
    ] + calls + [""]))

pypi_lock = repository_rule(
    implementation = _pypi_lock_impl,
    attrs = {
        "files_lock": attr.label(
            allow_single_file = True,
            doc = "Packages wanted for their files alone: unpacked, without their needs.",
            mandatory = True,
        ),
        "lock": attr.label(
            allow_single_file = True,
            doc = "Packages that are imported.",
            mandatory = True,
        ),
        "overlays": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "{BUILD fragment: the package whose BUILD file it is appended to}.",
        ),
    },
    doc = """Reads the lock files and fetches nothing.

@pypi//:<name> is the py_library of a package that is imported;
@pypi//:packages.bzl declares one repository @pypi_<name> per package, which is
installed when a target that needs it is first built. Files inside get names, as
@pypi_<name>//:<target>, from an overlay: they lie under site-packages/, or under
wheel/ as the wheel has them where only its files are wanted.""",
)

_PYTHON_BUILD = """\
package(default_visibility = ["//visibility:public"])

# One directory, not a file each: a source directory is one symlink in a
# runfiles tree and in a sandbox. A running Bazel server does not look into it
# again, so content.sha256 stands for what is inside.
py_library(
    name = "pkg",
    data = [
        "content.sha256",
        "site-packages",
    ],
    imports = ["site-packages"],
    deps = {deps},
)
"""

_PIP_OPTIONS = [
    "--require-hashes",
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
    "--quiet",
    "--requirement=requirement.txt",
]

_PIP_INSTALL = [
    "install",
    "--no-compile",
    "--ignore-installed",
    "--root-user-action=ignore",
    "--no-warn-script-location",
    "--target=site-packages",
] + _PIP_OPTIONS

_PIP_DOWNLOAD = [
    "download",
    "--dest=download",
] + _PIP_OPTIONS

def _pip(repository_ctx, python, arguments):
    """Has pip fetch the first of the locked builds that this machine is offered."""
    errors = []
    for requirement in repository_ctx.attr.requirements:
        repository_ctx.file("requirement.txt", requirement + "\n")

        # -I: no PYTHONPATH, no user site.
        result = repository_ctx.execute([python.path, "-I", "-m", "pip"] + arguments, timeout = 1800)
        if result.return_code == 0:
            return
        errors.append(result.stdout + result.stderr)

        # Whichever build is taken, its hash is in the lock. A broken connection
        # is no reason to try the next one.
        if "No matching distribution" not in result.stderr and "DO NOT MATCH THE HASHES" not in result.stderr:
            break
    fail("pip could not fetch %s:\n%s" % (repository_ctx.name, "\n".join(errors)))

def _unpack_wheel(repository_ctx, python):
    """Unpacks a wheel as it is; returns the text of the BUILD file."""
    _pip(repository_ctx, python, _PIP_DOWNLOAD)
    (wheel,) = repository_ctx.path("download").readdir()
    repository_ctx.symlink(wheel, "wheel.zip")  # extract() goes by the name
    repository_ctx.extract("wheel.zip", output = "wheel")
    repository_ctx.delete("wheel.zip")
    repository_ctx.delete("download")
    return 'package(default_visibility = ["//visibility:public"])\n'

def _install_package(repository_ctx, python):
    """Installs a package to be imported; returns the text of the BUILD file."""
    attr = repository_ctx.attr
    _pip(repository_ctx, python, _PIP_INSTALL)
    result = repository_ctx.execute(
        [python.path, "-I", repository_ctx.path(attr._describe), "site-packages"],
    )
    if result.return_code:
        fail("metadata of %s: %s" % (repository_ctx.name, result.stderr))
    metadata = json.decode(result.stdout)
    repository_ctx.file("content.sha256", metadata["content"] + "\n")
    missing = [name for name in metadata["needs"] if name not in attr.pulls_in]
    if missing:
        fail("%s needs %s, which the lock file lacks" % (repository_ctx.name, ", ".join(missing)))

    # Bytecode that never looks at time stamps: the same bytes on every machine,
    # and a sandboxed test, which cannot write __pycache__, need not compile. It
    # exits 1 on a file that is meant for another Python; that is no error.
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
    return _PYTHON_BUILD.format(deps = repr([
        "@%s//:pkg" % _repo_name(attr.hub, name)
        for name in attr.pulls_in
        if name in metadata["needs"] or name in metadata["extras"]
    ]))

def _pypi_package_impl(repository_ctx):
    attr = repository_ctx.attr
    python = find_python(repository_ctx)
    build = _unpack_wheel(repository_ctx, python) if attr.files_only else _install_package(repository_ctx, python)
    if attr.overlay:
        build += "\n" + repository_ctx.read(attr.overlay)
    repository_ctx.file("BUILD.bazel", build)

pypi_package = repository_rule(
    implementation = _pypi_package_impl,
    attrs = {
        "files_only": attr.bool(doc = "Nothing of it is imported."),
        "hub": attr.string(mandatory = True),
        "overlay": attr.label(allow_single_file = True),
        "pulls_in": attr.string_list(doc = "What the lock file says this package pulls in."),
        "requirements": attr.string_list(
            doc = "Locked builds of one version, the preferred one first.",
            mandatory = True,
        ),
        "_describe": attr.label(
            allow_single_file = True,
            default = "//third_party/pypi:describe_package.py",
        ),
    },
    doc = "One installed package. Declared by @pypi//:packages.bzl.",
    environ = ["FLASHVERIFY_PYTHON"],
)
