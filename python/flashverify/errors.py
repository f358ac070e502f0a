"""Exceptions of flashverify.

One class for each status of the native library, and two of the Python layer's
own. Each message names the argument, the value found and what is accepted.
"""


class FlashVerifyError(Exception):
    """Base of every exception that flashverify raises on purpose."""


class InvalidArgumentError(FlashVerifyError, ValueError):
    """Wrong rank, shape, dtype, stride, device, type or value."""


class OutOfRangeError(FlashVerifyError, IndexError):
    """A length, page, slot or offset outside its range."""


class UnsupportedError(FlashVerifyError, ValueError):
    """Valid, but nothing here computes it."""


class WorkspaceTooSmallError(FlashVerifyError, ValueError):
    """The workspace given is smaller than the call needs, and may not grow."""


class OutOfMemoryError(FlashVerifyError, MemoryError):
    """An allocation failed."""


class DeviceError(FlashVerifyError, RuntimeError):
    """The device's driver refused; its own text is in the message."""


class InternalError(FlashVerifyError, RuntimeError):
    """A fault of flashverify itself."""


class RouteError(FlashVerifyError, RuntimeError):
    """A route other than the one planned, or other than the one required."""


class StaleNativeLibraryError(FlashVerifyError, ImportError):
    """The native library found is not the one that this package was built with."""
