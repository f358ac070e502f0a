"""What the layers of a step share: lengths, pages and calls. Imports vLLM."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from flashverify import runtime
from flashverify.errors import InternalError, UnsupportedError
from flashverify.info import native_info
from flashverify.integrations.vllm import cpu_threads, engine, policy
from flashverify.integrations.vllm.context_parallel import local_lengths
from flashverify.integrations.vllm.row_blocks import cut, is_uniform, spans
from flashverify.integrations.vllm.settings import Settings
from flashverify.precision import PRECISION_REVISION
from flashverify.workspace import Workspace

_log: Final = logging.getLogger("vllm.flashverify")


@dataclass(frozen=True)
class Call:
    """One attention call of each layer.

    Attributes:
      first_row: Of the step's rows, the call's first.
      last_row: And the one past its last.
      query_start_loc: int32 [blocks + 1]; None: equal blocks.
      seq_lens: int32 [blocks], keys that a block's last row sees.
      page_table: int32 [blocks, max_pages].
    """

    first_row: int
    last_row: int
    query_start_loc: torch.Tensor | None
    seq_lens: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True)
class Metadata:
    """A step, for the layers of one group."""

    calls: tuple[Call, ...]
    causal: bool
    workspace: Workspace


class Builder(engine.AttentionMetadataBuilder):
    """Prepares steps for a group of layers, and says at its start what they run.

    Raises, when it is made:
      UnsupportedError: A layer of the group has another backend, or no route.
    """

    # A batch of equal blocks needs no offsets: a captured call reads the lengths and the
    # pages where the engine keeps them.
    _cudagraph_support: ClassVar[engine.AttentionCGSupport] = (
        engine.AttentionCGSupport.UNIFORM_BATCH
    )

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: Any
    ) -> engine.AttentionCGSupport:
        """Uniform batches; none where a step's lengths per rank are computed for the step."""
        del kv_cache_spec
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return engine.AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        from flashverify.integrations.vllm.backend import Impl

        self._device = device
        settings = Settings.of(vllm_config)
        layers = engine.get_layers_from_vllm_config(vllm_config, engine.Attention, layer_names)
        impls: list[Impl] = []
        for name, layer in layers.items():
            if not isinstance(layer.impl, Impl):
                raise UnsupportedError(
                    f"{name}: computed by {type(layer.impl).__name__}; accepted: flashverify's "
                    "layers alone within a group of its own"
                )
            impls.append(layer.impl)
        if not impls:
            raise InternalError(f"no attention layer among {', '.join(layer_names)}")
        self._settings = impls[0].settings
        self._ranks, self._rank = impls[0].dcp_world_size, impls[0].dcp_rank
        # A row sees a prefix of the keys on this rank, but rows differ in more than their order.
        self._max_rows = 1 if self._ranks > 1 else min(impl.plan.max_rows for impl in impls)
        q_len = 1
        if settings.speculation is not None:
            q_len += settings.speculation.num_speculative_tokens
        scheduler = vllm_config.scheduler_config
        self._max_blocks = int(scheduler.max_num_seqs)
        self._max_call_rows = max(self._max_blocks * q_len, self._max_rows)
        self._workspace = Workspace.unplanned(device)
        if device.type == "cuda":
            # A captured graph needs its memory before the capture.
            self._workspace = self._planned_workspace(impls, kv_cache_spec, vllm_config)
            self._workspace.allocate()
        else:
            cpu_threads.adopt()
        _announce(impls, kv_cache_spec, self._max_blocks)

    def _planned_workspace(
        self, impls: list[Any], kv_cache_spec: Any, vllm_config: Any
    ) -> Workspace:
        first = impls[0]
        return Workspace(
            self._device,
            batch=self._max_blocks,
            rows=self._max_call_rows,
            q_heads=max(impl.num_heads for impl in impls) * self._ranks,
            kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            max_seq_len=int(vllm_config.model_config.max_model_len),
            page_size=int(kv_cache_spec.block_size),
            routes=sorted({impl.plan.route_plan.route for impl in impls}),
            q_dtype=vllm_config.model_config.dtype,
            kv_dtype=first.kv_dtype,
            schedule=policy.schedule(self._max_blocks, self._settings.options),
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: engine.CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        """Describes a step of any mixture: prefill, decode and verification rows.

        Args:
          common_prefix_len: Unused.
          common_attn_metadata: The engine's description of the batch.
          fast_build: Unused.

        Raises:
          UnsupportedError: Causality that differs by request.
        """
        del common_prefix_len, fast_build
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise UnsupportedError("causal: a tensor; accepted: True or False for the whole batch")
        requests = common.num_reqs
        seq_lens = common.seq_lens[:requests]
        pages = common.block_table_tensor[:requests]
        rows = common.num_actual_tokens
        starts = common.query_start_loc_cpu[: requests + 1]
        if (
            self._ranks == 1
            and requests <= self._max_blocks
            and is_uniform(starts, rows, self._max_rows)
        ):
            calls: tuple[Call, ...] = (Call(0, rows, None, seq_lens, pages),)
        else:
            calls = self._cut(common, seq_lens, pages, causal=common.causal)
        return Metadata(calls, common.causal, self._workspace)

    def _cut(
        self,
        common: engine.CommonAttentionMetadata,
        seq_lens: torch.Tensor,
        pages: torch.Tensor,
        *,
        causal: bool,
    ) -> tuple[Call, ...]:
        blocks = cut(common.query_start_loc_cpu[: common.num_reqs + 1], self._max_rows)
        request = blocks.request.to(self._device, non_blocking=True)
        seen = seq_lens[request]
        if causal:
            seen = seen - blocks.rows_after.to(self._device, non_blocking=True)
        if self._ranks > 1:
            seen = local_lengths(
                seen, rank=self._rank, ranks=self._ranks, interleave=self._settings.interleave
            )
        pages = pages[request]
        starts = blocks.query_start_loc
        calls: list[Call] = []
        for span in spans(starts, self._max_blocks, self._max_call_rows):
            offsets = starts[span.first_block : span.last_block + 1] - span.first_row
            calls.append(
                Call(
                    first_row=span.first_row,
                    last_row=span.last_row,
                    query_start_loc=offsets.to(self._device, non_blocking=True),
                    seq_lens=seen[span.first_block : span.last_block],
                    page_table=pages[span.first_block : span.last_block],
                )
            )
        return tuple(calls)


def _announce(impls: list[Any], kv_cache_spec: Any, max_requests: int) -> None:
    """Says which arithmetic is in control, and of what."""
    first = impls[0]
    settings = first.settings
    info = native_info()
    where = f"cuda, schedule {policy.schedule(max_requests, settings.options)}"
    if settings.device_type == "cpu":
        where = f"cpu ({info['cpu_isa']}, {runtime.get_num_threads()} threads)"
    _log.info(
        "flashverify: route %s controls the attention of %d %slayers on %s; precision revision "
        "%d, build %s, library %s (sha256 %s)",
        first.plan.route_plan.route, len(impls), "draft " if settings.is_draft else "", where,
        PRECISION_REVISION, info["build_id"], info["library_path"], info["library_sha256"],
    )  # fmt: skip
    _log.info(
        "flashverify: why: %s; cache %s, page_size %d, %d query heads, %d KV heads, head_dim %d, "
        "model %s; row-invariant linears %s, FP32 logits %s",
        "; ".join(first.plan.route_plan.reasons), first.kv_dtype, kv_cache_spec.block_size,
        first.num_heads, first.num_kv_heads, first.head_size, settings.model_dtype,
        "on" if settings.options.row_invariant_linears else "off",
        "on" if settings.fp32_logits(first.kv_dtype) else "off",
    )  # fmt: skip
