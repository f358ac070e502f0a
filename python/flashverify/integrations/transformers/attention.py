"""The attention function that transformers calls, and its registration."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from flashverify.errors import UnsupportedError
from flashverify.integrations.transformers.mask import PagedMask, paged_mask
from flashverify.integrations.transformers.paged_layer import LayerKeys

# transformers takes a name with "flash" in it for a package of kernels to download.
ATTENTION_NAME: Final = "paged_fp32_state"
"""The name under which transformers knows the attention and the mask function."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,  # noqa: ARG001 - the cache layer holds it
    attention_mask: PagedMask | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer; the signature is transformers' `AttentionInterface`.

    Args:
      module: The attention module.
      query: [batch, q_heads, tokens, head_dim].
      key: What `PagedLayer.update` returned, [batch, kv_heads, tokens, head_dim].
      value: As ``key``.
      attention_mask: What `paged_mask` returned.
      scaling: Factor of the scores; None is 1 / sqrt(head_dim).
      dropout: 0.
      softcap: Cap of the scores; None is none.
      s_aux: Attention sinks, [q_heads].
      position_bias: None.
      is_causal: None or True; the module's own is taken for None.
      output_attentions: False: no probabilities are ever stored.

    Returns:
      [batch, tokens, q_heads, head_dim], and None for the probabilities.

    Raises:
      UnsupportedError: Another cache or mask, or what the library does not compute.
    """
    layer = key.layer if isinstance(key, LayerKeys) else None
    if layer is None:
        raise UnsupportedError(
            "past_key_values: the keys do not come from a paged cache; accepted: the cache of "
            "Integration.new_cache(), or none given to the model that enable() was called with"
        )
    if not isinstance(attention_mask, PagedMask):
        raise UnsupportedError(
            f"attention_mask: {type(attention_mask).__name__}; accepted: None or flags [batch, "
            "tokens] for padding on the left"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for name, found, only in (
        ("dropout", dropout, 0.0),
        ("position_bias", position_bias, None),
        ("is_causal", causal, True),
        ("output_attentions", bool(output_attentions), False),
    ):
        if found is not only and (
            found is None or isinstance(found, torch.Tensor) or found != only
        ):
            raise UnsupportedError(f"{name}: {found!r}; accepted: {only}")
    out = layer.attend(
        query,
        attention_mask,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.to(torch.float32),
    )
    return out, None


def register() -> None:
    """Makes both functions known to transformers; a second call changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    # Without a mask function of the same name, causality would silently be lost.
    AttentionMaskInterface.register(ATTENTION_NAME, paged_mask)
