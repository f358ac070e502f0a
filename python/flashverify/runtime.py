"""How calls run: CPU threads and instruction set, and the device code on CUDA.

None is ever read from the environment. The number of threads changes no bit of a
result. The instruction set and the device code do change bits: those used are
the best that the CPU and the device have, and `cpu_isa_override` and
`cuda_image_override` exist to compare them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from flashverify import _native
from flashverify.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError

MAX_THREADS: Final = 1024

_ISA_CODES: Final[dict[str, int]] = _native.cpu_isa_codes()
_ISA_NAMES: Final = {code: name for name, code in _ISA_CODES.items()}
_AUTO: Final = 0

_num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
_isa: Final[ContextVar[int]] = ContextVar("flashverify_cpu_isa", default=_AUTO)
_image: Final[ContextVar[str | None]] = ContextVar("flashverify_cuda_image", default=None)


def set_num_threads(num_threads: int) -> None:
    """Sets how many CPU threads a call of this process may use, its own included.

    Raises:
      InvalidArgumentError: Not an int.
      OutOfRangeError: Outside 1..1024.
    """
    global _num_threads
    if not isinstance(num_threads, int) or isinstance(num_threads, bool):
        raise InvalidArgumentError(
            f"num_threads: {num_threads!r}; accepted: an int, 1 to {MAX_THREADS}"
        )
    if not 1 <= num_threads <= MAX_THREADS:
        raise OutOfRangeError(f"num_threads: {num_threads}; accepted: 1 to {MAX_THREADS}")
    _num_threads = num_threads


def get_num_threads() -> int:
    """CPU threads that a call may use; at first, the CPUs this process may run on."""
    return _num_threads


def cpu_isa() -> str:
    """The instruction set that calls of this context use: avx512, avx2 or portable."""
    return _ISA_NAMES[_isa.get() or _native.best_cpu_isa()]


def available_cpu_isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has, best first."""
    codes = sorted(_ISA_NAMES, reverse=True)
    return tuple(_ISA_NAMES[code] for code in codes if _native.has_cpu_isa(code))


@contextlib.contextmanager
def cpu_isa_override(isa: str) -> Iterator[None]:
    """Runs the calls inside with a named instruction set, in this thread or task alone.

    Bits are invariant within an instruction set, not between two: for tests and
    comparisons.

    Raises:
      InvalidArgumentError: Not the name of an instruction set.
      UnsupportedError: This CPU does not have it.
    """
    code = _ISA_CODES.get(isa) if isinstance(isa, str) else None
    if code is None:
        raise InvalidArgumentError(f"isa: {isa!r}; accepted: {', '.join(_ISA_CODES)}")
    if not _native.has_cpu_isa(code):
        raise UnsupportedError(
            f"isa: {isa!r}; accepted on this CPU: {', '.join(available_cpu_isas())}"
        )
    token = _isa.set(code)
    try:
        yield
    finally:
        _isa.reset(token)


@contextlib.contextmanager
def cuda_image_override(image: str) -> Iterator[None]:
    """Runs the CUDA calls inside with named device code, in this thread or task alone.

    "compute_70" runs the SM70 source, compiled by the driver, on any newer device:
    for tests and comparisons. It is never replaced: what has no such code is refused
    when it is called.

    Raises:
      InvalidArgumentError: The library holds no such code.
    """
    images = _native.cuda_images()
    if image not in images:
        raise InvalidArgumentError(f"image: {image!r}; accepted: {', '.join(images) or 'none'}")
    token = _image.set(image)
    try:
        yield
    finally:
        _image.reset(token)


def last_cuda_image() -> str | None:
    """The device code that this thread's last attention call ran; None on the CPU."""
    image: str | None = _native.last_cuda_image()
    return image


def current_cuda_image() -> str | None:
    """The device code to ask for; None leaves the choice to the library."""
    return _image.get()


def current_isa_code() -> int:
    """The fv_cpu_isa to ask for; 0 leaves the choice to the library."""
    return _isa.get()
