"""Which kernel family serves a request: a pure planner, with its reasons.

The plan is a function of the request alone. It reads no environment, no device
and no configuration, and it never substitutes: what fits nothing is refused, by
name, with the nearest value that is supported. The native library reports the
route that really ran, so that plan and deed can be compared.

The half-partial routes keep the old arithmetic. They run only when named, and
work of the DFlash2 configuration cannot name them except over an explicit E5M2
cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, TypeVar, overload

import torch

from flashverify.dtypes import (
    DEVICE_TYPES,
    KV_CACHE_DTYPES,
    QUERY_DTYPES,
    KVCacheDtype,
    dtype_name,
    resolve_kv_cache_dtype,
)
from flashverify.errors import InvalidArgumentError, UnsupportedError
from flashverify.precision import PRECISION_REVISION


class Route(str, Enum):
    """A kernel family, by the name that the native library reports."""

    grouped_fp32 = "grouped_fp32"
    """All rows of a KV head in one pass over its bytes; FP32 state."""
    scalar_fp32 = "scalar_fp32"
    """A row at a time, any head_dim; FP32 state."""
    grouped_half = "grouped_half"
    """As grouped_fp32, with normalised split partials rounded to FP16. Legacy."""
    scalar_half = "scalar_half"
    """As scalar_fp32, with normalised split partials rounded to FP16. Legacy."""
    xqa_half = "xqa_half"
    """The q_len = 1 decode kernel with FP16 partials. Legacy: naming it is the XQA choice."""

    def __str__(self) -> str:
        return self.value

    @property
    def keeps_fp32_state(self) -> bool:
        """Whether every partial and every merge of this route is FP32."""
        return self in FP32_ROUTES


FP32_ROUTES: Final = (Route.grouped_fp32, Route.scalar_fp32)
HALF_ROUTES: Final = (Route.grouped_half, Route.scalar_half, Route.xqa_half)


class SpeculativeMethod(str, Enum):
    """What the attention call is for."""

    none = "none"
    """Plain prefill or decode."""
    ngram = "ngram"
    """Verification of drafts looked up in the text so far."""
    mtp = "mtp"
    """Verification of drafts of the model's own multi-token prediction head."""
    dflash2_target = "dflash2_target"
    """The target's verification pass over a DFlash2 block; causal."""
    dflash2_draft = "dflash2_draft"
    """The DFlash2 drafter's own attention; non-causal."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class RouteRequest:
    """Everything that a route depends on. Hashable, so that plans can be cached.

    Attributes:
      device_type: ``"cpu"`` or ``"cuda"``.
      capability: CUDA compute capability (major, minor); None on the CPU.
      kv_cache_dtype: A resolved cache dtype.
      q_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
      q_len: Query tokens of the longest request of the call; 0 is a call without rows.
      head_dim: Elements of one head.
      group: Query heads per KV head.
      page_size: Tokens of one page.
      causal: Whether a row sees the keys up to its own position only.
      speculative_method: What the call is for.
      route: The route that the caller names, or None.
      precision_revision: The revision that the native library reports.
    """

    device_type: str
    kv_cache_dtype: KVCacheDtype
    q_len: int
    head_dim: int
    group: int
    page_size: int
    q_dtype: str = "float16"
    capability: tuple[int, int] | None = None
    causal: bool = True
    speculative_method: SpeculativeMethod = SpeculativeMethod.none
    route: Route | None = None
    precision_revision: int = PRECISION_REVISION

    def __post_init__(self) -> None:
        for name, kind in _FIELD_TYPES.items():
            value = getattr(self, name)
            # bool is an int to isinstance, and 8.0 == 8 to the plan cache.
            if type(value) is not kind:
                raise InvalidArgumentError(f"{name}: {value!r}; accepted: {kind.__name__}")
        if self.route is not None and type(self.route) is not Route:
            raise InvalidArgumentError(f"route: {self.route!r}; accepted: Route, or None")
        if (self.device_type == "cuda") != _is_capability(self.capability):
            raise InvalidArgumentError(
                f"capability: {self.capability!r} with device_type {self.device_type!r}; "
                "accepted: (major, minor) on cuda, None elsewhere"
            )


def _is_capability(value: object) -> bool:
    return isinstance(value, tuple) and [type(part) for part in value] == [int, int]


_FIELD_TYPES: Final[dict[str, type]] = {
    "device_type": str,
    "kv_cache_dtype": str,
    "q_len": int,
    "head_dim": int,
    "group": int,
    "page_size": int,
    "q_dtype": str,
    "causal": bool,
    "speculative_method": SpeculativeMethod,
    "precision_revision": int,
}


@dataclass(frozen=True)
class RoutePlan:
    """A route and, in words and in order, why it was chosen."""

    route: Route
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.route}: " + "; ".join(self.reasons)


@dataclass(frozen=True)
class KernelLimits:
    """What one kernel family computes on one kind of device."""

    head_dims: Sequence[int]
    q_lens: range
    q_dtypes: tuple[str, ...] = QUERY_DTYPES
    bfloat16_capability: tuple[int, int] | None = None
    """From here on a BF16 cache is read, beside a BF16 query; None: anywhere, beside any."""


_GROUPED_HEAD_DIMS: Final = (64, 80, 96, 112, 128, 192, 256, 512)
_SCALAR_HEAD_DIMS: Final = range(1, 513)
PAGE_SIZES: Final = range(1, 65537)
MIN_CUDA_CAPABILITY: Final = (7, 0)

_CPU_GROUPED: Final = KernelLimits(_GROUPED_HEAD_DIMS, range(65))
_CPU_SCALAR: Final = KernelLimits(_SCALAR_HEAD_DIMS, range(65))
# Tensor cores multiply FP16, which has not the range of BF16, or from SM80 on BF16
# by BF16; an FP32 query would lose bits in either. Their accumulators hold 256
# elements of a row at most.
_CUDA_GROUPED: Final = KernelLimits(
    _GROUPED_HEAD_DIMS[:-1], range(65), ("float16", "bfloat16"), (8, 0)
)
_CUDA_SCALAR: Final = KernelLimits(_SCALAR_HEAD_DIMS, range(65))

KERNEL_LIMITS: Final[dict[tuple[str, Route], KernelLimits]] = {
    ("cpu", Route.grouped_fp32): _CPU_GROUPED,
    ("cpu", Route.scalar_fp32): _CPU_SCALAR,
    ("cpu", Route.grouped_half): _CPU_GROUPED,
    ("cpu", Route.scalar_half): _CPU_SCALAR,
    ("cpu", Route.xqa_half): replace(_CPU_GROUPED, q_lens=range(2)),
    ("cuda", Route.grouped_fp32): _CUDA_GROUPED,
    ("cuda", Route.scalar_fp32): _CUDA_SCALAR,
    ("cuda", Route.grouped_half): _CUDA_GROUPED,
    ("cuda", Route.scalar_half): _CUDA_SCALAR,
    ("cuda", Route.xqa_half): replace(_CUDA_GROUPED, q_lens=range(2)),
}


@dataclass(frozen=True)
class _Row:
    """One row of the policy: who asks, over which cache, naming what."""

    methods: frozenset[SpeculativeMethod]
    caches: frozenset[str]
    named: frozenset[Route | None]
    candidates: tuple[Route, ...]  # in order of preference; none: refused
    reason: str

    def applies(self, request: RouteRequest) -> bool:
        return (
            request.speculative_method in self.methods
            and request.kv_cache_dtype in self.caches
            and request.route in self.named
        )


_TARGET = frozenset({SpeculativeMethod.dflash2_target})
_DRAFT = frozenset({SpeculativeMethod.dflash2_draft})
_DFLASH2 = _TARGET | _DRAFT
_OTHER_WORK = frozenset(SpeculativeMethod) - _DFLASH2
_ANY_WORK = frozenset(SpeculativeMethod)

_E4M3 = frozenset({"fp8_e4m3"})
_E5M2 = frozenset({"fp8_e5m2"})
_ANY_CACHE = frozenset(KV_CACHE_DTYPES)

_UNNAMED: frozenset[Route | None] = frozenset({None})
_NAMED_HALF: frozenset[Route | None] = frozenset(HALF_ROUTES)

# A verified row must not see the drafts after it; a drafted block sees all of itself.
_CAUSALITY: Final = {
    SpeculativeMethod.dflash2_target: True,
    SpeculativeMethod.dflash2_draft: False,
}

# Each combination of work, cache and named route meets exactly one row.
_POLICY: Final = (
    _Row(
        _TARGET, _E4M3, _UNNAMED, FP32_ROUTES,
        "a DFlash2 target over E4M3 keeps FP32 state at every q_len, 1 included",
    ),
    _Row(
        _TARGET, _ANY_CACHE - _E4M3, _UNNAMED, FP32_ROUTES,
        "a DFlash2 target keeps FP32 state, and the cache keeps the dtype that was named",
    ),
    _Row(
        _DRAFT, _ANY_CACHE, _UNNAMED, FP32_ROUTES,
        "a DFlash2 draft is non-causal attention through the same FP32-state kernels",
    ),
    _Row(
        _OTHER_WORK, _ANY_CACHE, _UNNAMED, FP32_ROUTES,
        "no route is named, and FP32 state is the default",
    ),
    *(
        _Row(_ANY_WORK, _ANY_CACHE, frozenset({route}), (route,), f"{route} is named by the caller")
        for route in FP32_ROUTES
    ),
    *(
        _Row(
            _OTHER_WORK, _ANY_CACHE, frozenset({route}), (route,),
            f"{route} is named by the caller, outside the DFlash2 configuration",
        )
        for route in HALF_ROUTES
    ),
    *(
        _Row(
            _DFLASH2, _E5M2, frozenset({route}), (route,),
            f"{route} is named by the caller, over an explicit E5M2 cache",
        )
        for route in HALF_ROUTES
    ),
    _Row(
        _DFLASH2, _ANY_CACHE - _E5M2, _NAMED_HALF, (),
        "a half-partial route contradicts the DFlash2 configuration, which keeps FP32 state",
    ),
)  # fmt: skip


@overload
def plan_route(request: RouteRequest, /) -> RoutePlan: ...


@overload
def plan_route(
    *,
    device_type: str,
    kv_cache_dtype: str | torch.dtype,
    q_len: int,
    head_dim: int,
    group: int,
    page_size: int,
    q_dtype: str | torch.dtype = ...,
    capability: tuple[int, int] | None = ...,
    causal: bool = ...,
    speculative_method: SpeculativeMethod | str = ...,
    route: Route | str | None = ...,
    precision_revision: int = ...,
) -> RoutePlan: ...


def plan_route(request: RouteRequest | None = None, /, **fields: Any) -> RoutePlan:
    """Plans one attention call, from a `RouteRequest` or from its fields by keyword.

    By keyword, names may be strings and dtypes torch dtypes; ``kv_cache_dtype``
    is resolved as `resolve_kv_cache_dtype` does, ``"auto"`` following
    ``q_dtype``. Plans are cached by request.

    Raises:
      InvalidArgumentError: A name that is not one, or a value of the wrong type.
      UnsupportedError: Nothing computes the request, or its parts contradict
        each other; the message names the argument and the nearest supported value.
    """
    if request is None:
        request = _request_of(fields)
    elif fields:
        raise InvalidArgumentError(
            f"{', '.join(fields)}: given beside a RouteRequest; accepted: the request, or its "
            "fields by keyword"
        )
    elif type(request) is not RouteRequest:
        raise InvalidArgumentError(f"request: {request!r}; accepted: a RouteRequest")
    return _plan(request)


def _request_of(fields: dict[str, Any]) -> RouteRequest:
    if "q_dtype" in fields:
        fields["q_dtype"] = dtype_name(fields["q_dtype"])
    if "kv_cache_dtype" in fields:
        fields["kv_cache_dtype"] = resolve_kv_cache_dtype(
            fields["kv_cache_dtype"], model_dtype=fields.get("q_dtype")
        )
    if "speculative_method" in fields:
        fields["speculative_method"] = _member(
            SpeculativeMethod, "speculative_method", fields["speculative_method"]
        )
    if fields.get("route") is not None:
        fields["route"] = _member(Route, "route", fields["route"])
    return RouteRequest(**fields)


_E = TypeVar("_E", Route, SpeculativeMethod)


def _member(kind: type[_E], argument: str, value: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(kind)
        raise InvalidArgumentError(f"{argument}: {value!r}; accepted: {names}") from None


@functools.lru_cache(maxsize=4096)
def _plan(request: RouteRequest) -> RoutePlan:
    _check(request)
    row = next(row for row in _POLICY if row.applies(request))
    if not row.candidates:
        raise UnsupportedError(
            f"route: {request.route} with speculative_method {request.speculative_method} and "
            f"kv_cache_dtype {request.kv_cache_dtype} ({row.reason}); accepted: "
            f"{', '.join(FP32_ROUTES)}; nearest supported value: {_fp32_like(request.route)}"
        )
    reasons = [row.reason]
    for route in row.candidates:
        misfit = _misfit(request, route)
        if misfit is None:
            reasons.append(
                f"{route} on {request.device_type} computes head_dim {request.head_dim} "
                f"and q_len {request.q_len}"
            )
            return RoutePlan(route, tuple(reasons))
        reasons.append(misfit)
    if request.route is not None:
        for route in FP32_ROUTES:
            if _misfit(request, route) is None:
                reasons[-1] += f"; with no route named, {route} computes it"
                break
    raise UnsupportedError(reasons[-1])


def _fp32_like(route: Route | None) -> Route:
    return Route.scalar_fp32 if route is Route.scalar_half else Route.grouped_fp32


def _misfit(request: RouteRequest, route: Route) -> str | None:
    """What keeps `route` from computing the request, or None."""
    limits = KERNEL_LIMITS[request.device_type, route]
    by = f"with {route} on {request.device_type}"
    found = [
        _outside(name, f"{value} {by}", value, accepted)
        for name, value, accepted in (
            ("head_dim", request.head_dim, limits.head_dims),
            ("q_len", request.q_len, limits.q_lens),
        )
        if value not in accepted
    ]
    if request.q_dtype not in limits.q_dtypes:
        found.append(
            f"q_dtype: {request.q_dtype} {by}; accepted: {', '.join(limits.q_dtypes)}; "
            f"nearest supported value: {limits.q_dtypes[0]}"
        )
    least = limits.bfloat16_capability
    if request.kv_cache_dtype == "bfloat16" and least is not None and request.capability:
        by += " and a bfloat16 cache"
        if request.q_dtype == "float16":
            found.append(
                f"q_dtype: {request.q_dtype} {by}; accepted: bfloat16; nearest supported value: "
                "bfloat16"
            )
        if request.capability < least:
            found.append(_older(request.capability, by, least))
        elif request.head_dim > 128 and _has_little_shared_memory(request.capability):
            found.append(
                f"head_dim: {request.head_dim} {by}, whose tiles the shared memory does not hold; "
                "accepted: up to 128; nearest supported value: 128"
            )
    return "; ".join(found) or None


def _has_little_shared_memory(capability: tuple[int, int]) -> bool:
    """99 KiB a block: SM86, SM89 and SM120."""
    return capability >= (12, 0) or (capability[0] == 8 and capability[1] not in (0, 7))


def _older(capability: tuple[int, int], by: str, least: tuple[int, int]) -> str:
    found, first = ("{}.{}".format(*version) for version in (capability, least))
    return (
        f"capability: {found} {by}; accepted: {first} and newer; nearest supported value: {first}"
    )


def _outside(argument: str, found: str, value: int, accepted: Sequence[int]) -> str:
    if isinstance(accepted, range):
        span = f"{accepted[0]}..{accepted[-1]}"
        nearest = min(max(value, accepted[0]), accepted[-1])
    else:
        span = ", ".join(map(str, accepted))
        # Of two equally near values the larger one: padding reaches it.
        nearest = min(accepted, key=lambda candidate: (abs(candidate - value), -candidate))
    return f"{argument}: {found}; accepted: {span}; nearest supported value: {nearest}"


def _check(request: RouteRequest) -> None:
    """Refuses what no row and no kernel could serve."""
    if request.device_type not in DEVICE_TYPES:
        raise UnsupportedError(f"device_type: {request.device_type!r}; accepted: cpu, cuda")
    if request.capability is not None and request.capability < MIN_CUDA_CAPABILITY:
        raise UnsupportedError(_older(request.capability, "on cuda", MIN_CUDA_CAPABILITY))
    if request.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UnsupportedError(
            f"kv_cache_dtype: {request.kv_cache_dtype!r}; accepted, once resolved: "
            f"{', '.join(KV_CACHE_DTYPES)}"
        )
    if request.q_dtype not in QUERY_DTYPES:
        raise UnsupportedError(f"q_dtype: {request.q_dtype!r}; accepted: {', '.join(QUERY_DTYPES)}")
    if request.group < 1:
        raise UnsupportedError(
            f"group: {request.group}; accepted: 1 and more; nearest supported value: 1"
        )
    if request.page_size not in PAGE_SIZES:
        raise UnsupportedError(
            _outside("page_size", str(request.page_size), request.page_size, PAGE_SIZES)
        )
    if request.precision_revision != PRECISION_REVISION:
        raise UnsupportedError(
            f"precision_revision: {request.precision_revision}; accepted: {PRECISION_REVISION}, "
            "whose arithmetic these routes are planned for; nearest supported value: "
            f"{PRECISION_REVISION}"
        )
    expected_causal = _CAUSALITY.get(request.speculative_method)
    if expected_causal is not None and request.causal is not expected_causal:
        raise UnsupportedError(
            f"causal: {request.causal} with speculative_method {request.speculative_method}; "
            f"accepted: {expected_causal}; nearest supported value: {expected_causal}"
        )
