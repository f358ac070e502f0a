"""Cache dtypes and scales: one place, one meaning in every layer.

``fp8`` is E4M3 on every device. Nothing else in the package gives a dtype name
a meaning of its own.

Scale rules:

* A scale is a *dequant* scale: stored code x scale = value. The cache write
  divides by it, attention multiplies by it in FP32.
* Scales are static. They come from the caller or the checkpoint and never from
  the data of a running request, or a token's bytes would depend on its
  neighbours in the batch.
* A scale is per tensor (1 element) or per KV head (kv_heads elements), FP32,
  finite and greater than 0.
* A checkpoint without scales gets 1.0 for both. Half a pair is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final, Literal

import torch

from flashverify.errors import InvalidArgumentError, UnsupportedError

KVCacheDtype = Literal["fp8_e4m3", "fp8_e5m2", "float16", "bfloat16"]

KV_CACHE_DTYPES: Final[tuple[KVCacheDtype, ...]] = ("fp8_e4m3", "fp8_e5m2", "float16", "bfloat16")
QUERY_DTYPES: Final = ("float32", "float16", "bfloat16")
DEVICE_TYPES: Final = ("cpu", "cuda")


class NativeDtype(IntEnum):
    """The codes of ``fv_dtype`` in flashverify/flashverify.h."""

    NONE = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT8_E4M3 = 4
    FLOAT8_E5M2 = 5
    INT32 = 6
    INT64 = 7


_TORCH_OF_CACHE: Final[Mapping[KVCacheDtype, torch.dtype]] = MappingProxyType(
    {
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    }
)
_CACHE_OF_TORCH: Final[Mapping[torch.dtype, KVCacheDtype]] = MappingProxyType(
    {dtype: name for name, dtype in _TORCH_OF_CACHE.items()}
)
_NATIVE_OF_TORCH: Final[Mapping[torch.dtype, NativeDtype]] = MappingProxyType(
    {
        torch.float32: NativeDtype.FLOAT32,
        torch.float16: NativeDtype.FLOAT16,
        torch.bfloat16: NativeDtype.BFLOAT16,
        torch.float8_e4m3fn: NativeDtype.FLOAT8_E4M3,
        torch.float8_e5m2: NativeDtype.FLOAT8_E5M2,
        torch.int32: NativeDtype.INT32,
        torch.int64: NativeDtype.INT64,
    }
)

_ACCEPTED: Final = "accepted: fp8 (= fp8_e4m3), fp8_e4m3, fp8_e5m2, float16, bfloat16, auto"

# Names that engines use, and why they are not taken for one of ours.
_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "half": "the name here is float16",
        "fp16": "the name here is float16",
        "bf16": "the name here is bfloat16",
        "e4m3": "the name here is fp8_e4m3",
        "e5m2": "the name here is fp8_e5m2",
        "float8_e4m3fn": "the name here is fp8_e4m3",
        "float8_e5m2": "the name here is fp8_e5m2",
        "uint8": "bytes have no format of their own: name fp8_e4m3 or fp8_e5m2",
        "float32": "no kernel reads a 32-bit cache: name float16 or bfloat16",
        "float8_e4m3fnuz": "its exponent bias and its NaN differ from float8_e4m3fn's",
        "float8_e5m2fnuz": "its exponent bias and its NaN differ from float8_e5m2's",
        "int8": "integer caches are not computed here",
        "fp8_inc": "its scales are dynamic, and scales are static here",
        "fp8_per_token_head": "scales are per tensor or per KV head here, never per token",
        "fp8_ds_mla": "latent (MLA) caches are not computed here",
        "nvfp4": "4-bit caches are not computed here",
    }
)


def dtype_name(dtype: str | torch.dtype) -> str:
    """The name of a dtype without its module: ``torch.float16`` -> ``"float16"``."""
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")


def resolve_kv_cache_dtype(
    dtype: str | torch.dtype,
    *,
    device: str | torch.device | None = None,
    model_dtype: str | torch.dtype | None = None,
) -> KVCacheDtype:
    """Resolves what a user wrote into the format of the bytes in the cache.

    Args:
      dtype: ``"fp8"`` (E4M3 everywhere, SM70 included), ``"fp8_e4m3"``,
        ``"fp8_e5m2"``, ``"float16"``, ``"bfloat16"``, ``"auto"`` (the model's
        dtype), or the torch dtype of the cache.
      device: Where the cache will lie. It never changes the answer; a kind of
        device that has no kernels is refused.
      model_dtype: The dtype of the model's activations; read for ``"auto"`` only.

    Raises:
      InvalidArgumentError: ``"auto"`` without ``model_dtype``, or no dtype at all.
      UnsupportedError: A dtype or device that nothing here computes.
    """
    if device is not None and str(device).split(":")[0] not in DEVICE_TYPES:
        raise UnsupportedError(f"device: {device}; accepted: cpu, cuda")
    if isinstance(dtype, torch.dtype):
        if dtype in _CACHE_OF_TORCH:
            return _CACHE_OF_TORCH[dtype]
        raise _refusal("kv_cache_dtype", dtype_name(dtype))
    if not isinstance(dtype, str):
        raise InvalidArgumentError(
            f"kv_cache_dtype: {dtype!r} is neither a name nor a torch dtype; {_ACCEPTED}"
        )
    if dtype == "fp8":
        return "fp8_e4m3"
    if dtype in KV_CACHE_DTYPES:
        return dtype
    if dtype == "auto":
        return _follow_model(model_dtype)
    raise _refusal("kv_cache_dtype", dtype)


def _follow_model(model_dtype: str | torch.dtype | None) -> KVCacheDtype:
    if model_dtype is None:
        raise InvalidArgumentError(
            "model_dtype: None, and kv_cache_dtype 'auto' follows it; accepted: float16, bfloat16"
        )
    name = dtype_name(model_dtype)
    if name == "float16":
        return "float16"
    if name == "bfloat16":
        return "bfloat16"
    raise UnsupportedError(
        f"model_dtype: {name!r}, and kv_cache_dtype 'auto' follows it; accepted: float16, "
        "bfloat16; for any other model name the cache dtype"
    )


def _refusal(argument: str, name: str) -> UnsupportedError:
    why = _REFUSED.get(name.lower())
    found = f"{name!r} ({why})" if why else repr(name)
    return UnsupportedError(f"{argument}: {found}; {_ACCEPTED}")


def storage_kv_dtype(
    storage: torch.dtype, kv_dtype: str | None = None, *, argument: str = "k_cache"
) -> KVCacheDtype:
    """The format of a cache tensor's bytes.

    Args:
      storage: The tensor's torch dtype; ``uint8`` holds FP8 bytes of either format.
      kv_dtype: The format's name. Needed with ``uint8``; elsewhere it may only
        repeat what the tensor's dtype says.
      argument: The tensor's name in error messages.

    Raises:
      InvalidArgumentError: ``uint8`` without a format, or a format that
        contradicts the tensor's dtype.
      UnsupportedError: A dtype that nothing here computes.
    """
    if storage == torch.uint8:
        if kv_dtype is None:
            raise InvalidArgumentError(
                f"kv_dtype: None, and {argument} is uint8; accepted: fp8_e4m3, fp8_e5m2"
            )
        named = resolve_kv_cache_dtype(kv_dtype)
        if named not in ("fp8_e4m3", "fp8_e5m2"):
            raise InvalidArgumentError(
                f"kv_dtype: {kv_dtype!r}, and {argument} is uint8; accepted: fp8_e4m3, fp8_e5m2"
            )
        return named
    found = _CACHE_OF_TORCH.get(storage)
    if found is None:
        raise _refusal(f"{argument}.dtype", dtype_name(storage))
    if kv_dtype is not None and resolve_kv_cache_dtype(kv_dtype) != found:
        raise InvalidArgumentError(
            f"kv_dtype: {kv_dtype!r}, and {argument} is {dtype_name(storage)}; accepted: {found}, "
            "or None"
        )
    return found


def torch_dtype(kv_cache_dtype: KVCacheDtype) -> torch.dtype:
    """The torch dtype that holds a resolved cache dtype."""
    return _TORCH_OF_CACHE[kv_cache_dtype]


def native_dtype(dtype: KVCacheDtype | torch.dtype) -> NativeDtype:
    """The ``fv_dtype`` code of a resolved cache dtype or of a torch dtype.

    Raises:
      UnsupportedError: The native library has no code for it. ``uint8`` is among
        those: its format is the caller's to name (`storage_kv_dtype`).
    """
    key = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
    code = _NATIVE_OF_TORCH.get(key)
    if code is None:
        names = ", ".join(dtype_name(known) for known in _NATIVE_OF_TORCH)
        raise UnsupportedError(f"dtype: {dtype_name(dtype)!r}; accepted: {names}")
    return code


@dataclass(frozen=True)
class KVScales:
    """The dequant scales of one layer: float32, 1 or kv_heads elements each."""

    k: torch.Tensor
    v: torch.Tensor
    reasons: tuple[str, ...]


# Where published checkpoints keep a layer's scales, below the attention module.
_SCALE_PLACES: Final = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
)
_SHARED_SCALE: Final = "kv_scale"


def kv_scales_from_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    *,
    kv_cache_dtype: KVCacheDtype,
    kv_heads: int,
    heads: range | None = None,
    device: str | torch.device = "cpu",
) -> KVScales:
    """Reads a layer's static scales from a checkpoint's tensors.

    Args:
      tensors: The checkpoint, by tensor name.
      prefix: The attention module, such as ``"model.layers.0.self_attn"``. Read
        below it: ``k_scale`` and ``v_scale``, there or under ``attn``, or under
        ``k_proj`` and ``v_proj``; or one ``kv_scale`` for both.
      kv_cache_dtype: The resolved dtype of the cache. A 16-bit cache stores
        values as they are, so its scales are 1.0 whatever the checkpoint holds.
      kv_heads: KV heads of the whole model.
      heads: The KV heads of this tensor-parallel rank; None is all of them.
      device: Where the scales are to lie.

    Returns:
      The scales, and in words where they come from. Without any in the
      checkpoint they are 1.0.

    Raises:
      InvalidArgumentError: Half a pair, two places at once, a wrong number of
        elements, or a value that is not finite and greater than 0.
    """
    if heads is not None and (heads.step != 1 or not 0 <= heads.start < heads.stop <= kv_heads):
        raise InvalidArgumentError(f"heads: {heads}; accepted: a range within 0..{kv_heads}")
    pairs = [(f"{prefix}.{k}", f"{prefix}.{v}") for k, v in _SCALE_PLACES]
    shared = f"{prefix}.{_SHARED_SCALE}"
    pairs.append((shared, shared))
    found = [pair for pair in pairs if pair[0] in tensors or pair[1] in tensors]
    if kv_cache_dtype in ("float16", "bfloat16"):
        unused = (
            f"; the checkpoint's {found[0][0]} is for an FP8 cache, and unused" if found else ""
        )
        return _unit_scales(device, f"a {kv_cache_dtype} cache stores values unscaled{unused}")
    if not found:
        return _unit_scales(device, f"no scales below {prefix} in the checkpoint: 1.0")
    if len(found) > 1:
        raise InvalidArgumentError(
            f"{found[0][0]}: in the checkpoint beside {found[1][0]}; accepted: one of them"
        )
    for name, other in (found[0], found[0][::-1]):
        if name not in tensors:
            raise InvalidArgumentError(
                f"{name}: missing beside {other}; accepted: both scales, or neither"
            )
    k_name, v_name = found[0]
    return KVScales(
        k=_checkpoint_scale(k_name, tensors[k_name], kv_heads, heads, device),
        v=_checkpoint_scale(v_name, tensors[v_name], kv_heads, heads, device),
        reasons=(f"static scales of the checkpoint: {k_name}, {v_name}",),
    )


def _unit_scales(device: str | torch.device, reason: str) -> KVScales:
    one = torch.ones(1, dtype=torch.float32, device=device)
    return KVScales(k=one, v=one.clone(), reasons=(reason,))


def _checkpoint_scale(
    name: str,
    value: torch.Tensor,
    kv_heads: int,
    heads: range | None,
    device: str | torch.device,
) -> torch.Tensor:
    if not value.dtype.is_floating_point:
        raise InvalidArgumentError(
            f"{name}: dtype {dtype_name(value.dtype)}; accepted: a floating-point dtype"
        )
    scale = value.detach().reshape(-1).to(device="cpu", dtype=torch.float32)
    if scale.numel() not in (1, kv_heads):
        raise InvalidArgumentError(
            f"{name}: {scale.numel()} elements; accepted: 1 (per tensor) or "
            f"{kv_heads} (per KV head)"
        )
    bad = ~(scale.isfinite() & (scale > 0))
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        raise InvalidArgumentError(
            f"{name}: {scale[index].item()} at {index}; accepted: finite and greater than 0"
        )
    if heads is not None and scale.numel() > 1:
        scale = scale[heads.start : heads.stop]
    return scale.clone().to(device)
