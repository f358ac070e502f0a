"""Attention over a paged key/value cache, with every piece of state in FP32."""

from __future__ import annotations

import math
from typing import Final, Literal, NoReturn, overload

import torch
from absl import logging

from flashverify import _native, proof, runtime
from flashverify._arguments import (
    CACHE_AXES,
    FLOAT8_IN_DLPACK,
    Scale,
    cache_code,
    check_bool,
    check_tensor,
    float8_bytes,
    real_number,
    refuse,
    scale_tensor,
    window_code,
)
from flashverify._dispatch import may_differentiate, must_dispatch, refuse_autograd
from flashverify.dtypes import dtype_name, storage_kv_dtype
from flashverify.errors import FlashVerifyError, UnsupportedError, WorkspaceTooSmallError
from flashverify.routing import Route, plan_route
from flashverify.workspace import (
    Buffer,
    Workspace,
    capability_of,
    check_workspace,
    current_stream,
    default_workspace,
    state_of,
)

_NO_BUFFER: Final = Buffer(0, torch.device("cpu"))
_LEAST_FLOAT32: Final = 2.0**-149
_MAX_PLANS: Final = 4096  # a bound against callers with ever new shapes


class _CallPlan:
    """What the calls of one dtype and shape class share."""

    __slots__ = (
        "announced", "default_scale", "kv_code", "route", "route_code", "shape_class", "state",
    )  # fmt: skip

    def __init__(self, route: Route, kv_code: int, head_dim: int, shape_class: str) -> None:
        self.route = route
        self.route_code = proof.ROUTE_CODES[route]
        self.state = state_of(route)
        self.kv_code = kv_code
        self.default_scale = 1.0 / math.sqrt(head_dim)
        self.shape_class = shape_class
        self.announced = False


