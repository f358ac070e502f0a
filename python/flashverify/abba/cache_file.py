"""Reading and writing cache files: real Q, K, V and scales of one attention layer.

docs/cache_file_format.md describes the format.
"""

import dataclasses
import hashlib
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save

from flashverify.abba.case import Case, available_memory_bytes, format_bytes
from flashverify.abba.outcome import UsageError

FORMAT = "flashverify-cache"
VERSION = "1"

KV_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

_NAMES = ("q", "k", "v", "k_dequant_scale", "v_dequant_scale")


@dataclasses.dataclass(frozen=True)
class CacheFile:
    """One request's last ``q_len`` queries and all its keys and values.

    ``q`` is [q_len, q_heads, head_dim] float16; ``k`` and ``v`` are
    [context, kv_heads, head_dim] of one of KV_DTYPES; the scales are float32 of 1 or
    kv_heads elements; ``softmax_scale`` multiplies the scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_dequant_scale: torch.Tensor
    v_dequant_scale: torch.Tensor
    softmax_scale: float
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sha256: str = ""

    @property
    def kv_dtype(self) -> str:
        """Name of the storage type of ``k`` and ``v``."""
        return next(name for name, dtype in KV_DTYPES.items() if dtype == self.k.dtype)

    def case(self, page_size: int) -> Case:
        """The experiment that this file is, on pages of ``page_size`` tokens."""
        context, kv_heads, head_dim = self.k.shape
        return Case(
            context=context,
            q_len=self.q.shape[0],
            q_heads=self.q.shape[1],
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            batch=1,
            kv_dtype=self.kv_dtype,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors under their names in the file."""
        return {name: getattr(self, name) for name in _NAMES}


def write(path: Path, contents: CacheFile) -> None:
    """Writes ``contents`` after the checks that ``read`` makes; never leaves half a file."""
    metadata = {
        **contents.metadata,
        "format": FORMAT,
        "version": VERSION,
        "softmax_scale": repr(contents.softmax_scale),
    }
    _check(contents, str(path))
    data = save({n: t.contiguous() for n, t in contents.tensors().items()}, metadata=metadata)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> CacheFile:
    """Reads and checks a cache file; raises UsageError that names what is wrong with it."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"--cache: {path} is no regular file")
        size_bytes = about.st_size
        # The checks widen K or V to FP32, one at a time.
        if 5 * size_bytes > available_memory_bytes():
            raise UsageError(f"--cache: {path} ({format_bytes(size_bytes)}) does not fit memory")
        with path.open("rb") as file:
            sha256 = hashlib.sha256()
            while chunk := file.read(1 << 20):
                sha256.update(chunk)
        with safetensors.safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            found = set(opened.keys())
            missing = [name for name in _NAMES if name not in found]
            if missing:
                raise UsageError(f"{path}: tensor {missing[0]!r} is missing")
            unknown = sorted(found.difference(_NAMES))
            if unknown:
                raise UsageError(f"{path}: unknown tensor {unknown[0]!r}")
            tensors = {name: opened.get_tensor(name) for name in _NAMES}
    except OSError as error:
        raise UsageError(f"--cache: cannot read {path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise UsageError(f"--cache: {path} is not a safetensors file: {error}") from error
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(key) != expected:
            raise UsageError(
                f"{path}: metadata {key!r} is {metadata.get(key)!r}, expected {expected!r}"
            )
    try:
        softmax_scale = float(metadata["softmax_scale"])
    except (KeyError, ValueError):
        softmax_scale = math.nan
    if not (math.isfinite(softmax_scale) and softmax_scale > 0):
        raise UsageError(
            f"{path}: metadata 'softmax_scale' is {metadata.get('softmax_scale')!r}, "
            "expected a positive number"
        )
    contents = CacheFile(**tensors, softmax_scale=softmax_scale, metadata=metadata,
                         sha256=sha256.hexdigest())  # fmt: skip
    _check(contents, str(path))
    return contents


def _check(contents: CacheFile, where: str) -> None:
    q, k, v = contents.q, contents.k, contents.v

    def fail(message: str) -> None:
        raise UsageError(f"{where}: {message}")

    for name in ("q", "k", "v"):
        tensor = getattr(contents, name)
        if tensor.dim() != 3 or 0 in tensor.shape:
            fail(f"{name} has shape {list(tensor.shape)}, expected three non-zero axes")
    if q.dtype != torch.float16:
        fail(f"q is {q.dtype}, expected torch.float16")
    if k.dtype not in KV_DTYPES.values():
        fail(f"k is {k.dtype}, expected one of {', '.join(map(str, KV_DTYPES.values()))}")
    if v.dtype != k.dtype:
        fail(f"v is {v.dtype}, expected {k.dtype} as k")
    if v.shape != k.shape:
        fail(f"v has shape {list(v.shape)}, expected {list(k.shape)} as k")
    if q.shape[2] != k.shape[2]:
        fail(f"q has head_dim {q.shape[2]}, k has {k.shape[2]}")
    for name in ("q", "k", "v"):
        wide = getattr(contents, name).to(torch.float32)
        bad = int((~torch.isfinite(wide)).sum())
        if bad:
            fail(f"{name} holds {bad} NaN or infinite elements")
    for name in ("k_dequant_scale", "v_dequant_scale"):
        scale = getattr(contents, name)
        if scale.dtype != torch.float32:
            fail(f"{name} is {scale.dtype}, expected torch.float32")
        if scale.dim() != 1 or scale.numel() not in (1, k.shape[1]):
            fail(f"{name} has shape {list(scale.shape)}, expected [1] or [{k.shape[1]}]")
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            fail(f"{name} is {scale.tolist()}, expected finite positive numbers")
    try:
        contents.case(page_size=1).check()
    except UsageError as error:
        fail(str(error).replace("--", ""))
    if k.shape[0] < q.shape[0]:
        fail(f"q has {q.shape[0]} tokens, k only {k.shape[0]}: every query is also a key")
