"""The precision contract: within 1.05 x the error of rounding the exact answer once.

Random normal data, the shape of a DFlash2 verification, contexts from 1K to 256K.
The half arms run over the same bytes and must miss the bound: a bound that nothing
can fail shows nothing.
"""

import functools

import pytest
import torch

from tests.oracle import attention as oracle
from tests.support import backends, cases, tolerances

BOUND = 1.05
CONTEXTS = pytest.mark.parametrize("context", [1024, 16384, 65536, 262144])
FP32_ROUTES = pytest.mark.parametrize("route", backends.FP32_ROUTES)

# Relative to an output of random normal data, the FP32 state's own error is a random
# walk of one rounding per dimension of a score and per key of a split (the splits'
# errors average as their outputs do): sqrt(256 + 1024) x 2^-24. Four times that leaves
# room for the worst of 48 rows, and is a twentieth of the FP16 floor.
FP32_ERROR = 4 * 1280**0.5 * 2.0**-24


@functools.lru_cache(maxsize=1)
def _verification(context: int, q_len: int = 8) -> tuple[cases.Case, oracle.Answer]:
    """q 8, 6 query heads on 1 KV head of 256, page 3296, E4M3.

    torch's own cast makes the cache here, the oracle's encoder being slow for 134 MB:
    whatever bytes it gives, both sides read the same.
    """
    generator = torch.Generator().manual_seed(context)
    q = torch.randn((q_len, 6, 256), generator=generator).to(torch.float16)
    k, v = (
        torch.randn((context, 1, 256), generator=generator).to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    case = cases.paged([cases.Request(q, k, v)], page_size=3296)
    return case, case.expected()


def check(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """The bound for the whole and for every row: no row may hide behind the others."""
    floor = tolerances.rounding_floor(exact, actual.dtype)
    error = tolerances.relative_l2(actual, exact)
    assert error <= BOUND * floor, f"relative L2 {error:.4e}, floor {floor:.4e}"
    row_floors = tolerances.row_relative_l2(exact.to(actual.dtype), exact)
    ratios = tolerances.row_relative_l2(actual, exact) / row_floors
    assert float(ratios.max()) <= BOUND, f"a row is at {float(ratios.max()):.4f} x its own floor"


@CONTEXTS
@FP32_ROUTES
@backends.on_every_device
def test_verification(context: int, route: str, backend: backends.Backend) -> None:
    """FP16 and BF16 outputs at their floors, and FP32 at that of the state."""
    case, exact = _verification(context)
    floor = tolerances.rounding_floor(exact.out, torch.float16)
    assert 1.9e-4 < floor < 2.3e-4, "the floor of normal data is about 2.07e-4"
    for out_dtype in (torch.float16, torch.bfloat16):
        check(backends.attend(case, backend, route=route, out_dtype=out_dtype).out, exact.out)
    result = backends.attend(case, backend, route=route, out_dtype=torch.float32)
    assert float(tolerances.row_relative_l2(result.out, exact.out).max()) < FP32_ERROR
    lse_error = (result.lse.to(torch.float64) - exact.lse).abs()
    assert float(lse_error.max()) < FP32_ERROR + 2.0**-24 * float(exact.lse.abs().max())


@CONTEXTS
@pytest.mark.parametrize("route", ["grouped_half", "scalar_half"])
@backends.on_every_device
def test_half_arms_miss_the_bound(context: int, route: str, backend: backends.Backend) -> None:
    case, exact = _verification(context)
    result = backends.attend(case, backend, route=route)
    floor = tolerances.rounding_floor(exact.out, torch.float16)
    error = tolerances.relative_l2(result.out, exact.out)
    assert 1.2 * floor < error < 3 * floor, f"{error / floor:.3f} x the floor"
    with pytest.raises(AssertionError, match="relative L2"):
        check(result.out, exact.out)


@backends.on_every_device
def test_xqa_misses_the_bound(backend: backends.Backend) -> None:
    case, exact = _verification(4096, q_len=1)
    half = backends.attend(case, backend, route="xqa_half")
    with pytest.raises(AssertionError, match="relative L2"):
        check(half.out, exact.out)
    check(backends.attend(case, backend, route="grouped_fp32").out, exact.out)


@pytest.mark.parametrize("context", [100, 5000])
@FP32_ROUTES
@backends.on_every_backend
def test_every_instruction_set(context: int, route: str, backend: backends.Backend) -> None:
    case, exact = _verification(context)
    for out_dtype in (torch.float16, torch.bfloat16):
        check(backends.attend(case, backend, route=route, out_dtype=out_dtype).out, exact.out)


@functools.cache
def _of_dtypes(kv_dtype: str, q_dtype: torch.dtype) -> tuple[cases.Case, oracle.Answer]:
    request = cases.random_request(
        9, seq_len=2500, head_dim=128, kv_dtype=kv_dtype, q_dtype=q_dtype
    )
    case = cases.paged([request], page_size=1728)
    return case, case.expected()


@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16])
@FP32_ROUTES
@backends.on_every_backend
def test_every_cache_dtype(
    kv_dtype: str, q_dtype: torch.dtype, route: str, backend: backends.Backend
) -> None:
    case, exact = _of_dtypes(kv_dtype, q_dtype)
    for out_dtype in (torch.float16, torch.bfloat16):
        check(backends.attend(case, backend, route=route, out_dtype=out_dtype).out, exact.out)


@functools.cache
def _cancelling_splits() -> tuple[cases.Case, oracle.Answer]:
    """Equal scores; values near +300 in one half of the keys, near -300 in the other.

    A partial output that is normalised and rounded to FP16 is off by up to 0.125; the
    answer itself is a few hundredths.
    """
    generator = torch.Generator().manual_seed(1)
    length = 4096
    q = torch.zeros((2, 2, 64), dtype=torch.float16)
    k = torch.zeros((length, 1, 64), dtype=torch.float16)
    v = 300 + torch.randn((length, 1, 64), generator=generator)
    v[length // 2 :] *= -1
    case = cases.paged([cases.Request(q, k, v.to(torch.float16))], causal=False)
    return case, case.expected()


@FP32_ROUTES
@backends.on_every_backend
def test_partials_are_not_rounded(route: str, backend: backends.Backend) -> None:
    """FP32 max and sum beside half-precision partial outputs: the fault this library ends."""
    case, exact = _cancelling_splits()
    out = backends.attend(case, backend, route=route, out_dtype=torch.float32).out
    # A random walk of 1024 roundings of sums of up to 300 each, over its own length.
    assert float((out - exact.out).abs().max()) < 4 * 32 * 300 * 2.0**-24
    half_route = route.replace("fp32", "half")
    half = backends.attend(case, backend, route=half_route, out_dtype=torch.float32).out
    assert float((half - exact.out).abs().max()) > 1e-2
