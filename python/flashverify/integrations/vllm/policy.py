"""Which route the layers of a model take, and why: flashverify's planner, asked for vLLM.

Nothing here imports vLLM: its objects are read into plain values first (`backend.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from flashverify.dflash2 import METHODS, DFlash2Config
from flashverify.dtypes import KVCacheDtype, dtype_name, resolve_kv_cache_dtype
from flashverify.errors import UnsupportedError
from flashverify.integrations.vllm.options import Options
from flashverify.routing import KERNEL_LIMITS, RoutePlan, SpeculativeMethod, plan_route

_METHODS: Final = {"ngram": SpeculativeMethod.ngram, "mtp": SpeculativeMethod.mtp}


@dataclass(frozen=True)
class Speculation:
    """vLLM's speculative configuration, as plain values.

    Attributes:
      method: Its ``method``.
      num_speculative_tokens: Drafts of one block.
      draft_config: The drafter's config.json, {} where there is no draft model.
    """

    method: str
    num_speculative_tokens: int
    draft_config: Mapping[str, Any]


@dataclass(frozen=True)
class Layer:
    """What the planning of one attention layer depends on.

    Attributes:
      device_type: "cpu" or "cuda".
      capability: CUDA compute capability; None on the CPU.
      q_heads: Query heads on this rank.
      kv_heads: KV heads on this rank.
      head_dim: Elements of one head.
      page_size: Tokens of one page.
      q_dtype: The model's dtype.
      kv_cache_dtype: The cache's dtype, resolved.
      is_draft: Whether the layer is the drafter's.
    """

    device_type: str
    capability: tuple[int, int] | None
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_cache_dtype: KVCacheDtype
    is_draft: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """The route of a layer, and the most query rows of one request that it takes."""

    route_plan: RoutePlan
    max_rows: int


def schedule(max_requests: int, options: Options) -> str:
    """The schedule of a CUDA workspace: one for the engine's whole life, for it decides bits.

    A single request wants every multiprocessor, and so 128 splits; eight keep them busy
    with 16 each. The rule stays there for more: one of them may be alone, and long.

    Args:
      max_requests: Requests that the engine serves at once.
      options: The user's, which win.
    """
    if options.schedule is not None:
        return options.schedule
    splits = 128
    while splits > 16 and splits * max_requests > 128:
        splits //= 2
    return f"n{splits}"


def cache_dtype(name: str, model_dtype: torch.dtype) -> KVCacheDtype:
    """The resolved dtype of vLLM's ``kv_cache_dtype``: "fp8" is E4M3 on every device.

    Raises:
      UnsupportedError: One that nothing here computes.
    """
    return resolve_kv_cache_dtype(name, model_dtype=model_dtype)


def dflash2_config(
    speculation: Speculation | None, kv_cache_dtype: KVCacheDtype, options: Options
) -> DFlash2Config | None:
    """The DFlash2 configuration of an engine; None where another method drafts, or none.

    Raises:
      UnsupportedError: Parts that contradict each other.
    """
    if speculation is None or speculation.method not in METHODS:
        return None
    given = dict(speculation.draft_config)
    given["method"] = speculation.method
    given["num_speculative_tokens"] = speculation.num_speculative_tokens
    overrides: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    if options.fp32_logits is not None:
        overrides["fp32_logits"] = options.fp32_logits
    return DFlash2Config.from_config(given, **overrides)


def fp32_logits(
    speculation: Speculation | None, kv_cache_dtype: KVCacheDtype, options: Options
) -> bool:
    """Whether the engine's LM head is to give FP32 logits."""
    config = dflash2_config(speculation, kv_cache_dtype, options)
    if config is not None:
        return config.fp32_logits
    return options.fp32_logits or False


def method_of(speculation: Speculation | None, *, is_draft: bool) -> SpeculativeMethod:
    """What the attention of a layer is for, in the planner's words."""
    if speculation is None:
        return SpeculativeMethod.none
    if speculation.method in METHODS:
        return SpeculativeMethod.dflash2_draft if is_draft else SpeculativeMethod.dflash2_target
    if is_draft:
        return SpeculativeMethod.none
    return _METHODS.get(speculation.method, SpeculativeMethod.none)


def plan_layer(layer: Layer, speculation: Speculation | None, options: Options) -> LayerPlan:
    """Plans a layer, and makes sure that its widest verification is one block.

    Raises:
      UnsupportedError: No route takes the layer, or the one named does not; the message
        names the argument and the nearest supported value.
    """
    method = method_of(speculation, is_draft=layer.is_draft)
    q_len = 1 + (speculation.num_speculative_tokens if speculation is not None else 0)
    if layer.q_heads % layer.kv_heads != 0:
        raise UnsupportedError(
            f"num_heads: {layer.q_heads}; accepted: multiples of {layer.kv_heads} (num_kv_heads)"
        )
    route_plan = plan_route(
        device_type=layer.device_type,
        capability=layer.capability,
        kv_cache_dtype=layer.kv_cache_dtype,
        q_dtype=dtype_name(layer.q_dtype),
        # What is longer than the kernels take is cut into blocks, whatever the route.
        q_len=1,
        head_dim=layer.head_dim,
        group=layer.q_heads // layer.kv_heads,
        page_size=layer.page_size,
        causal=method is not SpeculativeMethod.dflash2_draft,
        speculative_method=method,
        route=options.route,
    )
    max_rows = KERNEL_LIMITS[layer.device_type, route_plan.route].q_lens[-1]
    if route_plan.route.keeps_fp32_state and q_len > max_rows:
        raise UnsupportedError(
            f"num_speculative_tokens: {q_len - 1}; accepted: 1..{max_rows - 1} on "
            f"{layer.device_type}; nearest supported value: {max_rows - 1}"
        )
    return LayerPlan(route_plan, max_rows)
