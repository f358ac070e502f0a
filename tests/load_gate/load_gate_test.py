"""The load gate, tried with every file that might lie where the native library should.

Each test copies the package, puts something else in the place of a native file,
and imports the copy in a process of its own.
"""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import flashverify

LIBRARY = "libflashverify.so.4"
EXTENSION = "_native.abi3.so"
LIBTBB = "libtbb.so.12"

PACKAGE = Path(flashverify.__file__).parent
VARIANTS = Path(__file__).parent
OTHER_BUILD_ID = "0123456789abcdef"

IMPORT = "import flashverify"
REPORT = "import flashverify; print(flashverify.native_info()['library_path'])"

# Lengths that cut a file within its magic, its header, its tables and its contents.
LENGTHS = (1, 3, 4, 15, 16, 63, 64, 65, 500, 4096, 0.1, 0.5, 0.9, -4096, -100, -1)


class Site:
    """A folder to import from: a copy of the package, to be spoilt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "flashverify"
        self.package.mkdir(parents=True)
        for file in PACKAGE.iterdir():
            if file.is_file():
                shutil.copy(file, self.package / file.name)
        for file in self.package.iterdir():
            file.chmod(0o644)  # Bazel's files are read-only

    @property
    def library(self) -> Path:
        return self.package / LIBRARY

    @property
    def extension(self) -> Path:
        return self.package / EXTENSION

    def replace(self, name: str, source: Path) -> None:
        (self.package / name).unlink()
        shutil.copy(source, self.package / name)

    def run(
        self, code: str, *options: str, rest_of_path: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        # The folder of the package under test comes last: the copy wins.
        path = [str(self.folder)] + [entry for entry in sys.path if entry and rest_of_path]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")
        }
        return subprocess.run(
            [sys.executable, *options, "-c", code],
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": os.pathsep.join(path), **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


def variant(name: str, file: str = LIBRARY) -> Path:
    path = VARIANTS / name / file
    assert path.is_file(), path
    return path


def elsewhere(folder: Path, source: Path) -> Path:
    """A library in a folder of its own, with what it loads beside it."""
    folder.mkdir()
    shutil.copy(PACKAGE / LIBTBB, folder / LIBTBB)
    shutil.copy(source, folder / LIBRARY)
    return folder / LIBRARY


def assert_refused(done: subprocess.CompletedProcess[str], path: Path, *words: str) -> None:
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("flashverify.errors.StaleNativeLibraryError: "), done.stderr
    for word in (
        str(path),
        "this package needs revision 4",
        "pip install --force-reinstall flashverify",
        "./bazelw build //python:wheel",
        *words,
    ):
        assert word in message, (word, message)


def assert_imports(done: subprocess.CompletedProcess[str], site: Site) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(site.library)


def test_the_right_files_pass(site: Site) -> None:
    assert_imports(site.run(REPORT), site)


@pytest.mark.parametrize(("revision", "age"), [(3, "older"), (5, "newer")])
def test_another_revision(site: Site, revision: int, age: str) -> None:
    site.replace(LIBRARY, variant(f"revision_{revision}"))
    found = f"Precision revision found: {revision}"
    assert_refused(site.run(IMPORT), site.library, age, found)


def test_another_build_of_the_library(site: Site) -> None:
    site.replace(LIBRARY, variant("other_build"))
    build_id = flashverify.native_info()["build_id"]
    assert_refused(site.run(IMPORT), site.library, OTHER_BUILD_ID, build_id)


def test_another_build_of_the_extension(site: Site) -> None:
    site.replace(EXTENSION, variant("other_extension", EXTENSION))
    build_id = flashverify.native_info()["build_id"]
    assert_refused(site.run(IMPORT), site.extension, OTHER_BUILD_ID, build_id)


def test_another_build_of_both(site: Site) -> None:
    """They agree with each other: then they are a build of the package like any other."""
    site.replace(LIBRARY, variant("other_build"))
    site.replace(EXTENSION, variant("other_extension", EXTENSION))
    assert_imports(site.run(REPORT), site)


def test_copied_over_in_place(site: Site) -> None:
    """The path and the inode stay; the contents are another build's."""
    with site.library.open("r+b") as file:
        file.truncate(0)
        file.write(variant("other_build").read_bytes())
    assert_refused(site.run(IMPORT), site.library, OTHER_BUILD_ID)


