"""What surrounds a row changes none of its bits: batch, placement, threads, heads, callers."""

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator

import pytest
import torch

import flashverify as fv
from tests.support import backends, cases

FP32_ROUTES = pytest.mark.parametrize("route", backends.FP32_ROUTES)
SHAPE = {"q_heads": 6, "kv_heads": 2, "head_dim": 64}


@functools.cache
def _requests() -> list[cases.Request]:
    lengths = [(8, 700), (1, 1500), (3, 64), (8, 8), (0, 50), (5, 0), (2, 1), (1, 1024), (8, 1029)]
    return [
        cases.random_request(seed, q_len=q_len, seq_len=seq_len, **SHAPE)
        for seed, (q_len, seq_len) in enumerate(lengths)
    ]


def _attend(case: cases.Case, backend: backends.Backend, route: str, **how: object):
    return backends.attend(case, backend, route=route, out_dtype=torch.float32, **how)


@functools.lru_cache(maxsize=16)
def _reference(backend: backends.Backend, route: str) -> backends.Result:
    return _attend(cases.paged(_requests()), backend, route)


def _rows_of(result: backends.Result, index: int) -> backends.Result:
    first = sum(request.q_len for request in _requests()[:index])
    rows = slice(first, first + _requests()[index].q_len)
    return backends.Result(result.out[rows], result.lse[rows])


@FP32_ROUTES
@backends.on_every_backend
def test_alone_or_in_a_batch(route: str, backend: backends.Backend) -> None:
    for index, request in enumerate(_requests()):
        alone = _attend(cases.paged([request]), backend, route)
        backends.assert_same_bits(alone, _rows_of(_reference(backend, route), index), index)


@FP32_ROUTES
@backends.on_every_backend
def test_order_and_composition_of_the_batch(route: str, backend: backends.Backend) -> None:
    orders = ([8, 7, 6, 5, 4, 3, 2, 1, 0], [1, 1, 1, 0], [0, 4, 5, 8, 4], [3, 0] * 20)
    for order in orders:
        result = _attend(cases.paged([_requests()[i] for i in order]), backend, route)
        wanted = [_rows_of(_reference(backend, route), index) for index in order]
        expected = backends.Result(
            torch.cat([rows.out for rows in wanted]), torch.cat([rows.lse for rows in wanted])
        )
        backends.assert_same_bits(result, expected, order)


@pytest.mark.parametrize("page_size", [1, 16, 37, 64, 100, 1024, 1728, 3296])
@FP32_ROUTES
@backends.on_every_backend
def test_page_size_and_placement(page_size: int, route: str, backend: backends.Backend) -> None:
    for seed in range(2):
        case = cases.paged(_requests(), page_size=page_size, seed=seed, spare_pages=5)
        backends.assert_same_bits(
            _attend(case, backend, route), _reference(backend, route), f"placement {seed}"
        )


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@FP32_ROUTES
@backends.on_every_backend
def test_layout_and_strides(layout: str, route: str, backend: backends.Backend) -> None:
    case = cases.paged(_requests(), page_size=50, layout=layout)
    backends.assert_same_bits(_attend(case, backend, route), _reference(backend, route))


@FP32_ROUTES
@backends.on_every_backend
def test_width_of_the_page_table(route: str, backend: backends.Backend) -> None:
    """The plan may look at the capacity of the table; the bits may not."""
    case = cases.paged(_requests())
    wide = torch.cat([case.page_table, torch.full((len(_requests()), 900), -5)], dim=1)
    case = dataclasses.replace(case, page_table=wide.to(torch.int32))
    backends.assert_same_bits(_attend(case, backend, route), _reference(backend, route))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@FP32_ROUTES
@backends.on_every_backend
def test_threads(threads: int, route: str, backend: backends.Backend) -> None:
    result = _attend(cases.paged(_requests()), backend, route, threads=threads)
    backends.assert_same_bits(result, _reference(backend, route))
    long = cases.paged([cases.random_request(20, q_len=4, seq_len=9000, q_heads=2)], page_size=96)
    backends.assert_same_bits(
        _attend(long, backend, route, threads=threads), _attend(long, backend, route, threads=1)
    )


@FP32_ROUTES
@backends.on_every_backend
def test_heads_per_rank(route: str, backend: backends.Backend) -> None:
    """A rank with one KV head, or with fewer query heads of one, gets the same rows."""
    whole = _reference(backend, route)
    group = 3
    for head in range(2):
        mine = [request.heads(head, head + 1) for request in _requests()]
        heads = slice(head * group, (head + 1) * group)
        expected = backends.Result(whole.out[:, heads], whole.lse[:, heads])
        backends.assert_same_bits(
            _attend(cases.paged(mine), backend, route), expected, f"KV head {head}"
        )
        for first, last in ((0, 1), (1, 3)):
            fewer = [cases.Request(r.q[:, first:last], r.k, r.v) for r in mine]
            backends.assert_same_bits(
                _attend(cases.paged(fewer), backend, route),
                backends.Result(expected.out[:, first:last], expected.lse[:, first:last]),
                f"KV head {head}, query heads {first} to {last - 1}",
            )


