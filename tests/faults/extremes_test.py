"""Scores, scales, caps and sinks at the ends of their ranges."""

import functools
import math

import pytest
import torch

from tests.support import backends, cases, tolerances

ROUTES = pytest.mark.parametrize("route", [*backends.FP32_ROUTES, "grouped_half", "scalar_half"])
FP32_ROUTES = pytest.mark.parametrize("route", backends.FP32_ROUTES)
SHAPE = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}


def check(expected: tolerances.Expected, backend: backends.Backend, route: str) -> backends.Result:
    """Runs a case with FP32 output and compares it with its answer."""
    result = backends.attend(expected.case, backend, route=route, out_dtype=torch.float32)
    half = route in backends.HALF_ROUTES
    expected.check(result.out, result.lse, half_partials=half, what=f"{route} on {backend}")
    return result


@functools.cache
def _of_options(q_len: int, seq_len: int, **options: float) -> tolerances.Expected:
    request = cases.random_request(7, q_len=q_len, seq_len=seq_len, **SHAPE)
    return tolerances.expected(cases.paged([request], **options))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e20, 1e30])
@ROUTES
@backends.on_every_backend
def test_one_hot_scores(size: float, route: str, backend: backends.Backend) -> None:
    """One key far above the rest: its value comes out to the bit, whatever the scores' size."""
    generator = torch.Generator().manual_seed(4)
    v = torch.randn((1200, 1, 64), generator=generator).to(torch.float16)
    q = torch.ones((2, 1, 64), dtype=torch.float16)
    for winner in (0, 63, 64, 1023, 1024, 1198):
        k = torch.full((1200, 1, 64), -2.0, dtype=torch.float16)
        k[winner] = 2.0
        case = cases.paged([cases.Request(q, k, v)], scale=size)
        result = backends.attend(case, backend, route=route)
        assert torch.equal(cases.bits(result.out), cases.bits(v[winner].expand(2, 1, 64))), winner
        lse = torch.full((2, 1), 128.0 * size)
        torch.testing.assert_close(result.lse, lse, rtol=2.0**-21, atol=0)


@functools.cache
def _of_zero_queries(sign: int, softcap: float) -> tolerances.Expected:
    request = cases.random_request(5, q_len=3, seq_len=3000, **SHAPE)
    q = sign * torch.zeros_like(request.q)
    zero = cases.Request(q, request.k, request.v)
    return tolerances.expected(cases.paged([zero], softcap=softcap))


@pytest.mark.parametrize(("sign", "softcap"), [(1, 0.0), (-1, 0.0), (1, 30.0), (1, 1e-39)])
@ROUTES
@backends.on_every_backend
def test_equal_scores(sign: int, softcap: float, route: str, backend: backends.Backend) -> None:
    """The mean of the values, and log(n)."""
    result = check(_of_zero_queries(sign, softcap), backend, route)
    counts = torch.tensor([2998.0, 2999.0, 3000.0]).log()[:, None].expand(3, 4)
    torch.testing.assert_close(result.lse, counts, rtol=2.0**-21, atol=0)


