"""The two changes to vLLM's own layers that an engine may ask for. Imports vLLM.

Both wrap one function of vLLM, once for the process, and do what the engine built last
asked for; with neither asked for they pass the call on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from flashverify.errors import UnsupportedError
from flashverify.integrations.row_invariant_linear import with_two_rows
from flashverify.integrations.vllm import engine
from flashverify.logits import lm_head_logits


@dataclass
class _Wanted:
    row_invariant_linears: bool = False
    fp32_logits: bool = False
    installed: bool = False


_wanted: Final = _Wanted()


def apply(*, row_invariant_linears: bool, fp32_logits: bool) -> None:
    """Makes the engine's linears row-invariant, and its logits FP32, or not."""
    _wanted.row_invariant_linears = row_invariant_linears
    _wanted.fp32_logits = fp32_logits
    if _wanted.installed or not (row_invariant_linears or fp32_logits):
        return
    # Looked up at each call, by every unquantised linear and embedding.
    engine.linear_layers.cpu_unquantized_gemm = _row_invariant(
        engine.linear_layers.cpu_unquantized_gemm
    )
    processor = engine.logits_processor.LogitsProcessor
    processor._apply_head = _in_fp32(processor._apply_head)
    _wanted.installed = True


def _row_invariant(gemm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def row_invariant_gemm(
        layer: torch.nn.Module,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _wanted.row_invariant_linears:
            return gemm(layer, x, weight, bias)
        if torch.compiler.is_compiling():
            # Traced once for every number of rows: a row more, always.
            padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))
            return gemm(layer, padded, weight, bias)[: x.shape[0]]
        return with_two_rows(lambda rows: gemm(layer, rows, weight, bias), x)

    return row_invariant_gemm


def _in_fp32(apply_head: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply_fp32_head(
        processor: Any,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if not _wanted.fp32_logits:
            return apply_head(processor, lm_head, hidden_states, embedding_bias)
        weight = getattr(lm_head, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dtype != hidden_states.dtype:
            found = getattr(weight, "dtype", "none")
            raise UnsupportedError(
                f"fp32_logits: an LM head with weights of {found} and hidden states of "
                f"{hidden_states.dtype}; accepted: an unquantised LM head of the model's dtype, or "
                "the option fp32_logits: false"
            )
        return lm_head_logits(hidden_states, weight, embedding_bias)

    return apply_fp32_head