@pytest.mark.parametrize("route", [*backends.FP32_ROUTES, "grouped_half", "scalar_half"])
@backends.on_every_backend
def test_repeated_calls(route: str, backend: backends.Backend) -> None:
    """Between them other calls of other shapes leave their traces in workspace and caches."""
    case = cases.paged(_requests())
    first = _attend(case, backend, route)
    for seed in range(3):
        other = cases.random_request(seed, q_len=20 + seed, seq_len=2100, q_heads=7, head_dim=128)
        _attend(cases.paged([other]), backend, route)
        backends.assert_same_bits(_attend(case, backend, route), first)


@contextlib.contextmanager
def flush_denormals() -> Iterator[None]:
    """The caller's thread flushes subnormal results to zero and reads subnormals as zero."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def round_upward() -> Iterator[None]:
    """The caller's thread rounds towards +infinity."""
    libm = ctypes.CDLL("libm.so.6")
    upward = 0x800  # FE_UPWARD on x86
    before = libm.fegetround()
    assert libm.fesetround(upward) == 0
    try:
        yield
    finally:
        libm.fesetround(before)


MODES = pytest.mark.parametrize("mode", [flush_denormals, round_upward])


@functools.cache
def _subnormal_everywhere(kv_dtype: str) -> cases.Case:
    """Small values, and scores down to exp(-100): subnormal codes, weights and products."""
    request = cases.random_request(31, q_len=4, seq_len=1100, q_heads=2, kv_dtype=kv_dtype)
    noise = torch.randn(request.v.shape, generator=torch.Generator().manual_seed(1))
    values = cases.to_cache_dtype(noise * 2.0**-7, kv_dtype)
    small = cases.Request(request.q, request.k, values)
    return cases.paged([small], scale=4.0, v_dequant_scale=2.0**-120)


@MODES
@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@FP32_ROUTES
@backends.on_every_backend
def test_callers_floating_point_mode(
    mode: Callable[[], contextlib.AbstractContextManager[None]],
    kv_dtype: str,
    threads: int,
    route: str,
    backend: backends.Backend,
) -> None:
    """Threads of the pool have their own mode: a caller's may not make a difference."""
    case = _subnormal_everywhere(kv_dtype)
    usual = _attend(case, backend, route, threads=threads)
    tiny = (usual.out != 0) & (usual.out.abs() < 2.0**-126)
    assert tiny.any(), "subnormal outputs occur"
    with mode():
        unusual = _attend(case, backend, route, threads=threads)
    backends.assert_same_bits(unusual, usual)


@MODES
@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
def test_callers_floating_point_mode_in_append_and_merge(
    mode: Callable[[], contextlib.AbstractContextManager[None]], kv_dtype: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    patterns = torch.randint(-(2**31), 2**31, (64, 1, 64), generator=generator)
    rows = patterns.to(torch.int32).view(torch.float32)
    outs = torch.randn((3, 4, 2, 64), generator=generator) * 2.0**-126
    lses = torch.randn((3, 4, 2), generator=generator) * 40

    def run() -> list[torch.Tensor]:
        caches = [
            cases.poisoned_storage(cases.CACHE_DTYPES[kv_dtype], 4, 16, 1, 64) for _ in range(2)
        ]
        fv.append_kv(rows, rows, *caches, torch.arange(64), k_dequant_scale=0.3)
        return [cases.bits(tensor) for tensor in (*caches, *fv.merge_states(outs, lses))]

    usual = run()
    with mode():
        unusual = run()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(unusual, usual, strict=True))


@FP32_ROUTES
@backends.on_every_backend
def test_one_rounding_to_the_output_type(route: str, backend: backends.Backend) -> None:
    """FP16 and BF16 outputs are the FP32 output rounded once."""
    case = cases.paged(_requests(), v_dequant_scale=torch.tensor([0.3, 1.7]))
    wide = backends.attend(case, backend, route=route, out_dtype=torch.float32)
    for out_dtype in (torch.float16, torch.bfloat16):
        narrow = backends.attend(case, backend, route=route, out_dtype=out_dtype)
        backends.assert_same_bits(narrow, backends.Result(wide.out.to(out_dtype), wide.lse))


@FP32_ROUTES
@backends.on_every_backend
def test_what_later_rows_see(route: str, backend: backends.Backend) -> None:
    """Row j's bits stay when a later row's keys turn NaN or infinite, FP8 or wide."""
    for kv_dtype, poison in (("fp8_e4m3", 0x7F), ("fp8_e5m2", 0x7C), ("float16", 0x7E00)):
        request = cases.random_request(
            8, q_len=8, seq_len=1028, q_heads=2, kv_heads=1, kv_dtype=kv_dtype
        )
        clean = _attend(cases.paged([request]), backend, route)
        for row in range(7):
            k, v = request.k.clone(), request.v.clone()
            seen = request.seq_len - 8 + row + 1
            for tensor in (k, v):
                patterns = torch.uint8 if tensor.element_size() == 1 else torch.int16
                tensor.view(patterns)[seen:] = poison
            poisoned = cases.paged([cases.Request(request.q, k, v)])
            result = _attend(poisoned, backend, route)
            rows = slice(0, row + 1)
            backends.assert_same_bits(
                backends.Result(result.out[rows], result.lse[rows]),
                backends.Result(clean.out[rows], clean.lse[rows]),
                f"{kv_dtype}, rows up to {row}",
            )
            assert not torch.isfinite(result.out[row + 1 :]).all()
