"""The mask function: what transformers knows of visibility, in the library's words.

transformers would make a [batch, 1, q, kv] tensor of booleans. Causality, a sliding
window and left padding need none: they are lengths. Anything else is refused here,
since attention without its mask would silently see too much.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from flashverify.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class PagedMask:
    """Visibility of one forward pass.

    ``left_padding`` is int32 [batch], leading tokens that nothing sees, or None for
    none at all. ``kv_tokens`` counts the tokens of each row of the batch, those of this
    pass and the padding included; ``window`` those that a row sees at most, itself
    included, None being all.
    """

    q_tokens: int
    kv_tokens: int
    window: int | None
    left_padding: torch.Tensor | None


def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **_others: Any,
) -> PagedMask:
    """The mask of a pass; the signature is transformers' `AttentionMaskInterface`.

    Args:
      batch_size: Rows of the batch.
      q_length: Tokens of this pass in each.
      kv_length: Tokens of the cache and of this pass.
      q_offset: Tokens in the cache.
      kv_offset: Tokens that the cache no longer holds: 0 with a paged cache.
      mask_function: The pattern: causal, or causal within a sliding window.
      attention_mask: bool [batch_size, tokens], False for padding; None is no padding.
      use_vmap: Whether the caller put a mask of its own over the pattern.

    Raises:
      UnsupportedError: Visibility that is not causal, a window and left padding.
    """
    if use_vmap:
        raise UnsupportedError(
            "mask_function: the model's own pattern over the causal one; accepted: causal, or "
            "causal within a sliding window"
        )
    window = _window(mask_function)
    if kv_offset != 0 or q_offset + q_length != kv_length:
        raise UnsupportedError(
            f"past_key_values: holds tokens {kv_offset} to {kv_length} for queries from "
            f"{q_offset}; accepted: a paged cache, which holds all of them (see enable())"
        )
    return PagedMask(
        q_tokens=q_length,
        kv_tokens=kv_length,
        window=window,
        left_padding=_left_padding(attention_mask, batch_size, kv_length),
    )


def _window(mask_function: Callable[..., Any]) -> int | None:
    """Tokens of the sliding window, None where there is none."""
    if mask_function is masking_utils.causal_mask_function:
        return None
    # transformers hands a closure over, and no word of what it computes.
    both = masking_utils.and_masks(masking_utils.causal_mask_function)
    window = masking_utils.sliding_window_overlay(1)
    if _code(mask_function) is _code(both):
        parts = _captured(mask_function)["mask_functions"]
        if [_code(part) for part in parts] == [
            _code(window),
            _code(masking_utils.causal_mask_function),
        ]:
            return int(_captured(parts[0])["sliding_window"])
    raise UnsupportedError(
        f"mask_function: {getattr(mask_function, '__qualname__', mask_function)!s}; accepted: "
        "causal, or causal within a sliding window"
    )


def _code(function: Callable[..., Any]) -> object:
    return getattr(function, "__code__", function)


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def _left_padding(
    attention_mask: torch.Tensor | None, batch_size: int, kv_tokens: int
) -> torch.Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < kv_tokens:
        raise UnsupportedError(
            f"attention_mask: shape {list(attention_mask.shape)}; accepted: "
            f"[{batch_size}, {kv_tokens}], a flag for each token"
        )
    seen = attention_mask[:, :kv_tokens].to(torch.bool)
    if bool(seen.all()):
        return None
    padding = kv_tokens - seen.sum(dim=1)
    places = torch.arange(kv_tokens, device=seen.device)
    holes = (seen != (places >= padding[:, None])).any(dim=1)
    if bool(holes.any()):
        row = int(holes.nonzero()[0])
        raise UnsupportedError(
            f"attention_mask: row {row} hides a token to the right of one that it shows; "
            "accepted: padding on the left, as tokenizers make it for generation"
        )
    return padding.to(torch.int32)
