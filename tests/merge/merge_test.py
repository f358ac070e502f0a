"""merge_states: the algebra of partial results, alone and with hostile states."""

import itertools
import math

import pytest
import torch

import flashverify as fv
from tests.oracle import state
from tests.support import backends, cases, tolerances

U = 2.0**-24


def _states(
    seed: int, n: int, rows: int = 3, heads: int = 4, dim: int = 20
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn((n, rows, heads, dim), generator=generator)
    return outs, torch.randn((n, rows, heads), generator=generator) * 3


def _merge(
    outs: torch.Tensor, lses: torch.Tensor, backend: backends.Backend = backends.CPU
) -> backends.Result:
    out, lse = fv.merge_states(
        backends.on_device(outs, backend.device), backends.on_device(lses, backend.device)
    )
    return backends.Result(out.cpu(), lse.cpu())


def _check(outs: torch.Tensor, lses: torch.Tensor, result: backends.Result) -> None:
    """Each weight is off by the rounding of its exponent and of exp, each sum by its length."""
    exact_out, exact_lse = state.merge(outs, lses)
    finite = lses[torch.isfinite(lses)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    weight_error = U * (8 * largest + 16)
    seen = (lses != -math.inf)[..., None]
    magnitude, _ = state.merge(torch.where(seen, outs, 0.0).abs(), lses)
    bound = (2 * weight_error + len(outs) * U + 4 * U) * magnitude + 2.0**-149
    assert ((result.out.to(torch.float64) - exact_out).abs() <= bound).all()
    empty = exact_lse == -math.inf
    assert torch.equal(result.lse == -math.inf, empty)
    error = (result.lse.to(torch.float64) - exact_lse)[~empty].abs()
    assert (error <= weight_error + len(outs) * U + U * exact_lse[~empty].abs()).all()


@pytest.mark.parametrize("n", [*range(1, 18), 31, 33, 64, 100, 257])
@backends.on_every_device
def test_against_the_oracle(n: int, backend: backends.Backend) -> None:
    outs, lses = _states(n, n)
    _check(outs, lses, _merge(outs, lses, backend))


@pytest.mark.parametrize("n", [2, 5, 16, 200])
@backends.on_every_device
def test_states_that_saw_nothing(n: int, backend: backends.Backend) -> None:
    """An LSE of -inf counts for nothing, whatever output lies beside it."""
    outs, lses = _states(n, n, rows=40)
    empty = torch.rand(lses.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    empty[:, 0] = True  # a row of nothing
    lses[empty] = -math.inf
    outs[empty] = torch.tensor([math.nan, math.inf, 1e30, -1.0]).repeat(5)
    result = _merge(outs, lses, backend)
    _check(outs, lses, result)
    assert result.out[0].eq(0).all() and result.lse[0].eq(-math.inf).all()
    zeroed = torch.where(empty[..., None], 0.0, outs)
    backends.assert_same_bits(result, _merge(zeroed, lses, backend))


@backends.on_every_device
def test_identities(backend: backends.Backend) -> None:
    """Nothing merged with nothing is nothing; anything merged with nothing is itself."""
    nothing = torch.zeros((2, 1, 1, 8)), torch.full((2, 1, 1), -math.inf)
    result = _merge(*nothing, backend)
    assert cases.bits(result.out).eq(0).all() and result.lse.eq(-math.inf).all()
    outs, lses = _states(3, 1)
    itself = backends.Result(outs[0], lses[0])
    backends.assert_same_bits(_merge(outs, lses, backend), itself)
    for before, after in ((0, 1), (1, 0), (2, 5), (0, 200), (200, 0)):
        padded_outs = torch.nn.functional.pad(outs, (0, 0, 0, 0, 0, 0, before, after))
        padded_lses = torch.nn.functional.pad(lses, (0, 0, 0, 0, before, after), value=-math.inf)
        backends.assert_same_bits(
            _merge(padded_outs, padded_lses, backend), itself, (before, after)
        )


@pytest.mark.parametrize("n", [2, 3, 5, 9, 16, 33])
@backends.on_every_device
def test_the_tree_does_not_depend_on_its_size(n: int, backend: backends.Backend) -> None:
    """The tree is over the indices: states of nothing behind the last change no bit."""
    outs, lses = _states(n, n)
    wanted = _merge(outs, lses, backend)
    for more in (1, 2, 7, 31, 100):
        padded_outs = torch.nn.functional.pad(outs, (0, 0, 0, 0, 0, 0, 0, more))
        padded_lses = torch.nn.functional.pad(lses, (0, 0, 0, 0, 0, more), value=-math.inf)
        backends.assert_same_bits(_merge(padded_outs, padded_lses, backend), wanted, more)


@pytest.mark.parametrize("n", [3, 8, 100])
@backends.on_every_device
def test_rows_are_independent(n: int, backend: backends.Backend) -> None:
    """Rows, heads, strides and dimensions around a row change none of its bits."""
    outs, lses = _states(n, n, rows=5, heads=6, dim=33)
    whole = _merge(outs, lses, backend)
    for rows, heads in ((slice(2, 3), slice(0, 6)), (slice(0, 5), slice(1, 5, 3))):
        backends.assert_same_bits(
            _merge(outs[:, rows, heads], lses[:, rows, heads], backend),
            backends.Result(whole.out[rows, heads], whole.lse[rows, heads]),
        )
    permuted = outs.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    assert not permuted.is_contiguous()
    backends.assert_same_bits(_merge(permuted, lses, backend), whole)
    spread = cases.poisoned_storage(torch.float32, n, 5, 7, 40)[:, :, 1:, 7:]
    spread.copy_(outs)
    backends.assert_same_bits(_merge(spread, lses, backend), whole)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads(threads: int) -> None:
    outs, lses = _states(5, 20, rows=64, heads=8)
    wanted = _merge(outs, lses)
    with backends.CPU.selected(threads):
        backends.assert_same_bits(_merge(outs, lses), wanted)


@backends.on_every_device
def test_far_apart_and_huge(backend: backends.Backend) -> None:
    """Sums that overflow or underflow FP32 unless taken relative to the largest."""
    for values in (
        [500.0, 499.0],
        [-500.0, -501.0],
        [1e30, 1e29],
        [90.0, -90.0],
        [-1e30, -math.inf],
    ):
        lses = torch.tensor(values).view(2, 1, 1)
        outs = torch.tensor([1.5, -0.5]).view(2, 1, 1, 1)
        result = _merge(outs, lses, backend)
        exact_out, exact_lse = state.merge(outs, lses)
        torch.testing.assert_close(result.out.to(torch.float64), exact_out, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(result.lse.to(torch.float64), exact_lse, rtol=1e-6, atol=0)


@backends.on_every_device
def test_nan_stays_in_its_row(backend: backends.Backend) -> None:
    """A NaN LSE makes its row NaN, wherever it stands; a NaN output its own dimension."""
    outs, lses = _states(6, 7)
    clean = _merge(outs, lses, backend)
    for index in (0, 3, 6):
        for rest in ("finite", "empty"):
            poisoned = lses.clone()
            if rest == "empty":
                poisoned[:, 1, 2] = -math.inf
            poisoned[index, 1, 2] = math.nan
            result = _merge(outs, poisoned, backend)
            assert torch.isnan(result.out[1, 2]).all() and torch.isnan(result.lse[1, 2])
            others = torch.ones((3, 4), dtype=torch.bool)
            others[1, 2] = False
            backends.assert_same_bits(
                backends.Result(result.out[others], result.lse[others]),
                backends.Result(clean.out[others], clean.lse[others]),
            )
        with_nan = outs.clone()
        with_nan[index, 1, 2, 5] = math.nan
        result = _merge(with_nan, lses, backend)
        assert torch.isnan(result.out).nonzero().tolist() == [[1, 2, 5]]


@pytest.mark.parametrize("shards", [2, 3, 8])
@backends.on_every_backend
def test_context_parallel_shards(shards: int, backend: backends.Backend) -> None:
    """Every rank attends its own tokens; the merge is attention over all of them.

    The block itself is causal and lies in the last shard; the others are seen whole.
    """
    request = cases.random_request(7, q_len=8, seq_len=2500, q_heads=4, kv_heads=2)
    expected = tolerances.expected(cases.paged([request]))
    bounds = [0, *(2400 * shard // shards for shard in range(1, shards)), 2500]
    for route in backends.FP32_ROUTES:
        results = []
        for first, last in itertools.pairwise(bounds):
            mine = cases.Request(request.q, request.k[first:last], request.v[first:last])
            case = cases.paged([mine], causal=last == 2500)
            results.append(backends.attend(case, backend, route=route, out_dtype=torch.float32))
        merged = _merge(
            torch.stack([result.out for result in results]),
            torch.stack([result.lse for result in results]),
            backend,
        )
        expected.check(merged.out, merged.lse, what=f"{shards} shards, {route}")
