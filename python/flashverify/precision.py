"""The precision revision, and the gate that the native files must pass.

`PRECISION_REVISION` names the arithmetic contract (docs/numerics.md); it changes
whenever any stored or returned bit may change. Three things carry it, and must
agree before anything runs: this module, the library ``libflashverify.so.4`` and
the extension ``_native``. The gate has no bypass and no fallback: what it finds
wrong is a `StaleNativeLibraryError`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

from flashverify._elf import shared_object_fault
from flashverify.errors import StaleNativeLibraryError

PRECISION_REVISION: Final = 4
ABI_VERSION: Final = 1

LIBRARY_NAME: Final = f"libflashverify.so.{PRECISION_REVISION}"
EXTENSION_NAME: Final = "_native.abi3.so"
THREADS_NAME: Final = "libtbb.so.12"  # what the library loads from its own folder
_MODULE_NAME: Final = "flashverify._native"
_REPAIR: Final = (
    "To repair, run `pip install --force-reinstall flashverify`; in a source tree, rebuild with "
    "`./bazelw build //python:wheel` and install the wheel."
)


class _ApiHead(ctypes.Structure):
    """The fields of ``fv_api`` that never move."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("precision_revision", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("build_id", ctypes.c_char_p),
    )


@dataclass(frozen=True)
class FileIdentity:
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """The identity of the file that is there now."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class NativeFile:
    """A native file that passed the gate, as it was then."""

    path: Path
    identity: FileIdentity

    @classmethod
    def at(cls, path: Path) -> NativeFile:
        """The file that is there now."""
        return cls(path, FileIdentity.of(path))

    def sha256(self) -> str:
        """Digest of the file in use.

        Raises:
          StaleNativeLibraryError: The file on disk is no longer the one loaded.
        """
        try:
            unchanged = FileIdentity.of(self.path) == self.identity
        except OSError:
            unchanged = False
        if not unchanged:
            _refuse(self.path, "replaced since this process loaded it; restart the process")
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def _refuse(path: Path, fault: str, found_revision: int | None = None) -> NoReturn:
    found = "unknown" if found_revision is None else str(found_revision)
    raise StaleNativeLibraryError(
        f"{path}: {fault}. Precision revision found: {found}; this package needs revision "
        f"{PRECISION_REVISION}. {_REPAIR}",
        name=_MODULE_NAME,
        path=str(path),
    )


def _check_file(path: Path) -> NativeFile:
    if not os.path.lexists(path):
        _refuse(path, "no such file")
    fault = shared_object_fault(path)
    if fault is not None:
        _refuse(path, fault)
    return NativeFile.at(path)


def _check_library(path: Path) -> str:
    """Loads the library and checks the head of its table. Returns its build id."""
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        _refuse(path, f"the dynamic loader refuses it ({error})")
    try:
        get_api = library.fv_get_api
    except AttributeError:
        _refuse(path, "not a flashverify library: it exports no fv_get_api")
    get_api.restype = ctypes.POINTER(_ApiHead)
    get_api.argtypes = ()
    table = get_api()
    if not table:
        _refuse(path, "its fv_get_api returns no table")
    head = table.contents
    revision = int(head.precision_revision)
    if revision != PRECISION_REVISION:
        age = "older" if revision < PRECISION_REVISION else "newer"
        _refuse(path, f"{age} than this package", revision)
    # The build id is a pointer: it is followed only where the layout is known.
    if head.abi_version != ABI_VERSION or head.struct_size < ctypes.sizeof(_ApiHead):
        _refuse(
            path,
            f"ABI version {head.abi_version} with a table of {head.struct_size} bytes; accepted: "
            f"ABI version {ABI_VERSION}",
            revision,
        )
    return bytes(head.build_id or b"").decode("ascii", "replace")


def _import_extension(extension: Path, library: Path, build_id: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, extension)
    if spec is None or spec.loader is None:
        _refuse(extension, "not an extension module of this Python")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        # The extension's own check, the dynamic loader, or a missing
        # nanobind-backend: each says in its own words what is wrong.
        fault = f"cannot be imported beside {library} (build id {build_id}): {error}"
        _refuse(extension, fault, PRECISION_REVISION)
    return module


@dataclass(frozen=True)
class NativeFiles:
    """The extension module, and the two files that passed the gate."""

    module: ModuleType
    library: NativeFile
    extension: NativeFile


@functools.cache
def load_native() -> NativeFiles:
    """Checks and loads the native library and the extension beside this module.

    In this order: the files are whole shared objects of this machine; the
    library's table carries this revision and ABI version; the extension, loaded
    from its very path, finds the build that it was compiled with; and the file
    that the dynamic loader bound it to is the one that was checked, whatever
    LD_LIBRARY_PATH, LD_PRELOAD or an earlier dlopen offered.

    Raises:
      StaleNativeLibraryError: Anything else was found. The message names both
        revisions, the path, and the command that repairs it.
    """
    folder = Path(__file__).parent
    library = _check_file(folder / LIBRARY_NAME)
    _check_file(folder / THREADS_NAME)
    extension = _check_file(folder / EXTENSION_NAME)
    build_id = _check_library(library.path)
    module = _import_extension(extension.path, library.path, build_id)

    bound = Path(module.library_path())
    if not bound.exists() or not bound.samefile(library.path):
        _refuse(
            library.path,
            f"the extension is bound to another library, {bound}, which LD_PRELOAD or an earlier "
            "load put before it",
        )
    compiled = (module.PRECISION_REVISION, module.ABI_VERSION, module.BUILD_ID)
    if compiled != (PRECISION_REVISION, ABI_VERSION, build_id):
        _refuse(
            extension.path,
            f"precision revision {compiled[0]}, ABI version {compiled[1]}, build id "
            f"{compiled[2]}; the library beside it has {PRECISION_REVISION}, {ABI_VERSION}, "
            f"{build_id}",
            int(compiled[0]),
        )
    # What `from flashverify import _native` finds from now on.
    sys.modules[_MODULE_NAME] = module
    vars(sys.modules["flashverify"])["_native"] = module
    return NativeFiles(module, library, extension)
