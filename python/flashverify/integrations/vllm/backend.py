"""flashverify as vLLM's attention backend: the computation of a layer. Imports vLLM."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Final

import torch

from flashverify import proof
from flashverify.attention import paged_attention
from flashverify.integrations.vllm import engine, policy
from flashverify.integrations.vllm.cache_view import split_kv
from flashverify.integrations.vllm.metadata import Builder, Call, Metadata
from flashverify.integrations.vllm.options import Options
from flashverify.integrations.vllm.settings import Settings
from flashverify.integrations.vllm.versions import refuse_layer
from flashverify.kv_cache import append_kv

_log: Final = logging.getLogger("vllm.flashverify")
_said: Final[set[str]] = set()


class Impl(engine.AttentionImpl):
    """The attention of one layer.

    Raises, when it is made:
      UnsupportedError: A feature, dtype or head size that nothing here computes. The
        engine does not start; no other backend takes the layer.
    """

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_quant_query_input: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: object,
    ) -> None:
        if alibi_slopes is not None:
            refuse_layer("alibi_slopes", "given", "None")
        kind = getattr(attn_type, "value", attn_type)
        if kind != "decoder":
            refuse_layer("attn_type", repr(kind), "'decoder'")
        for name, value in others.items():
            unused = value is None or value is False or (isinstance(value, int) and value == -1)
            if not unused:
                refuse_layer(name, repr(value), "None: nothing here computes it")
        self.settings = settings = Settings.current()
        if settings.prefill_ranks > 1:
            refuse_layer("prefill_context_parallel_size", str(settings.prefill_ranks), "1")
        self._ranks = self.dcp_world_size
        for name, value in (("sliding_window", sliding_window), ("sinks", sinks)):
            if self._ranks > 1 and value is not None:
                refuse_layer(name, "given", "None with decode_context_parallel_size > 1")
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0.0)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_type = attn_type
        self.sinks = sinks
        self.kv_dtype = policy.cache_dtype(kv_cache_dtype, settings.model_dtype)
        self.is_fp8 = self.kv_dtype in ("fp8_e4m3", "fp8_e5m2")
        self.plan = policy.plan_layer(
            settings.layer(
                q_heads=num_heads * self._ranks,
                kv_heads=self.num_kv_heads,
                head_dim=head_size,
                kv_cache_dtype=self.kv_dtype,
            ),
            settings.speculation,
            settings.options,
        )
        settings.apply(self.kv_dtype)

    def do_kv_cache_update(
        self,
        layer: engine.AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Rounds keys and values to nearest even into the cache.

        Args:
          layer: Holds the scales, read at each call.
          key: float16, bfloat16 or float32 [tokens, kv_heads, head_size]; more rows
            than slots are padding.
          value: As ``key``.
          kv_cache: [pages, kv_heads, page_size, 2 * head_size].
          slot_mapping: int64 [tokens].
        """
        if kv_cache.numel() == 0:
            return
        k_cache, v_cache = split_kv(kv_cache, self.head_size)
        k_scale, v_scale = self._scales(layer)
        tokens = min(slot_mapping.shape[0], key.shape[0])
        append_kv(
            key[:tokens],
            value[:tokens],
            k_cache,
            v_cache,
            slot_mapping[:tokens],
            k_dequant_scale=k_scale,
            v_dequant_scale=v_scale,
            kv_dtype=self.kv_dtype if self.is_fp8 else None,
        )

    def forward(
        self,
        layer: engine.AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends the step's rows to the cache, into ``output``.

        Args:
          layer: Holds the scales, read at each call.
          query: [tokens, num_heads, head_size]; rows past the step's are padding.
          key: In the cache already.
          value: In the cache already.
          kv_cache: [pages, kv_heads, page_size, 2 * head_size].
          attn_metadata: None in the profiling run.
          output: [tokens, num_heads, head_size].
          output_scale: None.
          output_block_scale: None.

        Raises:
          UnsupportedError: Quantised output is asked for.
          RouteError: The native library ran another route than the planned one.
        """
        del key, value
        if output_scale is not None or output_block_scale is not None:
            refuse_layer("output_scale", "given", "None: outputs are not quantised here")
        if attn_metadata is None:
            return output.zero_()
        if self.sinks is not None and self.sinks.dtype != torch.float32:
            self.sinks = self.sinks.to(torch.float32)
        if self._ranks > 1:
            self._attend_shared(layer, query, kv_cache, attn_metadata, output)
        else:
            for call in attn_metadata.calls:
                rows = slice(call.first_row, call.last_row)
                arguments = self._call(layer, kv_cache, attn_metadata, call)
                paged_attention(query[rows], **arguments, out=output[rows])
        _say_once(f"the first attention call ran {proof.last_route()}, as the native library says")
        return output

    def _call(
        self,
        layer: engine.AttentionLayer,
        kv_cache: torch.Tensor,
        metadata: Metadata,
        call: Call,
    ) -> dict[str, Any]:
        """The arguments of `paged_attention`, but the query and the outputs."""
        k_cache, v_cache = split_kv(kv_cache, self.head_size)
        k_scale, v_scale = self._scales(layer)
        return {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": call.page_table,
            "seq_lens": call.seq_lens,
            "query_start_loc": call.query_start_loc,
            "scale": self.scale,
            "causal": metadata.causal,
            "window": self.sliding_window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "k_dequant_scale": k_scale,
            "v_dequant_scale": v_scale,
            "kv_dtype": self.kv_dtype if self.is_fp8 else None,
            "route": self.plan.route_plan.route,
            "workspace": metadata.workspace,
        }

    def _attend_shared(
        self,
        layer: engine.AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Metadata,
        output: torch.Tensor,
    ) -> None:
        """All ranks' heads over this rank's keys, in FP32, merged among the ranks."""
        tokens = metadata.calls[-1].last_row if metadata.calls else 0
        group = engine.get_dcp_group()
        heads = group.all_gather(query[:tokens].contiguous(), dim=1)
        out = torch.empty(heads.shape, dtype=torch.float32, device=heads.device)
        parts = []
        for call in metadata.calls:
            rows = slice(call.first_row, call.last_row)
            arguments = self._call(layer, kv_cache, metadata, call)
            _, lse = paged_attention(heads[rows], **arguments, out=out[rows], return_lse=True)
            parts.append(lse)
        if parts:
            merged = engine.cp_lse_ag_out_rs(out, torch.cat(parts), group)
            output[:tokens].copy_(merged)

    def _scales(
        self, layer: engine.AttentionLayer
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The dequant scales of a FP8 cache; a 16-bit cache stores values as they are."""
        if not self.is_fp8:
            return None, None
        return layer._k_scale.reshape(-1), layer._v_scale.reshape(-1)


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.info("flashverify: %s", text)


class CustomBackend(engine.AttentionBackend):
    """The backend as users name it: ``--attention-backend CUSTOM``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """A member's name of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """What computes a layer."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """What prepares a step."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
        """Any page size."""
        del kv_cache_spec
        return [engine.MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[engine.KVCacheLayout, ...]:
        """Every known layout, by strides; first those whose heads are long runs."""
        layouts = engine.KVCacheLayout
        return (
            layouts.LBHNC,
            layouts.LBNHC,
            layouts.BLHNC,
            layouts.BLNHC,
            layouts.BHLNC,
            layouts.LHBNC,
        )

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are FP32 logits of the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Any window."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """DFlash2's drafter fills its block in one bidirectional pass."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Scales are per tensor or per KV head."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Blocks are planned from the lengths that the host knows."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """On FP32 routes a row's bits depend on nothing else in the batch."""
        options = Options.from_additional_config(engine.get_current_vllm_config().additional_config)
        return options.route is None or options.route.keeps_fp32_state


class CpuBackend(CustomBackend):
    """The backend in the place of vLLM's own on a CPU."""

    @staticmethod
    def get_name() -> str:
        """The name of the backend whose place it takes."""
        return "CPU_ATTN"
