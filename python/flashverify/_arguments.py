"""Checks of what only Python can know about an argument: its type.

Shapes, strides and values are the native library's to check. What is checked
here is what would not reach it, or would reach it as something else: a bool for
an int, a list for a tensor, a format that a byte cache does not name.
"""

from __future__ import annotations

import numbers
from typing import Final, NoReturn

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from flashverify import _native
from flashverify.dtypes import KV_CACHE_DTYPES, dtype_name, native_dtype, storage_kv_dtype
from flashverify.errors import InvalidArgumentError, OutOfRangeError

Scale = torch.Tensor | float | None
"""A dequantisation scale, as the functions take it."""

CACHE_AXES: Final = "pages, page_size, kv_heads, head_dim"
_MAX_INT64: Final = 2**63 - 1
_MOST_LETTERS: Final = 200
_KV_DTYPES: Final = ("fp8", *KV_CACHE_DTYPES)
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def _float8_in_dlpack() -> bool:
    """Whether this torch exports FP8 tensors through DLPack: 2.6 does not, 2.13 does."""
    try:
        to_dlpack(torch.empty(0, dtype=torch.float8_e4m3fn))
    except (BufferError, RuntimeError):
        return False
    return True


# Not __dlpack__(), which takes 2 us a tensor; this takes 0.2 us, and every torch has it.
_native.use_torch(torch.Tensor, to_dlpack)

FLOAT8_IN_DLPACK: Final = _float8_in_dlpack()


def refuse(argument: str, found: object, accepted: str) -> NoReturn:
    # On one line, and not much of it: a tensor in the place of a number shows all it holds.
    shown = " ".join(str(found).split())
    if len(shown) > _MOST_LETTERS:
        shown = shown[:_MOST_LETTERS] + "..."
    raise InvalidArgumentError(f"{argument}: {shown}; accepted: {accepted}")


def check_tensor(argument: str, value: object, axes: str) -> None:
    """Refuses what is no tensor, or has another rank than the named axes."""
    if not isinstance(value, torch.Tensor):
        refuse(argument, type(value).__name__, f"a torch.Tensor [{axes}]")
    rank = axes.count(",") + 1
    if value.dim() != rank:
        refuse(argument, f"shape {list(value.shape)}", f"rank {rank} [{axes}]")


def float8_bytes(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches, or for FP8 the same memory as uint8: for a torch that cannot export FP8.

    As bytes the two formats look alike, so that of which K is of one and V of another is
    refused here; what else is wrong the native library says.
    """
    found = getattr(v_cache, "dtype", None)
    if k_cache.dtype in _FLOAT8 and found in (*_FLOAT8, torch.uint8) and found != k_cache.dtype:
        refuse(
            "v_cache",
            f"dtype {dtype_name(found)}",
            f"the dtype of k_cache, {dtype_name(k_cache.dtype)}",
        )
    return _as_bytes(k_cache), _as_bytes(v_cache)


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    is_float8 = isinstance(cache, torch.Tensor) and cache.dtype in _FLOAT8
    return cache.view(torch.uint8) if is_float8 else cache


def check_bool(argument: str, value: object) -> None:
    if value is not True and value is not False:
        refuse(argument, repr(value), "True or False")


def check_count(argument: str, value: object, least: int) -> None:
    """Refuses what is no int, less than ``least``, or beyond 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_INT64:
        refuse(argument, repr(value)[:80], f"an int, {least} or more, up to 2^63 - 1")


def real_number(argument: str, value: object) -> float:
    """The value as a float; a bool, a string or a tensor is no number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(argument, repr(value), "a number")
    try:
        return float(value)
    except OverflowError:
        refuse(argument, repr(value), "a float32 value")


def cache_code(storage: torch.dtype, kv_dtype: object) -> int:
    """The fv_dtype of a cache tensor, whose format ``kv_dtype`` names or repeats.

    Raises:
      InvalidArgumentError: No such name, or one that contradicts the tensor.
      UnsupportedError: A tensor of a dtype that nothing here computes.
    """
    if kv_dtype is not None and kv_dtype not in _KV_DTYPES:
        refuse("kv_dtype", repr(kv_dtype), f"None, {', '.join(_KV_DTYPES)}")
    return int(native_dtype(storage_kv_dtype(storage, kv_dtype)))


def window_code(window: object) -> int:
    """The library's form of a window: 0 for none."""
    if window is None:
        return 0
    if not isinstance(window, int) or isinstance(window, bool):
        refuse("window", repr(window), "None, or an int of 1 or more keys")
    if not 1 <= window <= _MAX_INT64:
        raise OutOfRangeError(f"window: {window}; accepted: 1 to {_MAX_INT64} keys, or None")
    return window


def scale_tensor(argument: str, value: object, like: torch.Tensor) -> torch.Tensor | None:
    """A dequantisation scale as the registered ops take it: None or a tensor."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return torch.full((1,), real_number(argument, value), dtype=torch.float32, device=like.device)
