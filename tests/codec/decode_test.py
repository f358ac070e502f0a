"""All 256 codes of both FP8 formats, read back through attention.

With one key a row's output is that key's value, and its LSE is the score.
"""

import pytest
import torch

from tests.oracle import fp8
from tests.support import backends, cases

FORMATS = pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=lambda format: format.name)
ROUTES = pytest.mark.parametrize("route", backends.FP32_ROUTES + backends.HALF_ROUTES)
HEAD_DIM = 64


def _dtype(format: fp8.Format) -> torch.dtype:
    return cases.CACHE_DTYPES[format.name]


def attended(values: torch.Tensor, backend: backends.Backend) -> torch.Tensor:
    """What a row gives whose only key has these values: on CUDA infinities count as NaN."""
    if backend.device == "cpu":
        return values
    return values.masked_fill(torch.isinf(values), float("nan"))


@FORMATS
@ROUTES
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
@backends.on_every_backend
def test_every_value_code(
    format: fp8.Format, route: str, out_dtype: torch.dtype, backend: backends.Backend
) -> None:
    """Every FP8 value is a number of all three output types: not one bit may be lost."""
    codes = torch.arange(256).to(torch.uint8).view(4, HEAD_DIM)
    key = torch.zeros((1, 1, HEAD_DIM), dtype=_dtype(format))
    requests = [
        cases.Request(
            q=torch.ones((1, 1, HEAD_DIM), dtype=torch.float16),
            k=key,
            v=codes[quarter].view(1, 1, HEAD_DIM).view(_dtype(format)),
        )
        for quarter in range(4)
    ]
    result = backends.attend(cases.paged(requests), backend, route=route, out_dtype=out_dtype)
    got = result.out.reshape(256).to(torch.float64)
    expected = attended(format.values, backend)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert result.lse.eq(0).all(), "a value, NaN or not, does not touch the LSE"


@FORMATS
@ROUTES
@backends.on_every_backend
def test_every_key_code(format: fp8.Format, route: str, backend: backends.Backend) -> None:
    """256 requests of one key each, one element of which is the code; the query reads it out."""
    requests = []
    for code in range(256):
        key = torch.zeros((1, 1, HEAD_DIM), dtype=torch.uint8)
        query = torch.zeros((1, 1, HEAD_DIM), dtype=torch.float16)
        key[..., code % HEAD_DIM] = code
        query[..., code % HEAD_DIM] = 1.0
        value = torch.zeros_like(key).view(_dtype(format))
        requests.append(cases.Request(query, key.view(_dtype(format)), value))
    result = backends.attend(cases.paged(requests, scale=1.0), backend, route=route)
    lse = result.lse.reshape(256).to(torch.float64)
    ordinary = torch.isfinite(format.values)
    # Neighbouring codes are 2^-3 apart, relative; the two conversions between natural
    # and binary logarithm cost at most a few FP32 roundings.
    torch.testing.assert_close(lse[ordinary], format.values[ordinary], rtol=2.0**-21, atol=0)
    nan = torch.isnan(format.values)
    assert torch.isnan(lse[nan]).all() and torch.isnan(result.out[nan]).all()
    assert torch.isfinite(result.out[ordinary]).all()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("route", backends.FP32_ROUTES)
@backends.on_every_backend
def test_every_16_bit_value(kv_dtype: str, route: str, backend: backends.Backend) -> None:
    """Wide caches are read exactly too: every 16-bit pattern, subnormals included."""
    patterns = torch.arange(65536).to(torch.uint16).view(cases.CACHE_DTYPES[kv_dtype])
    values = patterns.view(-1, 1, 1, HEAD_DIM)
    key = torch.zeros((1, 1, HEAD_DIM), dtype=values.dtype)
    query = torch.ones((1, 1, HEAD_DIM), dtype=torch.float32)
    requests = [cases.Request(query, key, value) for value in values]
    result = backends.attend(cases.paged(requests, page_size=1), backend, route=route)
    expected = attended(patterns.to(torch.float32), backend)
    torch.testing.assert_close(result.out.reshape(-1), expected, rtol=0, atol=0, equal_nan=True)


@FORMATS
@backends.on_every_device
def test_uint8_with_a_name_is_the_typed_cache(
    format: fp8.Format, backend: backends.Backend
) -> None:
    """One meaning in every layer: the name and torch's dtype give the same bits."""
    case = cases.paged([cases.random_request(3, seq_len=100, kv_dtype=format.name)])
    typed = backends.attend(case, backend)
    named_case = cases.Case(
        case.q,
        case.k_cache.view(torch.uint8),
        case.v_cache.view(torch.uint8),
        case.page_table,
        case.seq_lens,
        case.query_start_loc,
        {"kv_dtype": format.name},
    )
    named = backends.attend(named_case, backend)
    backends.assert_same_bits(named, typed)
