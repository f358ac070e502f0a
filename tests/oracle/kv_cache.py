"""The quantising cache write, from its definition."""

import torch

from tests.oracle import fp8


def encode(
    values: torch.Tensor, scales: float | torch.Tensor | None, cache_dtype: torch.dtype
) -> torch.Tensor:
    """What [tokens, kv_heads, head_dim] values become in a cache of cache_dtype.

    The division by the scale is one FP32 operation, correctly rounded; the rounding
    to the cache's type comes after it. FP8 comes back as uint8 codes.
    """
    quotient = values.to(torch.float32)
    if scales is not None:
        divisor = torch.as_tensor(scales, dtype=torch.float32).reshape(-1, 1)
        quotient = quotient / divisor
    if cache_dtype in fp8.BY_DTYPE:
        return fp8.BY_DTYPE[cache_dtype].encode(quotient)
    return quotient.to(cache_dtype)
