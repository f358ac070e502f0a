import math

import pytest
import torch

from flashverify.abba import reference, workload
from flashverify.abba.case import CHUNK_TOKENS, Case

CASES = [
    Case(context=100, q_len=3, q_heads=4, kv_heads=2, head_dim=64, page_size=48, batch=2),
    Case(context=CHUNK_TOKENS + 5, q_len=8, q_heads=2, kv_heads=1, head_dim=32, page_size=3296),
    Case(context=3, q_len=5, q_heads=3, kv_heads=3, head_dim=16, page_size=2),
    Case(context=1, q_len=1, q_heads=1, kv_heads=1, head_dim=1, page_size=1, kv_dtype="bf16"),
    Case(context=70, q_len=2, q_heads=6, kv_heads=2, head_dim=80, page_size=16, kv_dtype="e5m2"),
]


def by_definition(made):
    """One row, one head at a time, over Python's own loops and exact sums."""
    case = made.case
    out = torch.zeros(case.rows, case.q_heads, case.head_dim, dtype=torch.float64)
    for request in range(case.batch):
        for head in range(case.q_heads):
            kv_head = head // case.group
            keys, values = (
                made.read(cache, request, 0, case.context, kv_head).double() * scale.double()
                for cache, scale in (
                    (made.k_cache, made.k_dequant_scale),
                    (made.v_cache, made.v_dequant_scale),
                )
            )
            for row in range(case.q_len):
                visible = max(0, case.context - case.q_len + row + 1)
                if visible == 0:
                    continue
                query = made.q[request * case.q_len + row, head].double()
                scores = [
                    math.fsum((query * key).tolist()) * made.softmax_scale for key in keys[:visible]
                ]
                weights = [math.exp(score - max(scores)) for score in scores]
                row_out = torch.tensor(weights, dtype=torch.float64) @ values[:visible]
                out[request * case.q_len + row, head] = row_out / math.fsum(weights)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocked_fp64_is_the_definition(case):
    made = workload.make(case, 1, None)
    torch.testing.assert_close(reference.fp64(made), by_definition(made), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_is_the_same_to_fp32(case):
    made = workload.make(case, 1, None)
    error = reference.compare(reference.fp32(made), reference.fp64(made))
    assert error.nonfinite_elements == 0
    assert error.relative_l2 is not None and error.relative_l2 < 1e-5


def test_per_head_scales_reach_their_heads():
    import dataclasses

    made = dataclasses.replace(
        workload.make(CASES[0], 1, None),
        k_dequant_scale=torch.tensor([0.01, 0.02]),
        v_dequant_scale=torch.tensor([0.03, 0.005]),
    )
    exact = reference.fp64(made)
    error = reference.compare(reference.fp32(made), exact)
    assert error.max_row_relative_l2 is not None and error.max_row_relative_l2 < 1e-5
    halved = dataclasses.replace(made, v_dequant_scale=torch.tensor([0.03, 0.0025]))
    half = reference.fp64(halved)
    torch.testing.assert_close(half[:, :2], exact[:, :2], rtol=0, atol=0)
    torch.testing.assert_close(half[:, 2:], exact[:, 2:] / 2, rtol=1e-6, atol=0)


def test_rows_that_see_nothing_are_zero():
    exact = reference.fp64(workload.make(CASES[2], 1, None))
    assert torch.all(exact[:2] == 0)
    assert torch.all(exact[2:].norm(dim=-1) > 0)


def test_errors_of_known_outputs():
    exact = torch.tensor([[[3.0, 4.0]], [[0.0, 0.1]]], dtype=torch.float64)
    out = torch.tensor([[[3.0, 4.5]], [[0.0, 0.2]]], dtype=torch.float64)
    error = reference.compare(out, exact)
    assert error.relative_l2 == pytest.approx(math.hypot(0.5, 0.1) / math.hypot(5, 0.1))
    # A small row that is wholly wrong shows, however large the others are.
    assert error.max_row_relative_l2 == pytest.approx(1.0)
    assert error.max_abs == pytest.approx(0.5)
    assert error.nonfinite_elements == 0
    assert reference.compare(exact, exact) == reference.Error(0.0, 0.0, 0.0, 0)


def test_a_row_that_should_be_zero_and_is_not_cannot_hide():
    exact = torch.zeros(1, 1, 2, dtype=torch.float64)
    assert reference.compare(exact, exact).max_row_relative_l2 == 0
    error = reference.compare(exact + 1e-30, exact)
    assert error.max_row_relative_l2 is not None and error.max_row_relative_l2 > 1e100


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_has_no_error(poison):
    exact = torch.ones(2, 2, 2, dtype=torch.float64)
    out = exact.clone()
    out[0, 0] = poison
    assert reference.compare(out, exact) == reference.Error(None, None, None, 2)


def test_the_rounding_floor_is_that_of_fp16():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(100, 10, 64, generator=generator, dtype=torch.float64)
    floor = reference.fp16_rounding_floor(exact)
    # Eleven significant bits: about 2^-11 / sqrt(3), less for the numbers high in a binade.
    assert floor == pytest.approx(2.07e-4, rel=0.02)
    assert reference.fp16_rounding_floor(exact.half().double()) == 0
    assert reference.fp16_rounding_floor(exact * 1e6) is None
