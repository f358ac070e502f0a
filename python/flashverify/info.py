"""What runs here: versions, files, instruction set and device images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from flashverify import runtime
from flashverify.errors import DeviceError, FlashVerifyError
from flashverify.precision import load_native


class NativeInfo(TypedDict):
    """The native side of this process."""

    precision_revision: int
    abi_version: int
    build_id: str
    library_path: str
    library_sha256: str
    extension_path: str
    extension_sha256: str
    cpu_isa: str
    cuda_images: list[str]


class CudaDevice(TypedDict):
    """One CUDA device, and the device code that it would run; None: none fits."""

    index: int
    name: str
    capability: tuple[int, int]
    image: str | None


def native_info() -> NativeInfo:
    """The revision, the build and the digests of the native files in use.

    Digests are of the files on disk, and only where these are still the ones that
    this process loaded.

    Raises:
      StaleNativeLibraryError: A file was replaced since it was loaded.
    """
    files = load_native()
    return NativeInfo(
        precision_revision=files.module.PRECISION_REVISION,
        abi_version=files.module.ABI_VERSION,
        build_id=files.module.BUILD_ID,
        library_path=str(files.library.path),
        library_sha256=files.library.sha256(),
        extension_path=str(files.extension.path),
        extension_sha256=files.extension.sha256(),
        cpu_isa=runtime.cpu_isa(),
        cuda_images=files.module.cuda_images(),
    )


def cuda_devices() -> list[CudaDevice] | str:
    """The CUDA devices of this machine, or in words why there are none.

    Raises:
      StaleNativeLibraryError: A native file was replaced since it was loaded.
    """
    native: Any = load_native().module
    try:
        return [native.cuda_device(index) for index in range(native.cuda_device_count())]
    except DeviceError as error:
        return str(error)


def include_dir() -> Path:
    """The folder to compile C and C++ clients with: it holds flashverify/flashverify.h.

    Raises:
      FlashVerifyError: This copy of the package does not ship it.
    """
    return _shipped("include", "flashverify/flashverify.h")


def cmake_dir() -> Path:
    """The folder of the CMake package, for CMAKE_PREFIX_PATH or flashverify_DIR.

    Raises:
      FlashVerifyError: This copy of the package does not ship it.
    """
    return _shipped("cmake", "flashverifyConfig.cmake", "flashverify-config.cmake")


def library_file() -> Path:
    """The native library, to link C and C++ clients with."""
    return load_native().library.path


def _shipped(folder: str, *any_of: str) -> Path:
    found = Path(__file__).parent / folder
    if any((found / name).is_file() for name in any_of):
        return found
    raise FlashVerifyError(
        f"{found}: has no {any_of[0]}; accepted: a flashverify installed from its wheel"
    )