def test_no_export(site: Site) -> None:
    site.replace(LIBRARY, variant("no_export"))
    assert_refused(site.run(IMPORT), site.library, "exports no fv_get_api")


@pytest.mark.parametrize(
    ("impostor", "words"),
    [
        ("impostor_other_abi", ("ABI version 2", "accepted: ABI version 1")),
        ("impostor_short_table", ("a table of 8 bytes",)),
        ("impostor_no_table", ("returns no table",)),
    ],
)
def test_a_foreign_library_with_the_symbol(
    site: Site, impostor: str, words: tuple[str, ...]
) -> None:
    site.replace(LIBRARY, variant(impostor))
    assert_refused(site.run(IMPORT), site.library, *words)


def test_a_foreign_library(site: Site) -> None:
    site.replace(LIBRARY, PACKAGE / LIBTBB)
    assert_refused(site.run(IMPORT), site.library, "exports no fv_get_api")


@pytest.mark.parametrize("name", [LIBRARY, EXTENSION, LIBTBB])
def test_missing(site: Site, name: str) -> None:
    (site.package / name).unlink()
    assert_refused(site.run(IMPORT), site.package / name, "no such file")


@pytest.mark.parametrize("name", [LIBRARY, EXTENSION, LIBTBB])
def test_a_dangling_link(site: Site, name: str) -> None:
    (site.package / name).unlink()
    (site.package / name).symlink_to("nowhere.so")
    assert_refused(site.run(IMPORT), site.package / name, "No such file")


@pytest.mark.parametrize("name", [LIBRARY, EXTENSION])
def test_a_directory(site: Site, name: str) -> None:
    (site.package / name).unlink()
    (site.package / name).mkdir()
    assert_refused(site.run(IMPORT), site.package / name, "not a regular file")


def test_a_named_pipe(site: Site) -> None:
    """Opening one would wait for a writer for ever."""
    site.library.unlink()
    os.mkfifo(site.library)
    assert_refused(site.run(IMPORT), site.library, "not a regular file")


@pytest.mark.parametrize("name", [LIBRARY, EXTENSION])
@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "the file is empty"),
        (b"#!/bin/sh\nexit 0\n", "not an ELF file"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 100, "not an ELF file"),
        (b"\x7fEL", "truncated"),
        (b"\x7fELF" + bytes(60), "ELF class 0"),
        (b"\x7fELF\x02\x01\x01" + bytes(200), "ELF type 0"),
    ],
)
def test_not_a_library(site: Site, name: str, contents: bytes, words: str) -> None:
    (site.package / name).write_bytes(contents)
    assert_refused(site.run(IMPORT), site.package / name, words)


@pytest.mark.parametrize("name", [LIBRARY, EXTENSION, LIBTBB])
@pytest.mark.parametrize("length", LENGTHS)
def test_truncated(site: Site, name: str, length: float) -> None:
    """No length may end in SIGBUS, which the exit status would show."""
    path = site.package / name
    size = path.stat().st_size
    if isinstance(length, float):
        length = int(size * length)
    os.truncate(path, length if length > 0 else size + length)
    assert_refused(site.run(IMPORT), path, "truncated")


def test_another_machine(site: Site) -> None:
    with site.library.open("r+b") as file:
        file.seek(18)  # e_machine
        file.write(struct.pack("<H", 243))
    assert_refused(site.run(IMPORT), site.library, "ELF machine 243")


def test_unreadable(site: Site) -> None:
    site.library.chmod(0)
    # Root reads everything, unless it lays its capabilities down.
    lay_down = (
        "import ctypes; libc = ctypes.CDLL(None);"
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0); none = (ctypes.c_uint32 * 6)();"
        "assert libc.capset(header, none) == 0;"
    )
    assert_refused(site.run(lay_down + IMPORT), site.library, "Permission denied")


