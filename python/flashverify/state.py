"""Partial attention results, and their exact merge."""

from __future__ import annotations

import torch

from flashverify import _native, runtime
from flashverify._arguments import check_tensor
from flashverify._dispatch import must_dispatch, refuse_autograd
from flashverify.workspace import current_stream


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges n partial results of the same rows over disjoint sets of keys.

    By the fixed binary tree in ascending order of the first axis, in FP32. A
    partial with LSE -inf saw nothing and contributes nothing, whatever its output
    holds; where all are -inf the result is 0 and -inf.

    Args:
      outs: float32 [n, rows, heads, head_dim], each normalised by its own sum; last
        axis contiguous.
      lses: float32 [n, rows, heads], natural logarithm.

    Returns:
      (out, lse): float32 [rows, heads, head_dim] and float32 [rows, heads].

    Raises:
      InvalidArgumentError, UnsupportedError: An argument that cannot be used.
    """
    if must_dispatch(outs, lses, lses):
        merged: tuple[torch.Tensor, torch.Tensor] = torch.ops.flashverify.merge_states(outs, lses)
        return merged
    return merge(outs, lses)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` on tensors that hold memory, past torch's dispatcher."""
    check_tensor("outs", outs, "n, rows, heads, head_dim")
    check_tensor("lses", lses, "n, rows, heads")
    refuse_autograd(outs=outs, lses=lses)
    # A tensor may stand for its negation (the imaginary part of a conjugate), which DLPack
    # does not carry.
    outs, lses = outs.resolve_neg(), lses.resolve_neg()
    shape = outs.shape[1:]
    out = outs.new_empty(shape, dtype=torch.float32)
    lse = outs.new_empty(shape[:-1], dtype=torch.float32)
    _native.merge_states(
        outs, lses, out, lse, runtime.get_num_threads(), current_stream(outs.device),
        runtime.current_cuda_image(),
    )  # fmt: skip
    return out, lse
