"""The quantising cache write."""

from __future__ import annotations

import torch

from flashverify import _native, runtime
from flashverify._arguments import (
    CACHE_AXES,
    FLOAT8_IN_DLPACK,
    Scale,
    cache_code,
    check_tensor,
    float8_bytes,
    scale_tensor,
)
from flashverify._dispatch import (
    may_differentiate,
    must_dispatch,
    refuse_autograd,
    refuse_late_graph_inputs,
)
from flashverify.workspace import check_faults, current_stream, resolve_device

_kv_codes: dict[tuple[torch.dtype, str | None], int] = {}


def append_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_dequant_scale: Scale = None,
    v_dequant_scale: Scale = None,
    kv_dtype: str | None = None,
) -> None:
    """Writes key and value rows to cache slots.

    Slot s is token s % page_size of page s // page_size; a negative slot is
    skipped. Values are divided by the dequant scale and rounded to nearest even;
    FP8 saturates, infinities included, and keeps NaN.

    Args:
      key: float32, float16 or bfloat16 [tokens, kv_heads, head_dim], last axis contiguous.
      value: As ``key``, with strides of its own.
      k_cache: [pages, page_size, kv_heads, head_dim], as `paged_attention` takes it.
      v_cache: As ``k_cache``, with strides of its own.
      slot_mapping: int64 or int32 [tokens]; no slot twice.
      k_dequant_scale: Stored key x scale = key. None (1), a number, or float32 of
        1 or kv_heads elements.
      v_dequant_scale: The same for values.
      kv_dtype: Format of a uint8 cache: "fp8_e4m3" (or "fp8") or "fp8_e5m2".

    Raises:
      InvalidArgumentError, OutOfRangeError, UnsupportedError: An argument that
        cannot be used; nothing was written. Under torch.compile before torch 2.13, a
        cache that begins late in its storage and enters the graph as such, which
        torch would write in the wrong place (within torch's own error).
    """
    if must_dispatch(key, value, k_cache):
        refuse_late_graph_inputs(k_cache, v_cache)
        # torch.compile rebuilds the views that an op writes to, and takes one of the rank and
        # strides of its base for a slice whose start it counts from the storage's beginning (2.13
        # still does): part of an input that begins late would be written in the wrong place. An
        # axis of one more keeps it from that guess.
        torch.ops.flashverify.append_kv(
            key, value, k_cache.unsqueeze(0), v_cache.unsqueeze(0), slot_mapping,
            k_dequant_scale=scale_tensor("k_dequant_scale", k_dequant_scale, key),
            v_dequant_scale=scale_tensor("v_dequant_scale", v_dequant_scale, key),
            kv_dtype=kv_dtype,
        )  # fmt: skip
        return
    append(
        key, value, k_cache, v_cache, slot_mapping, k_dequant_scale, v_dequant_scale, kv_dtype
    )  # fmt: skip


def check_append_faults(device: torch.device | str) -> None:
    """Raises for what `append_kv` calls on a CUDA device found wrong there.

    Slots in device memory are read when a call runs, and not by the host: one that the
    caches do not have is skipped, and this says so. It waits for the device.

    Raises:
      OutOfRangeError: A slot was out of range since the last check.
      InvalidArgumentError, DeviceError: No such device.
    """
    check_faults(resolve_device(device), [0])


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_dequant_scale: Scale,
    v_dequant_scale: Scale,
    kv_dtype: str | None,
) -> None:
    """`append_kv` on tensors that hold memory, past torch's dispatcher."""
    try:
        kv_code = _kv_codes.get((k_cache.dtype, kv_dtype))
        device = key.device
    except (AttributeError, TypeError):
        check_tensor("key", key, "tokens, kv_heads, head_dim")
        check_tensor("k_cache", k_cache, CACHE_AXES)
        cache_code(k_cache.dtype, kv_dtype)
        raise
    if kv_code is None:
        kv_code = cache_code(k_cache.dtype, kv_dtype)
        _kv_codes[k_cache.dtype, kv_dtype] = kv_code
    if may_differentiate(key, value, k_cache, v_cache, k_dequant_scale, v_dequant_scale):
        refuse_autograd(
            key=key, value=value, k_cache=k_cache, v_cache=v_cache,
            k_dequant_scale=k_dequant_scale, v_dequant_scale=v_dequant_scale,
        )  # fmt: skip
    k_bytes, v_bytes = k_cache, v_cache
    if not FLOAT8_IN_DLPACK:
        k_bytes, v_bytes = float8_bytes(k_cache, v_cache)
    _native.append_kv(
        key, value, k_bytes, v_bytes, slot_mapping, k_dequant_scale, v_dequant_scale, kv_code,
        runtime.get_num_threads(), current_stream(device), runtime.current_cuda_image(),
    )  # fmt: skip
    # The write went past torch: autograd must still see that the caches changed.
    torch.autograd.graph.increment_version((k_cache, v_cache))
