"""What this integration uses of vLLM, in one place.

A type checker sees the parts declared here; at run time the names are vLLM's own, and
`check_interfaces` says in words what another release of it lacks.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from flashverify.integrations.vllm.versions import check_offers, check_version

if TYPE_CHECKING:

    class KVCacheLayout(Enum):
        """How one layer's [pages, heads, tokens, contents] lie in memory."""

        LBHNC = 0
        LBNHC = 1
        LHBNC = 2
        BLHNC = 3
        BLNHC = 4
        BHLNC = 5

    class MultipleOf:
        """Any multiple of a number."""

        def __init__(self, base: int) -> None: ...

    class AttentionCGSupport(Enum):
        """Which batches a CUDA graph may hold."""

        UNIFORM_BATCH = 2
        NEVER = 0

    class AttentionBackend:
        """Base of backends."""

    class AttentionImpl:
        """Base of the computation of one layer."""

        dcp_world_size: int
        dcp_rank: int

    class AttentionMetadataBuilder:
        """Base of what prepares a step's metadata, once for a group of layers."""

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
        ) -> None: ...

    class CommonAttentionMetadata(Protocol):
        """One step's batch, as the engine describes it to every backend."""

        query_start_loc: torch.Tensor
        query_start_loc_cpu: torch.Tensor
        seq_lens: torch.Tensor
        num_reqs: int
        num_actual_tokens: int
        max_query_len: int
        block_table_tensor: torch.Tensor
        causal: bool | torch.Tensor

    class AttentionLayer(Protocol):
        """The engine's layer, which holds the scales."""

        impl: object
        _k_scale: torch.Tensor
        _v_scale: torch.Tensor

    def get_current_vllm_config() -> Any:
        """The configuration of the engine that is being built."""

    def get_layers_from_vllm_config(
        vllm_config: Any, layer_type: type, layer_names: list[str] | None = None
    ) -> Mapping[str, AttentionLayer]:
        """The layers of a type, by name."""

    def register_backend(backend: Any, class_path: str) -> Callable[[type], type]:
        """Makes a class the backend of a name."""

    def get_dcp_group() -> Any:
        """The ranks that share one request's cache."""

    def cp_lse_ag_out_rs(out: torch.Tensor, lse: torch.Tensor, group: Any) -> torch.Tensor:
        """Merges the ranks' outputs, and gives each rank its heads."""

    Attention: type
    AttentionBackendEnum: Any
    compilation: Any
    current_platform: Any
    logits_processor: Any
    linear_layers: Any
    VERSION: str
else:
    import vllm
    from vllm.compilation import backends as compilation
    from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
    from vllm.distributed.parallel_state import get_dcp_group
    from vllm.model_executor.layers import logits_processor
    from vllm.model_executor.layers import utils as linear_layers
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionLayer,
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
        MultipleOf,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs
    from vllm.v1.kv_cache_layout import KVCacheLayout

    VERSION = vllm.__version__

__all__ = [
    "VERSION",
    "Attention",
    "AttentionBackend",
    "AttentionBackendEnum",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "KVCacheLayout",
    "MultipleOf",
    "check_interfaces",
    "compilation",
    "cp_lse_ag_out_rs",
    "current_platform",
    "get_current_vllm_config",
    "get_dcp_group",
    "get_layers_from_vllm_config",
    "linear_layers",
    "logits_processor",
    "register_backend",
]

_METADATA: Final = (
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens",
    "max_query_len", "block_table_tensor", "causal",
)  # fmt: skip
_BACKEND: Final = (
    "get_name", "get_impl_cls", "get_builder_cls", "supported_kv_cache_layouts",
    "get_supported_kernel_block_sizes", "validate_configuration",
    "forward_includes_kv_cache_update",
)  # fmt: skip
_LAYOUTS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
_IMPL: Final = (
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
    "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
)  # fmt: skip


def check_interfaces() -> None:
    """Refuses a vLLM that is unknown, or that lacks what this integration uses.

    Raises:
      UnsupportedError: The message names the version, or what is missing.
    """
    check_version(VERSION)
    fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}  # type: ignore[arg-type]
    check_offers("CommonAttentionMetadata", fields, _METADATA)
    check_offers("AttentionBackend", dir(AttentionBackend), _BACKEND)
    check_offers("KVCacheLayout", KVCacheLayout.__members__, _LAYOUTS)
    check_offers(
        "AttentionImpl.__init__", inspect.signature(AttentionImpl.__init__).parameters, _IMPL
    )
    check_offers("LogitsProcessor", dir(logits_processor.LogitsProcessor), ("_apply_head",))
    check_offers("compilation.backends", dir(compilation), ("model_tag",))
    check_offers("layers.utils", dir(linear_layers), ("cpu_unquantized_gemm",))