_plans: Final[dict[object, _CallPlan]] = {}
_announced: Final[set[str]] = set()


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    k_dequant_scale: Scale = ...,
    v_dequant_scale: Scale = ...,
    kv_dtype: str | None = ...,
    route: Route | str | None = ...,
    workspace: Workspace | None = ...,
    out: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    k_dequant_scale: Scale = ...,
    v_dequant_scale: Scale = ...,
    kv_dtype: str | None = ...,
    route: Route | str | None = ...,
    workspace: Workspace | None = ...,
    out: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_dequant_scale: Scale = None,
    v_dequant_scale: Scale = None,
    kv_dtype: str | None = None,
    route: Route | str | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attends the query rows of a batch of requests to their paged caches.

    Rows of one request are contiguous in ``q``. Row j of a request with n_q rows
    and seq_len n sees keys 0 .. n - n_q + j when causal, all n otherwise. A row
    that sees nothing gives output 0 and LSE -inf. Cache bytes at or beyond
    seq_len and page-table entries past the last used page are never used.

    Args:
      q: float32, float16 or bfloat16 [rows, q_heads, head_dim], last axis contiguous.
      k_cache: [pages, page_size, kv_heads, head_dim] float8_e4m3fn, float8_e5m2,
        float16, bfloat16, or uint8 with ``kv_dtype``; any strides, last axis
        contiguous, so that HND layouts and the halves of one
        [pages, 2, ...] tensor are views.
      v_cache: As ``k_cache``, with strides of its own.
      page_table: int32 [batch, max_pages].
      seq_lens: int32 [batch], keys visible to the request's last row.
      query_start_loc: int32 [batch + 1], first row of each request and, last,
        rows. None: rows / batch each.
      scale: Factor of the scores; None is 1 / sqrt(head_dim).
      causal: Whether a row sees the keys up to its own position only.
      window: Keys that a row sees at most, itself included; None is all.
      softcap: c > 0 maps a scaled score x to c * tanh(x / c); 0 is none.
      sinks: float32 [q_heads], logits that add to the denominator alone.
      k_dequant_scale: Stored key x scale = key. None (1), a number, or float32 of
        1 or kv_heads elements.
      v_dequant_scale: The same for values.
      kv_dtype: Format of a uint8 cache: "fp8_e4m3" (or "fp8") or "fp8_e5m2".
      route: The route to run; None lets `plan_route` choose. Never substituted.
      workspace: Memory for partial states; None is the calling thread's own.
      out: Where the output goes, [rows, q_heads, head_dim] float32, float16 or
        bfloat16; None makes a tensor of q's dtype.
      return_lse: Whether the log-sum-exp is returned too.

    Returns:
      out, or (out, lse) with lse float32 [rows, q_heads], natural logarithm.

    Raises:
      InvalidArgumentError, OutOfRangeError, UnsupportedError: An argument that
        cannot be used; nothing was written.
      RouteError: A `require_route` around the call rules the planned route out,
        or the native library reports that another one ran.
    """
    if must_dispatch(q, k_cache, v_cache):
        return _through_op(
            q, k_cache, v_cache, page_table, seq_lens, query_start_loc, scale, causal, window,
            softcap, sinks, k_dequant_scale, v_dequant_scale, kv_dtype, route, workspace, out,
            return_lse,
        )  # fmt: skip
    plan = _plan_call(q, k_cache, seq_lens, query_start_loc, causal, kv_dtype, route)
    check_bool("return_lse", return_lse)
    fresh = out is None
    result = _output_like(q) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    _execute(
        plan, q, k_cache, v_cache, page_table, seq_lens, query_start_loc, scale, causal, window,
        softcap, sinks, k_dequant_scale, v_dequant_scale, workspace, result, lse,
    )  # fmt: skip
    if not fresh:
        torch.autograd.graph.increment_version(result)
    return result if lse is None else (result, lse)


def _output_like(q: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    except RuntimeError:  # a sparse q, which the call then refuses in its own words
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def attend_into(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_dequant_scale: Scale = None,
    v_dequant_scale: Scale = None,
    kv_dtype: str | None = None,
    route: Route | str | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """`paged_attention` into given outputs, past torch's dispatcher: the ops' kernel."""
    plan = _plan_call(q, k_cache, seq_lens, query_start_loc, causal, kv_dtype, route)
    _execute(
        plan, q, k_cache, v_cache, page_table, seq_lens, query_start_loc, scale, causal, window,
        softcap, sinks, k_dequant_scale, v_dequant_scale, workspace, out, lse,
    )  # fmt: skip


def _plan_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    causal: bool,
    kv_dtype: str | None,
    route: Route | str | None,
) -> _CallPlan:
    """The plan of a call; planned once for all calls that agree in what it depends on."""
    try:
        rows, q_heads, head_dim = q.shape
        _, page_size, kv_heads, _ = k_cache.shape
        if query_start_loc is None:
            batch = seq_lens.shape[0]
            q_len = rows // batch if batch else 0
        else:
            q_len = _native.max_query_len(query_start_loc)
        key = (
            q_len, q_heads, kv_heads, head_dim, page_size, q.dtype, k_cache.dtype, q.device,
            kv_dtype, route, causal,
        )  # fmt: skip
        plan = _plans.get(key)
    except FlashVerifyError:
        raise
    except (AttributeError, IndexError, TypeError, ValueError):
        _explain(q, k_cache, seq_lens, causal, kv_dtype, route)
    if plan is None:
        plan = _new_plan(q, k_cache, q_len, causal, kv_dtype, route)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
            _announced.clear()
        _plans[key] = plan
    return plan


def _explain(
    q: object, k_cache: object, seq_lens: object, causal: object, kv_dtype: object, route: object
) -> NoReturn:
    """Raises for the argument that kept a call from being planned."""
    check_tensor("q", q, "rows, q_heads, head_dim")
    check_tensor("k_cache", k_cache, CACHE_AXES)
    check_tensor("seq_lens", seq_lens, "batch")
    if route is not None:
        proof.parse_route(route)
    if isinstance(k_cache, torch.Tensor):
        cache_code(k_cache.dtype, kv_dtype)
    refuse("causal", repr(causal), "True or False")


def _new_plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    q_len: int,
    causal: bool,
    kv_dtype: str | None,
    route: Route | str | None,
) -> _CallPlan:
    check_bool("causal", causal)
    if route is not None:
        route = proof.parse_route(route)
    kv_code = cache_code(k_cache.dtype, kv_dtype)
    _, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_cache.shape
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        refuse("q", f"dtype {dtype_name(q.dtype)}", "float32, float16 or bfloat16")
    if kv_heads < 1:
        refuse("k_cache", f"shape {list(k_cache.shape)}", "1 or more kv_heads (axis 2)")
    if q_heads < 1 or q_heads % kv_heads != 0:
        refuse(
            "q",
            f"axis 1 (q_heads) has {q_heads} elements",
            f"multiples of {kv_heads} (kv_heads of k_cache)",
        )
    kv_cache_dtype = storage_kv_dtype(k_cache.dtype, kv_dtype)
    device = q.device
    try:
        route_plan = plan_route(
            device_type=device.type,
            capability=capability_of(device),
            kv_cache_dtype=kv_cache_dtype,
            q_dtype=q.dtype,
            q_len=q_len,
            head_dim=head_dim,
            group=q_heads // kv_heads,
            page_size=page_size,
            causal=causal,
            route=route,
        )
    except UnsupportedError as error:
        # The planner speaks of properties; here they come from these tensors.
        raise UnsupportedError(
            f"q {list(q.shape)} on {device} with k_cache {list(k_cache.shape)}: {error}"
        ) from None
    shape_class = (
        f"{kv_cache_dtype} cache, {dtype_name(q.dtype)} query, {q_heads} query heads, "
        f"{kv_heads} KV heads, head_dim {head_dim}, page_size {page_size} on {device}"
    )
    return _CallPlan(route_plan.route, kv_code, head_dim, shape_class)


def _execute(
    plan: _CallPlan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
    k_dequant_scale: Scale,
    v_dequant_scale: Scale,
    workspace: Workspace | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Runs a planned call into ``out`` and ``lse``, and proves its route."""
    proof.check_required(plan.route)
    if may_differentiate(q, k_cache, v_cache, sinks, k_dequant_scale, v_dequant_scale, out):
        refuse_autograd(
            q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, out=out,
            k_dequant_scale=k_dequant_scale, v_dequant_scale=v_dequant_scale,
        )  # fmt: skip
    check_bool("causal", causal)
    if scale is None:
        scale = plan.default_scale
    elif type(scale) is not float:
        scale = real_number("scale", scale)
    if type(softcap) is not float:
        softcap = real_number("softcap", softcap)
    if 0.0 < softcap < _LEAST_FLOAT32:  # as float32 it would be 0: none
        refuse("softcap", repr(softcap), f"0 for none, or at least {_LEAST_FLOAT32}")
    if not FLOAT8_IN_DLPACK:
        k_cache, v_cache = float8_bytes(k_cache, v_cache)
    device = q.device
    stream = current_stream(device)
    if workspace is None:
        workspace = default_workspace(device, stream)
    else:
        check_workspace(workspace, device)
    arguments = (
        q, k_cache, v_cache, page_table, seq_lens, query_start_loc, sinks, k_dequant_scale,
        v_dequant_scale, out, lse, plan.kv_code, plan.route_code, scale, softcap, causal,
        0 if window is None else window_code(window), runtime.current_isa_code(),
        runtime.get_num_threads(), stream, runtime.current_cuda_image(), workspace.splits,
    )  # fmt: skip
    with workspace.lock:
        buffer = workspace.buffers.get(plan.state, _NO_BUFFER)
        try:
            ran = _native.paged_attention(*arguments, buffer.address, buffer.nbytes)
        except WorkspaceTooSmallError:
            ran = None
        if ran is None:
            needed = _native.attention_workspace_bytes(*arguments)
            buffer = workspace.grow(plan.state, needed)
            ran = _native.paged_attention(*arguments, buffer.address, buffer.nbytes)
    if ran != plan.route_code:
        proof.refuse(plan.route, ran)
    proof.record(plan.route)
    if not plan.announced:
        _announce(plan)