def test_an_older_library_on_the_search_path(site: Site, tmp_path: Path) -> None:
    """LD_LIBRARY_PATH goes before a RUNPATH, and still decides nothing here."""
    older = elsewhere(tmp_path / "older", variant("revision_3"))
    assert_imports(site.run(REPORT, LD_LIBRARY_PATH=str(older.parent)), site)


@pytest.mark.parametrize(
    ("name", "words"),
    [("revision_3", "precision revision 3"), ("other_build", OTHER_BUILD_ID)],
)
def test_a_preloaded_library(site: Site, tmp_path: Path, name: str, words: str) -> None:
    preloaded = elsewhere(tmp_path / "preloaded", variant(name))
    done = site.run(IMPORT, LD_PRELOAD=str(preloaded))
    assert_refused(done, site.extension, str(preloaded), str(site.library), words)


@pytest.mark.parametrize(
    ("name", "words"),
    [("revision_3", "precision revision 3"), ("other_build", OTHER_BUILD_ID)],
)
def test_a_library_of_the_same_soname_already_loaded(
    site: Site, tmp_path: Path, name: str, words: str
) -> None:
    loaded = elsewhere(tmp_path / "loaded", variant(name))
    done = site.run(f"import ctypes; ctypes.CDLL({str(loaded)!r}); {IMPORT}")
    assert_refused(done, site.extension, str(loaded), str(site.library), words)


def test_a_copy_of_the_right_library_already_loaded(site: Site, tmp_path: Path) -> None:
    """Even the same bytes: the file in use must be the file that was checked."""
    copy = elsewhere(tmp_path / "copy", site.library)
    done = site.run(f"import ctypes; ctypes.CDLL({str(copy)!r}); {IMPORT}")
    assert_refused(done, site.library, "bound to another library", str(copy))


def test_the_right_library_already_loaded(site: Site) -> None:
    done = site.run(f"import ctypes; ctypes.CDLL({str(site.library)!r}); {REPORT}")
    assert_imports(done, site)


def test_another_revision_of_the_package(site: Site) -> None:
    precision = site.package / "precision.py"
    source = precision.read_text()
    assert source.count("PRECISION_REVISION: Final = 4") == 1
    precision.write_text(source.replace("PRECISION_REVISION: Final = 4", "PRECISION_REVISION = 5"))
    done = site.run(IMPORT)
    assert done.returncode == 1
    assert "libflashverify.so.5: no such file" in done.stderr

    site.library.rename(site.package / "libflashverify.so.5")
    done = site.run(IMPORT)
    assert done.returncode == 1
    assert "found: 4; this package needs revision 5" in done.stderr


def test_a_stray_extension_of_another_name(site: Site) -> None:
    """Python alone would prefer it to the abi3 one."""
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-x86_64-linux-gnu"
    (site.package / f"_native.{tag}.so").write_text("not a library")
    assert_imports(site.run(REPORT), site)


def test_no_nanobind_backend(site: Site) -> None:
    done = site.run(IMPORT, "-S", rest_of_path=False)
    assert_refused(done, site.extension, "nanobind-backend")


def test_a_refusal_stays_one(site: Site) -> None:
    """A second attempt, and a submodule by its own name, answer the same."""
    site.replace(LIBRARY, variant("revision_3"))
    attempt = (
        "try:\n"
        "    import {0}\n"
        "except ImportError as error:\n"
        "    assert type(error).__name__ == 'StaleNativeLibraryError', type(error)\n"
        "    assert error.name == 'flashverify._native', error.name\n"
        "    assert error.path.endswith('libflashverify.so.4'), error.path\n"
        "else:\n"
        "    raise AssertionError('{0} was imported')\n"
    )
    names = ("flashverify", "flashverify", "flashverify.attention", "flashverify._native")
    done = site.run("".join(attempt.format(name) for name in names))
    assert done.returncode == 0, done.stderr


def test_digests_are_of_the_files_that_were_loaded(site: Site) -> None:
    code = (
        "import os, pathlib, shutil, flashverify as fv\n"
        "library = pathlib.Path(fv.native_info()['library_path'])\n"
        "shutil.copy(library, 'copy'); os.replace('copy', library)\n"
        "fv.native_info()\n"
    )
    assert_refused(site.run(code), site.library, "replaced since this process loaded it")
