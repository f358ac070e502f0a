"""Bytes that no row may see: they change no bit, whatever they are."""

import dataclasses
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.support import backends, cases, tolerances

ROUTES = pytest.mark.parametrize("route", [*backends.FP32_ROUTES, "grouped_half", "scalar_half"])
SHAPE = {"q_heads": 4, "kv_heads": 2}


def _requests(kv_dtype: str = "fp8_e4m3") -> list[cases.Request]:
    lengths = [(8, 1030), (0, 77), (3, 0), (2, 64), (1, 1), (5, 129)]
    return [
        cases.random_request(seed, q_len=q_len, seq_len=seq_len, kv_dtype=kv_dtype, **SHAPE)
        for seed, (q_len, seq_len) in enumerate(lengths)
    ]


@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@ROUTES
@backends.on_every_backend
def test_bytes_beyond_the_length(kv_dtype: str, route: str, backend: backends.Backend) -> None:
    """The rest of last pages, unused pages and padding: zeros, NaN codes, infinities, all ones."""
    requests = _requests(kv_dtype)
    clean = backends.attend(
        cases.paged(requests, page_size=48, layout="padded", fill=0), backend, route=route
    )
    assert torch.isfinite(clean.out).all()
    for fill in (0x7F, 0x7C, 0xFC, 0x80, 0xFF):
        case = cases.paged(requests, page_size=48, layout="padded", fill=fill)
        backends.assert_same_bits(backends.attend(case, backend, route=route), clean, hex(fill))


@ROUTES
@backends.on_every_backend
def test_page_table_beyond_the_last_page(route: str, backend: backends.Backend) -> None:
    """Stale entries: out of range either way, or a page of another request, or one of NaN."""
    clean = backends.attend(cases.paged(_requests()), backend, route=route)
    for stale in ((-1,), (2**31 - 1,), (-(2**31),), (0, 1, 2, 3), cases.STALE_PAGES):
        case = cases.paged(_requests(), stale_pages=stale)
        backends.assert_same_bits(backends.attend(case, backend, route=route), clean, stale)


@ROUTES
@backends.on_every_backend
def test_keys_before_the_window(route: str, backend: backends.Backend) -> None:
    """Keys that have left every row's window turn NaN; their pages go to somebody else."""
    for window in (1, 40, 500):
        request = cases.random_request(3, q_len=4, seq_len=1100, **SHAPE)
        case = cases.paged([request], window=window, page_size=16)
        clean = backends.attend(case, backend, route=route)
        gone = 1100 - 3 - window
        k, v = request.k.clone(), request.v.clone()
        for tensor in (k, v):
            cases.bits(tensor)[:gone] = 0x7F
        poisoned = cases.paged([cases.Request(request.q, k, v)], window=window, page_size=16)
        backends.assert_same_bits(backends.attend(poisoned, backend, route=route), clean, window)
        moved = case.page_table.clone()
        moved[:, : gone // 16] = case.page_table[0, gone // 16]
        moved = dataclasses.replace(case, page_table=moved)
        backends.assert_same_bits(backends.attend(moved, backend, route=route), clean, window)


@ROUTES
@backends.on_every_backend
def test_page_table_before_the_window(route: str, backend: backends.Backend) -> None:
    """Entries of pages that have left every row's window: engines free those pages."""
    request = cases.random_request(3, q_len=4, seq_len=1100, **SHAPE)
    case = cases.paged([request], window=40, page_size=16)
    clean = backends.attend(case, backend, route=route)
    first_used = (1100 - 3 - 40) // 16
    for freed in (-1, 2**31 - 1, 0):
        page_table = case.page_table.clone()
        page_table[0, :first_used] = freed
        moved = dataclasses.replace(case, page_table=page_table)
        backends.assert_same_bits(backends.attend(moved, backend, route=route), clean, freed)


@ROUTES
@backends.on_every_backend
def test_requests_of_nothing_between_others(route: str, backend: backends.Backend) -> None:
    """No keys, no rows, or neither: the neighbours' rows keep their bits."""
    full = [cases.random_request(seed, q_len=4, seq_len=90 + seed, **SHAPE) for seed in range(3)]
    nothing = [
        cases.random_request(9, q_len=0, seq_len=0, **SHAPE),
        cases.random_request(9, q_len=2, seq_len=0, **SHAPE),
        cases.random_request(9, q_len=0, seq_len=300, **SHAPE),
    ]
    alone = backends.attend(cases.paged(full), backend, route=route)
    mixed = [*nothing, full[0], *nothing, *nothing, full[1], full[2], *nothing]
    result = backends.attend(cases.paged(mixed), backend, route=route)
    rows = [2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 17]
    backends.assert_same_bits(backends.Result(result.out[rows], result.lse[rows]), alone)
    empty = [0, 1, 6, 7, 8, 9, 18, 19]
    assert result.out[empty].eq(0).all() and result.lse[empty].eq(-torch.inf).all()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 5.0, -5.0, 100.0])])
