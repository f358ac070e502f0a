"""vLLM's KV cache tensor, seen as the two caches that `flashverify` takes."""

from __future__ import annotations

import torch

from flashverify.errors import InvalidArgumentError


def split_kv(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and the value cache within one layer's cache; both are views.

    Args:
      kv_cache: [pages, kv_heads, page_size, 2 * head_dim], a token's key before its
        value; any strides with a contiguous last axis, so that each of vLLM's layouts
        is taken as it is.
      head_dim: Elements of one head.

    Returns:
      (k_cache, v_cache), each [pages, page_size, kv_heads, head_dim].

    Raises:
      InvalidArgumentError: A tensor of another shape.
    """
    shape, stride = list(kv_cache.shape), kv_cache.stride()
    if len(shape) != 4 or shape[3] != 2 * head_dim or (shape[3] > 1 and stride[3] != 1):
        raise InvalidArgumentError(
            f"kv_cache: shape {shape}, strides {list(stride)}; accepted: [pages, kv_heads, "
            f"page_size, {2 * head_dim}] with a contiguous last axis"
        )
    pages = kv_cache.transpose(1, 2)
    return pages[..., :head_dim], pages[..., head_dim:]