@functools.cache
def _of_slope(slope: float) -> tolerances.Expected:
    """Scores slope x position, exact in FP32 before the scale."""
    length = 1500
    q = torch.zeros((1, 1, 64), dtype=torch.float32)
    q[..., 0], q[..., 1] = 1.0, 32.0
    k = torch.zeros((length, 1, 64), dtype=torch.float16)
    steps = torch.arange(length)
    k[:, 0, 0], k[:, 0, 1] = (steps % 32).to(torch.float16), (steps // 32).to(torch.float16)
    v = torch.randn((length, 1, 64), generator=torch.Generator().manual_seed(6))
    request = cases.Request(q, k, v.to(torch.float16))
    return tolerances.expected(cases.paged([request], scale=slope))


@pytest.mark.parametrize("slope", [0.01, 0.1, 1.0, -0.1, -1.0])
@ROUTES
@backends.on_every_backend
def test_ascending_and_descending_scores(
    slope: float, route: str, backend: backends.Backend
) -> None:
    """Ascending, every tile brings a new maximum; descending, the first one stays."""
    check(_of_slope(slope), backend, route)


@pytest.mark.parametrize("scale", [100.0, -50.0, 1e-30, 0.0])
@ROUTES
@backends.on_every_backend
def test_extreme_scales(scale: float, route: str, backend: backends.Backend) -> None:
    result = check(_of_options(4, 1100, scale=scale), backend, route)
    assert torch.isfinite(result.out).all() and torch.isfinite(result.lse).all()


@functools.cache
def _of_sink(sink: float) -> tolerances.Expected:
    request = cases.random_request(8, q_len=2, seq_len=1100, **SHAPE)
    sinks = torch.tensor([sink, 0.0, sink, 5.0])
    return tolerances.expected(cases.paged([request], sinks=sinks))


@pytest.mark.parametrize("sink", [1e4, 1e30, -1e4, -1e30, -math.inf])
@ROUTES
@backends.on_every_backend
def test_extreme_sinks(sink: float, route: str, backend: backends.Backend) -> None:
    result = check(_of_sink(sink), backend, route)
    if sink > 0:
        assert result.out[:, ::2].eq(0).all() and result.lse[:, ::2].eq(sink).all()


@pytest.mark.parametrize("softcap", [1e-3, 0.1, 1e3, 1e6])
@pytest.mark.parametrize("scale", [0.125, 1e4])
@ROUTES
@backends.on_every_backend
def test_extreme_softcaps(
    softcap: float, scale: float, route: str, backend: backends.Backend
) -> None:
    """A small cap makes scores equal, a large one leaves them alone; neither costs accuracy."""
    check(_of_options(2, 700, softcap=softcap, scale=scale), backend, route)


@ROUTES
@backends.on_every_backend
def test_saturated_softcap(route: str, backend: backends.Backend) -> None:
    """Scores a thousand times the cap: each becomes plus or minus the cap, exactly."""
    positive = torch.arange(1100) % 3 == 0
    k = torch.where(positive[:, None, None], 2.0, -2.0).expand(1100, 1, 64).to(torch.float16)
    q = torch.ones((1, 1, 64), dtype=torch.float16)
    v = torch.where(positive[:, None, None], 3.0, -1.0).expand(1100, 1, 64).to(torch.float16)
    case = cases.paged([cases.Request(q, k, v)], softcap=50.0, scale=1e3)
    result = backends.attend(case, backend, route=route)
    assert result.out.eq(3).all(), "exp(-100) of the others is lost in the rounding"
    lse = 50.0 + torch.tensor([[float(positive.sum())]]).log()
    torch.testing.assert_close(result.lse, lse, rtol=2.0**-21, atol=0)


@pytest.mark.parametrize("value_scale", [1e-38, 1e-35, 1e-3, 1e30])
@FP32_ROUTES
@backends.on_every_backend
def test_extreme_value_scales(value_scale: float, route: str, backend: backends.Backend) -> None:
    """FP32 output keeps them; the scale multiplies FP32 before the one rounding."""
    if backend.device == "cuda" and value_scale < 1e-36:
        pytest.skip("CUDA multiplies by scale / sum, which has lost bits where it is subnormal")
    check(_of_options(2, 300, v_dequant_scale=value_scale), backend, route)


@FP32_ROUTES
@backends.on_every_backend
def test_value_scale_at_the_end_of_the_normal_range(route: str, backend: backends.Backend) -> None:
    """The output is a normal number, though the scale over the number of keys is none.

    CUDA multiplies by that quotient, which has lost bits: half a step of 2^-149.
    """
    q = torch.ones((1, 1, 64), dtype=torch.float16)
    k = torch.ones((3000, 1, 64), dtype=torch.float16)
    v = torch.full((3000, 1, 64), 448.0, dtype=torch.float16)
    case = cases.paged([cases.Request(q, k, v)], v_dequant_scale=2.0**-126)
    out = backends.attend(case, backend, route=route, out_dtype=torch.float32).out
    rtol = 1e-6 if backend.device == "cpu" else 3000 * 2.0**-24
    torch.testing.assert_close(out / 2.0**-126, torch.full_like(out, 448.0), rtol=rtol, atol=0)


@FP32_ROUTES
@backends.on_every_backend
def test_value_scale_comes_before_the_rounding(route: str, backend: backends.Backend) -> None:
    """Outputs too large or too small for FP16 before the scale are right after it."""
    for values, value_scale in ((40000.0, 2.0**-10), (2.0**-14, 2.0**12)):
        k = torch.zeros((8, 1, 64), dtype=torch.bfloat16)
        v = torch.full((8, 1, 64), values, dtype=torch.bfloat16)
        v[::2] *= 3
        q = torch.ones((1, 1, 64), dtype=torch.float16)
        case = cases.paged([cases.Request(q, k, v)], v_dequant_scale=value_scale)
        result = backends.attend(case, backend, route=route, out_dtype=torch.float16)
        exact = case.expected().out
        assert torch.equal(result.out, exact.to(torch.float16))
