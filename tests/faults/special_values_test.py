"""NaN and infinities that rows do see."""

import functools
import math

import pytest
import torch

from tests.oracle import fp8
from tests.support import backends, cases, tolerances

ROUTES = pytest.mark.parametrize("route", [*backends.FP32_ROUTES, "grouped_half", "scalar_half"])
FP32_ROUTES = pytest.mark.parametrize("route", backends.FP32_ROUTES)
SHAPE = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}


INFINITY = {"fp8_e5m2": 0x7C, "float16": 0x7C00, "bfloat16": 0x7F80}
SIGN = {"fp8_e5m2": 0x80, "float16": -(2**15), "bfloat16": -(2**15)}


@functools.cache
def _of_nan_codes(kv_dtype: str, position: int) -> cases.Case:
    """One request, and copies of it with each NaN code in one element of K, then of V."""
    request = cases.random_request(2, q_len=8, seq_len=1096, kv_dtype=kv_dtype, **SHAPE)
    requests = [request]
    for code in fp8.BY_NAME[kv_dtype].nan_codes:
        for name in ("k", "v"):
            contents = {"k": request.k.clone(), "v": request.v.clone()}
            cases.bits(contents[name])[position, 1, 37] = code
            requests.append(cases.Request(request.q, **contents))
    return cases.paged(requests)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("position", [0, 1, 31, 63, 64, 100, 1023, 1024, 1090, 1092, 1095])
@ROUTES
@backends.on_every_backend
def test_nan_reaches_exactly_the_rows_that_attend_it(
    kv_dtype: str, position: int, route: str, backend: backends.Backend
) -> None:
    """A NaN key makes a row NaN, LSE included; a NaN value its own dimension.

    All other rows and heads keep their bits.
    """
    result = backends.attend(_of_nan_codes(kv_dtype, position), backend, route=route)
    out, lse = result.out.view(-1, 8, 4, 64), result.lse.view(-1, 8, 4)
    assert torch.isfinite(out[0]).all()
    sees = torch.arange(8) >= position - (1096 - 8)
    for index in range(1, len(out)):
        code = fp8.BY_NAME[kv_dtype].nan_codes[(index - 1) // 2]
        key = index % 2 == 1
        should = torch.zeros_like(out[0], dtype=torch.bool)
        should[sees, 2:, slice(None) if key else 37] = True
        what = f"{'key' if key else 'value'} {code:#x}"
        assert torch.equal(torch.isnan(out[index]), should), what
        assert torch.equal(torch.isnan(lse[index]), should.all(-1)), what
        same = cases.bits(out[index]) == cases.bits(out[0])
        assert same[~should].all(), f"{what}: a row that does not see it changed"


@ROUTES
@backends.on_every_backend
def test_nan_value_of_vanishing_weight(route: str, backend: backends.Backend) -> None:
    """A weight that underflows to 0 is still attended: 0 x NaN is NaN, never 0."""
    for loser in (0, 5, 70, 1500):
        q = torch.ones((1, 1, 64), dtype=torch.float16)
        k = torch.ones((1600, 1, 64), dtype=torch.float16)
        k[loser] = -30.0
        v = torch.ones((1600, 1, 64), dtype=torch.float16)
        v[loser, 0, 3] = math.nan
        case = cases.paged([cases.Request(q, k, v)], scale=1.0)
        out = backends.attend(case, backend, route=route).out
        assert torch.isnan(out).nonzero().tolist() == [[0, 0, 3]], f"key {loser}"


@ROUTES
@backends.on_every_backend
def test_nan_query_stays_in_its_row(route: str, backend: backends.Backend) -> None:
    request = cases.random_request(3, q_len=4, seq_len=200, **SHAPE)
    clean = backends.attend(cases.paged([request]), backend, route=route)
    q = request.q.clone()
    q[1, 2, 0] = math.nan
    case = cases.paged([cases.Request(q, request.k, request.v)])
    result = backends.attend(case, backend, route=route)
    assert torch.isnan(result.out[1, 2]).all() and torch.isnan(result.lse[1, 2])
    others = torch.ones((4, 4), dtype=torch.bool)
    others[1, 2] = False
    backends.assert_same_bits(
        backends.Result(result.out[others], result.lse[others]),
        backends.Result(clean.out[others], clean.lse[others]),
    )


@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "float16", "bfloat16"])
@FP32_ROUTES
@backends.on_every_backend
def test_infinite_values(kv_dtype: str, route: str, backend: backends.Backend) -> None:
    """An infinite value makes its dimension infinite; two opposite ones make it NaN.

    On CUDA one is enough for NaN: P is a sum of two operands there, of either sign.
    """
    for position in (0, 70, 1100):
        k = cases.to_cache_dtype(torch.zeros((1200, 1, 64)), kv_dtype)
        values = torch.ones((1200, 1, 64))
        v = cases.to_cache_dtype(values, kv_dtype)
        patterns = cases.bits(v)
        patterns[position, 0, 1:4] = INFINITY[kv_dtype]
        patterns[position + 1, 0, 2] = INFINITY[kv_dtype] | SIGN[kv_dtype]
        patterns[position, 0, 3] = INFINITY[kv_dtype] | SIGN[kv_dtype]
        q = torch.ones((1, 1, 64), dtype=torch.float16)
        result = backends.attend(cases.paged([cases.Request(q, k, v)]), backend, route=route)
        row = result.out[0, 0]
        if backend.device == "cuda":
            assert torch.isnan(row[1:4]).all()
        else:
            assert row[1] == math.inf and torch.isnan(row[2]) and row[3] == -math.inf
        assert row[0] == 1 and row[4:].eq(1).all()


@functools.cache
def _of_infinite_key(kv_dtype: str, position: int) -> tuple[tolerances.Expected, torch.Tensor]:
    """Two rows and heads: head 0 scores the key +inf, head 1 -inf. And the answer without it."""
    request = cases.random_request(4, q_len=2, seq_len=1200, q_heads=2, kv_dtype=kv_dtype)
    q, k = request.q.clone(), request.k.clone()
    q[:, :, 5] = torch.tensor([[1.0, -1.0], [2.0, -0.5]])
    cases.bits(k)[position, 0, 5] = INFINITY[kv_dtype]
    case = cases.paged([cases.Request(q, k, request.v)], causal=False)
    rest = [i for i in range(1200) if i != position]
    without = cases.paged([cases.Request(q, k[rest], request.v[rest])], causal=False)
    return tolerances.expected(case), without.expected().out


@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "float16", "bfloat16"])
@FP32_ROUTES
@backends.on_every_backend
def test_infinite_keys(kv_dtype: str, route: str, backend: backends.Backend) -> None:
    """A score of -inf counts for nothing; one of +inf has no softmax, and gives NaN."""
    for position in (0, 70, 1100):
        expected, without = _of_infinite_key(kv_dtype, position)
        assert torch.isnan(expected.exact.out[:, 0]).all()
        torch.testing.assert_close(expected.exact.out[:, 1], without[:, 1], rtol=1e-12, atol=0)
        result = backends.attend(expected.case, backend, route=route, out_dtype=torch.float32)
        expected.check(result.out, result.lse, what=f"{route} on {backend}, key {position}")
