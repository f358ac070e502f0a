"""append_kv to the bit: every 16-bit value, and FP32 values around every rounding boundary."""

import math

import pytest
import torch

import flashverify as fv
from tests.oracle import fp8, kv_cache
from tests.support import backends, cases

FORMATS = pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=lambda format: format.name)
HEAD_DIM = 64


def _append_everything(
    values: torch.Tensor, cache_dtype: torch.dtype, device: str, scale: float | None = None
) -> torch.Tensor:
    """What flat values become in a cache, K and V alike, in order."""
    padding = -len(values) % HEAD_DIM
    rows = torch.cat([values, values[:1].expand(padding)]).view(-1, 1, HEAD_DIM).to(device)
    page_size = 16
    pages = -(-len(rows) // page_size)
    k_cache, v_cache = (
        cases.poisoned_storage(cache_dtype, pages, page_size, 1, HEAD_DIM).to(device)
        for _ in range(2)
    )
    slots = torch.arange(len(rows), device=device)
    fv.append_kv(rows, rows, k_cache, v_cache, slots, k_dequant_scale=scale, v_dequant_scale=scale)
    as_bits = [cases.bits(cache).flatten()[: len(values)].cpu() for cache in (k_cache, v_cache)]
    assert torch.equal(as_bits[0], as_bits[1])
    return as_bits[0]


def _assert_encoded(values: torch.Tensor, format: fp8.Format, device: str) -> None:
    codes = _append_everything(values, cases.CACHE_DTYPES[format.name], device)
    nan = torch.isnan(values)
    assert torch.isnan(format.decode(codes[nan])).all(), "NaN stays NaN"
    expected = format.encode(values[~nan])
    wrong = (codes[~nan] != expected).nonzero().flatten()
    assert len(wrong) == 0, [
        (float(values[~nan][i]), hex(int(codes[~nan][i])), hex(int(expected[i])))
        for i in wrong[:8].tolist()
    ]


@FORMATS
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@backends.on_every_device
def test_every_16_bit_value(
    format: fp8.Format, source: torch.dtype, backend: backends.Backend
) -> None:
    patterns = torch.arange(65536).to(torch.uint16).view(source)
    _assert_encoded(patterns, format, backend.device)


def _around(values: torch.Tensor) -> torch.Tensor:
    """FP32 values with their three neighbours on either side, of both signs."""
    near = [values]
    for direction in (math.inf, -math.inf):
        step = values
        for _ in range(3):
            step = torch.nextafter(step, torch.tensor(direction, dtype=torch.float32))
            near.append(step)
    both = torch.cat(near)
    return torch.cat([both, -both])


@FORMATS
@backends.on_every_device
def test_fp32_around_every_boundary(format: fp8.Format, backend: backends.Backend) -> None:
    magnitudes = format.magnitudes.to(torch.float32)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    overflow = magnitudes[-1] + (magnitudes[-1] - magnitudes[-2]) / 2
    specials = torch.tensor(
        [0.0, 2.0**-149, 2.0**-126, 2.0**-25, float(overflow), 1e6, 3.4028235e38, math.inf]
    )
    values = torch.cat([_around(magnitudes), _around(ties), _around(specials)])
    nans = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    nans = torch.cat([nans, nans | -(2**31)]).view(torch.float32)
    _assert_encoded(torch.cat([values, nans]), format, backend.device)


@FORMATS
@backends.on_every_device
def test_random_fp32(format: fp8.Format, backend: backends.Backend) -> None:
    """All exponents, random significands."""
    generator = torch.Generator().manual_seed(11)
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=generator)
    _assert_encoded(patterns.to(torch.int32).view(torch.float32), format, backend.device)


@FORMATS
@pytest.mark.parametrize("scale", [0.1, 1 / 3, 0.75, 2.5, 3e-3, 117.0])
@backends.on_every_device
def test_scale_divides(format: fp8.Format, scale: float, backend: backends.Backend) -> None:
    """A division, correctly rounded: a product with the reciprocal moves some of these ties."""
    magnitudes = format.magnitudes.to(torch.float32)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = _around(ties * torch.tensor(scale))
    dtype = cases.CACHE_DTYPES[format.name]
    codes = _append_everything(values, dtype, backend.device, scale)
    assert torch.equal(codes, kv_cache.encode(values.view(-1, 1, 1), scale, dtype).flatten())


def test_scale_test_can_fail() -> None:
    """A product with the reciprocal gives other codes on the values above."""
    ties = (fp8.E4M3.magnitudes[1:] + fp8.E4M3.magnitudes[:-1]).to(torch.float32) / 2
    scale = torch.tensor(0.1)
    values = _around(ties * scale)
    assert not torch.equal(fp8.E4M3.encode(values / scale), fp8.E4M3.encode(values * (1 / scale)))


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@backends.on_every_device
def test_wide_caches_round_to_nearest_even(
    cache_dtype: torch.dtype, source: torch.dtype, backend: backends.Backend
) -> None:
    """torch's own conversions between IEEE types are the reference here."""
    generator = torch.Generator().manual_seed(12)
    patterns = torch.randint(-(2**31), 2**31, (50_000,), generator=generator)
    noise = torch.randn(50_000, generator=generator)
    values = torch.cat([patterns.to(torch.int32).view(torch.float32), noise, noise * 1e-6])
    values = values.to(source)
    got = _append_everything(values, cache_dtype, backend.device)
    nan = torch.isnan(values)
    assert torch.equal(got[~nan], cases.bits(values.to(torch.float32).to(cache_dtype))[~nan])
    assert torch.isnan(got[nan].view(cache_dtype)).all()


@FORMATS
@backends.on_every_device
def test_every_code_survives_a_round_trip(format: fp8.Format, backend: backends.Backend) -> None:
    """decode, then append: the same code, but for the infinities, which saturate."""
    finite = torch.isfinite(format.values)
    codes = torch.arange(256)[finite].to(torch.uint8)
    got = _append_everything(
        format.values[finite].to(torch.float32), cases.CACHE_DTYPES[format.name], backend.device
    )
    assert torch.equal(got, codes)