def _announce(plan: _CallPlan) -> None:
    """Logs the first use of a route for a dtype and shape class."""
    plan.announced = True
    line = f"{plan.route} runs for {plan.shape_class}"
    if line not in _announced:  # plans differ by q_len too
        _announced.add(line)
        logging.info("flashverify: %s", line)


def _through_op(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
    k_dequant_scale: Scale,
    v_dequant_scale: Scale,
    kv_dtype: str | None,
    route: Route | str | None,
    workspace: Workspace | None,
    out: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same call as an op that tracing, fake tensors and dispatch modes see."""
    result, lse = torch.ops.flashverify.paged_attention(
        q, k_cache, v_cache, page_table, seq_lens,
        query_start_loc=query_start_loc,
        scale=None if scale is None else float(scale),
        causal=causal,
        window=window,
        softcap=float(softcap),
        sinks=sinks,
        k_dequant_scale=scale_tensor("k_dequant_scale", k_dequant_scale, q),
        v_dequant_scale=scale_tensor("v_dequant_scale", v_dequant_scale, q),
        kv_dtype=kv_dtype,
        route=route.value if isinstance(route, Route) else route,
        workspace=0 if workspace is None else workspace.handle,
        out_dtype=None if out is None else out.dtype,
        return_lse=return_lse,
    )  # fmt: skip
    if out is not None:
        if out.shape != result.shape:  # a copy would broadcast
            refuse("out", f"shape {list(out.shape)}", f"{list(result.shape)}, the shape of q")
        result = out.copy_(result)
    return (result, lse) if return_lse else result
