"""The engine's configuration, read once into plain values. Imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from flashverify.dtypes import KVCacheDtype
from flashverify.errors import UnsupportedError
from flashverify.integrations.row_invariant_linear import ROW_INVARIANT_DTYPES
from flashverify.integrations.vllm import engine, patches, policy
from flashverify.integrations.vllm.options import Options
from flashverify.integrations.vllm.versions import refuse_layer

_TARGET_TAG: Final = "backbone"


@dataclass(frozen=True)
class Settings:
    """What a layer and a group of layers are built from.

    Attributes:
      options: The user's.
      speculation: The engine's speculative configuration, or None.
      is_draft: Whether the model being built is the drafter.
      device_type: "cpu" or "cuda".
      capability: CUDA compute capability; None on the CPU.
      model_dtype: The dtype of activations.
      page_size: Tokens of one page, as configured so far.
      prefill_ranks: Ranks that share a prefill.
      decode_ranks: Ranks that share one request's cache.
      interleave: Neighbouring tokens of it that lie on one rank.
    """

    options: Options
    speculation: policy.Speculation | None
    is_draft: bool
    device_type: str
    capability: tuple[int, int] | None
    model_dtype: torch.dtype
    page_size: int
    prefill_ranks: int
    decode_ranks: int
    interleave: int

    @classmethod
    def current(cls) -> Settings:
        """Of the model that is being built, the target's or the drafter's."""
        # A drafter is built under the target's configuration, with its own dtype.
        return replace(
            cls.of(engine.get_current_vllm_config()),
            is_draft=engine.compilation.model_tag != _TARGET_TAG,
            model_dtype=torch.get_default_dtype(),
        )

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Of a VllmConfig.

        Raises:
          InvalidArgumentError: An option that is none.
          UnsupportedError: A device or a kind of model that nothing here computes.
        """
        model = config.model_config
        for name in ("is_mm_prefix_lm", "rswa_window"):
            if getattr(model, name, None):
                refuse_layer(name, repr(getattr(model, name)), "none: attention is causal here")
        capability = None
        platform = engine.current_platform
        if not platform.is_cpu():
            if not platform.is_cuda():
                refuse_layer("platform", str(platform.device_name), "cpu, cuda")
            found = platform.get_device_capability()
            capability = (int(found.major), int(found.minor))
        parallel = config.parallel_config
        return cls(
            options=Options.from_additional_config(config.additional_config),
            speculation=_speculation(config.speculative_config),
            is_draft=False,
            device_type="cpu" if capability is None else "cuda",
            capability=capability,
            model_dtype=model.dtype,
            page_size=int(config.cache_config.block_size or 16),
            prefill_ranks=int(parallel.prefill_context_parallel_size),
            decode_ranks=int(parallel.decode_context_parallel_size),
            interleave=int(parallel.cp_kv_cache_interleave_size),
        )

    def layer(
        self,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        kv_cache_dtype: KVCacheDtype,
        page_size: int | None = None,
    ) -> policy.Layer:
        """What the planner is asked about a layer of this engine."""
        return policy.Layer(
            device_type=self.device_type,
            capability=self.capability,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=self.page_size if page_size is None else page_size,
            q_dtype=self.model_dtype,
            kv_cache_dtype=kv_cache_dtype,
            is_draft=self.is_draft,
        )

    def fp32_logits(self, kv_cache_dtype: KVCacheDtype) -> bool:
        """Whether the LM head is to give FP32 logits."""
        return policy.fp32_logits(self.speculation, kv_cache_dtype, self.options)

    def apply(self, kv_cache_dtype: KVCacheDtype) -> None:
        """Makes the changes to vLLM's own layers that the options ask for.

        Raises:
          UnsupportedError: Row-invariant linears where nothing makes them so.
        """
        wanted = self.options.row_invariant_linears
        if wanted and self.device_type != "cpu":
            raise UnsupportedError(
                f"row_invariant_linears: true on {self.device_type}; accepted: true on cpu alone"
            )
        if wanted and self.model_dtype not in ROW_INVARIANT_DTYPES:
            raise UnsupportedError(
                f"row_invariant_linears: true with a model of {self.model_dtype}; accepted: "
                "torch.bfloat16, whose products are row-invariant from two rows up"
            )
        if self.options.schedule is not None and self.device_type != "cuda":
            raise UnsupportedError(
                f"schedule: {self.options.schedule!r} on {self.device_type}; accepted: null, for "
                "there is one schedule on it"
            )
        patches.apply(row_invariant_linears=wanted, fp32_logits=self.fp32_logits(kv_cache_dtype))


def _speculation(speculative: Any) -> policy.Speculation | None:
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    draft_config: Mapping[str, Any] = {}
    # Without a draft model (ngram), vLLM puts the target's configuration there.
    if draft is not None and draft is not getattr(speculative, "target_model_config", None):
        draft_config = draft.hf_config.to_dict()
    return policy.Speculation(
        method=str(speculative.method),
        num_speculative_tokens=int(speculative.num_speculative_tokens or 0),
        draft_config=draft_config,
    )
