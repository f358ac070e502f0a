"""The torch ops behind the functions: what torch.compile, fake tensors and modes see.

An op takes tensors and plain values only: a scale is a tensor, a route a string,
and a workspace the handle of a live one (0 is the executing thread's own).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from flashverify import attention, kv_cache, state
from flashverify._dispatch import refuse_autograd
from flashverify.workspace import workspace_of_handle

_Library: Any = torch.library.Library  # its methods carry no types

_SCHEMAS: Final = {
    "paged_attention": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, *, "
        "Tensor? query_start_loc=None, float? scale=None, bool causal=True, int? window=None, "
        "float softcap=0.0, Tensor? sinks=None, Tensor? k_dequant_scale=None, "
        "Tensor? v_dequant_scale=None, str? kv_dtype=None, str? route=None, int workspace=0, "
        "ScalarType? out_dtype=None, bool return_lse=False) -> (Tensor out, Tensor lse)"
    ),
    "append_kv": (
        "(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor slot_mapping, *, Tensor? k_dequant_scale=None, Tensor? v_dequant_scale=None, "
        "str? kv_dtype=None) -> ()"
    ),
    "merge_states": "(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)",
}


def _paged_attention(
    q: torch.Tensor,
    *tensors: torch.Tensor,
    workspace: int = 0,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _fake_paged_attention(q, out_dtype=out_dtype, return_lse=return_lse)
    attention.attend_into(
        q,
        *tensors,
        **options,
        workspace=workspace_of_handle(workspace) if workspace else None,
        out=out,
        lse=lse if return_lse else None,
    )
    return out, lse


def _fake_paged_attention(
    q: torch.Tensor,
    *_: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without return_lse, lse has no elements."""
    out = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)


def _append_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_dequant_scale: torch.Tensor | None = None,
    v_dequant_scale: torch.Tensor | None = None,
    kv_dtype: str | None = None,
) -> None:
    kv_cache.append(
        key, value, _without_lead(k_cache), _without_lead(v_cache), slot_mapping,
        k_dequant_scale, v_dequant_scale, kv_dtype,
    )  # fmt: skip


def _without_lead(cache: torch.Tensor) -> torch.Tensor:
    """Undoes `append_kv`'s leading axis of one."""
    return cache[0] if cache.dim() == 5 and cache.shape[0] == 1 else cache


def _fake_nothing(*_: Any, **__: Any) -> None:
    """The fake kernel of an op that writes to its arguments and returns nothing."""


def _fake_merge_states(outs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = outs.shape[1:]
    return (
        outs.new_empty(shape, dtype=torch.float32),
        outs.new_empty(shape[:-1], dtype=torch.float32),
    )


def _register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(name + _SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    # One kernel for every device: the native library answers for those it lacks.
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashverify::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.flashverify, name).default
    arguments = [argument.name for argument in op._schema.arguments]

    def refuse_or_run(*args: Any, **kwargs: Any) -> Any:
        refuse_autograd(**dict(zip(arguments, args, strict=False)), **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    _LIBRARY.impl(name, refuse_or_run, "Autograd")


_LIBRARY: Final[Any] = _Library("flashverify", "DEF")
_register("paged_attention", _paged_attention, _fake_paged_attention)
_register("append_kv", _append_kv, _fake_nothing)
_register("merge_states", state.merge, _fake_merge_states)