@ROUTES
@backends.on_every_backend
def test_rows_that_see_nothing(
    sinks: torch.Tensor | None, route: str, backend: backends.Backend
) -> None:
    """More rows than keys: the first see nothing, and are written as 0 and -inf, sink or not."""
    for q_len, seq_len in ((8, 3), (64, 1), (2, 0), (1, 0), (33, 32)):
        request = cases.random_request(q_len, q_len=q_len, seq_len=seq_len, **SHAPE)
        case = cases.paged([request], sinks=sinks, window=2)
        result = backends.attend(case, backend, route=route)
        blind = q_len - seq_len
        assert result.out[:blind].eq(0).all(), "written over the NaN that was there"
        assert result.lse[:blind].eq(-torch.inf).all()
        assert torch.isfinite(result.lse[blind:]).all()
        half = route in backends.HALF_ROUTES
        tolerances.expected(case).check(result.out, result.lse, half_partials=half, what=route)


@ROUTES
@backends.on_every_backend
def test_a_batch_of_nothing(route: str, backend: backends.Backend) -> None:
    for q_len, count in ((0, 3), (4, 2)):
        requests = [cases.random_request(1, q_len=q_len, seq_len=0, **SHAPE)] * count
        result = backends.attend(cases.paged(requests, spare_pages=1), backend, route=route)
        assert result.out.shape[0] == q_len * count
        assert result.out.eq(0).all() and result.lse.eq(-torch.inf).all()


@pytest.fixture
def huge() -> Iterator[torch.Tensor]:
    """16 GiB of bytes that cost nothing: a sparse file, mapped."""
    with tempfile.NamedTemporaryFile() as file:
        size = 2**34
        file.truncate(size)
        yield torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("axis", ["page", "token", "head"])
@pytest.mark.parametrize("route", backends.FP32_ROUTES)
@backends.on_every_device
def test_offsets_beyond_32_bits(
    kv_dtype: str, axis: str, route: str, backend: backends.Backend, huge: torch.Tensor
) -> None:
    """Strides that pass 2^31 elements and 2^32 bytes, in the caches and in the queries."""
    if backend.device != "cpu":
        pytest.skip("needs 16 GiB of storage, which only a sparse file gives for nothing")
    request = cases.random_request(3, q_len=2, seq_len=4, **SHAPE, kv_dtype=kv_dtype)
    near = cases.paged([request], page_size=2, spare_pages=0)
    size = near.k_cache.element_size()
    far = 2**31 // size * 3 // 2 + 64 if axis == "token" else 2**32 // size + 64
    strides = [2048, 512, 128, 1]
    strides[("page", "token", "head").index(axis)] = far
    elements = huge.view(near.k_cache.dtype if size == 2 else torch.uint8)
    caches = []
    for offset, cache in ((0, near.k_cache), (8192, near.v_cache)):
        view = elements.view(cache.dtype).as_strided(cache.shape, strides, offset)
        integers = {1: torch.uint8, 2: torch.int16}[size]
        view.view(integers).copy_(cache.view(integers))
        caches.append(view)
    rows = huge.view(torch.float16).as_strided((2, 4, 64), (2**32 + 64, 64, 1), 2**20)
    rows.copy_(near.q)
    case = dataclasses.replace(near, k_cache=caches[0], v_cache=caches[1], q=rows)
    backends.assert_same_bits(
        backends.attend(case, backend, route=route), backends.attend(near, backend, route=route)
    )
