"""append_kv as a cache write: addresses, strides, scales, and nothing touched besides.

What values become is codec/encode_test.py's business.
"""

import pytest
import torch

import flashverify as fv
from tests.oracle import kv_cache
from tests.support import backends, cases, tolerances

KV_HEADS, HEAD_DIM, PAGES, PAGE_SIZE = 3, 24, 7, 10
LAYOUTS = pytest.mark.parametrize("layout", cases.LAYOUTS)
SOURCES = pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])


def _caches(layout: str, kv_dtype: str) -> list[torch.Tensor]:
    """K and V views, NaN in every byte."""

    def empty(*shape: int) -> torch.Tensor:
        return cases.poisoned_storage(cases.CACHE_DTYPES[kv_dtype], *shape)

    return list(cases.LAYOUTS[layout](empty, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM))


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of the allocation behind a view."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _rows(seed: int, tokens: int, source: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, KV_HEADS, HEAD_DIM), generator=generator).to(source)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()])


def _expect(
    cache: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, scale: object
) -> torch.Tensor:
    """The bytes of the whole storage after the write, by the oracle; the cache is left alone."""
    before = _whole_storage(cache).clone()
    encoded = kv_cache.encode(values, scale, cache.dtype)  # type: ignore[arg-type]
    written = _integers(cache)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            written[slot // PAGE_SIZE, slot % PAGE_SIZE] = _integers(encoded[token])
    after = _whole_storage(cache).clone()
    _whole_storage(cache).copy_(before)
    return after


@LAYOUTS
@SOURCES
@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@backends.on_every_device
def test_writes_its_slots_and_nothing_else(
    layout: str,
    source: torch.dtype,
    kv_dtype: str,
    slot_dtype: torch.dtype,
    backend: backends.Backend,
) -> None:
    """Scattered slots, some skipped; every other byte of the storage keeps its poison."""
    slots = torch.tensor([69, 0, -1, 33, 10, 9, -7, 41, 68], dtype=slot_dtype)
    key, value = (_rows(seed, len(slots), source) for seed in (1, 2))
    scales = {
        "k_dequant_scale": torch.tensor([0.3, 1.0, 7.5]),
        "v_dequant_scale": torch.tensor([0.11]),
    }
    k_cache, v_cache = _caches(layout, kv_dtype)
    shared = _whole_storage(k_cache).data_ptr() == _whole_storage(v_cache).data_ptr()
    wanted_k = _expect(k_cache, key, slots, scales["k_dequant_scale"])
    wanted_v = _expect(v_cache, value, slots, scales["v_dequant_scale"])
    if shared:  # both were written into the same poison: a byte is what either made of it
        wanted_k = wanted_v = torch.where(wanted_k == 0xFF, wanted_v, wanted_k)
    on = [backends.on_device(tensor, backend.device) for tensor in (k_cache, v_cache)]
    if shared:
        on[1] = on[0].as_strided(v_cache.shape, v_cache.stride(), v_cache.storage_offset())
    fv.append_kv(
        *(x.to(backend.device) for x in (key, value)),
        *on,
        slots.to(backend.device),
        **{name: scale.to(backend.device) for name, scale in scales.items()},
    )
    assert torch.equal(_whole_storage(on[0]).cpu(), wanted_k)
    assert torch.equal(_whole_storage(on[1]).cpu(), wanted_v)


@SOURCES
@backends.on_every_device
def test_strided_sources(source: torch.dtype, backend: backends.Backend) -> None:
    """Rows of a fused QKV projection: K and V are slices of one tensor."""
    tokens = 5
    fused = _rows(3, tokens, source).repeat(1, 4, 1)
    key, value = fused[:, 2 : 2 + KV_HEADS], fused[:, 9:12]
    assert not key.is_contiguous()
    plain, strided = (
        [cache.to(backend.device) for cache in _caches("nhd", "fp8_e4m3")] for _ in range(2)
    )
    slots = torch.arange(tokens, device=backend.device) * 7
    device = backend.device
    fv.append_kv(key.contiguous().to(device), value.contiguous().to(device), *plain, slots)
    fused = fused.to(device)
    fv.append_kv(fused[:, 2 : 2 + KV_HEADS], fused[:, 9:12], *strided, slots)
    for ours, theirs in zip(strided, plain, strict=True):
        assert torch.equal(cases.bits(ours), cases.bits(theirs))


@backends.on_every_device
def test_a_number_as_scale_and_a_named_uint8_cache(backend: backends.Backend) -> None:
    key, value = (_rows(seed, 4, torch.float16).to(backend.device) for seed in (4, 5))
    typed = [cache.to(backend.device) for cache in _caches("paired", "fp8_e5m2")]
    named = [cache.to(backend.device).view(torch.uint8) for cache in _caches("paired", "fp8_e5m2")]
    slots = torch.tensor([3, 1, 60, 20], device=backend.device)
    one = torch.tensor([0.3], device=backend.device)
    fv.append_kv(key, value, *typed, slots, k_dequant_scale=one, v_dequant_scale=one)
    fv.append_kv(
        key, value, *named, slots, k_dequant_scale=0.3, v_dequant_scale=0.3, kv_dtype="fp8_e5m2"
    )
    for ours, theirs in zip(named, typed, strict=True):
        assert torch.equal(ours, theirs.view(torch.uint8))


@backends.on_every_device
def test_nothing_to_write(backend: backends.Backend) -> None:
    for slots in (torch.tensor([], dtype=torch.int64), torch.tensor([-1, -1, -(2**40)])):
        key = _rows(6, len(slots), torch.float16).to(backend.device)
        caches = [cache.to(backend.device) for cache in _caches("nhd", "fp8_e4m3")]
        fv.append_kv(key, key, *caches, slots.to(backend.device))
        assert all((cache.view(torch.uint8) == 0xFF).all() for cache in caches)


@backends.on_every_device
def test_a_slot_is_overwritten(backend: backends.Backend) -> None:
    """Rolled-back draft tokens: the next write to a slot leaves nothing of the last."""
    first, second = (_rows(seed, 8, torch.float16).to(backend.device) for seed in (7, 8))
    slots = torch.arange(20, 28, device=backend.device)
    twice, once = (
        [cache.to(backend.device) for cache in _caches("nhd", "fp8_e4m3")] for _ in range(2)
    )
    fv.append_kv(first, first, *twice, slots)
    fv.append_kv(second, second, *twice, slots)
    fv.append_kv(second, second, *once, slots)
    for ours, theirs in zip(twice, once, strict=True):
        assert torch.equal(cases.bits(ours), cases.bits(theirs))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads(threads: int) -> None:
    """Many tokens, in any order, by any number of threads: the same bytes."""
    tokens = 500
    generator = torch.Generator().manual_seed(9)
    slots = torch.randperm(640, generator=generator)[:tokens]
    key, value = torch.randn((2, tokens, 2, 64), generator=generator)
    caches = [cases.poisoned_storage(torch.float8_e4m3fn, 40, 16, 2, 64) for _ in range(2)]
    with backends.CPU.selected(threads):
        fv.append_kv(key, value, *caches, slots)
    for cache, values in zip(caches, (key, value), strict=True):
        wanted = torch.full((640, 2, 64), 0xFF, dtype=torch.uint8)
        wanted[slots] = kv_cache.encode(values, None, torch.float8_e4m3fn)
        assert torch.equal(cache.view(torch.uint8).view(640, 2, 64), wanted)


@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@pytest.mark.parametrize("layout", ["nhd", "paired_hnd"])
@backends.on_every_device
def test_append_then_attend(kv_dtype: str, layout: str, backend: backends.Backend) -> None:
    """Token by token into a poisoned cache, with scales, then attention: the oracle's answer."""
    seq_len, page_size = 70, 16
    generator = torch.Generator().manual_seed(10)
    key, value = torch.randn((2, seq_len, 2, 64), generator=generator)
    scales = {
        "k_dequant_scale": torch.tensor([0.25, 3.0]),
        "v_dequant_scale": torch.tensor([0.6, 0.01]),
    }
    empty = cases.random_request(11, q_len=4, seq_len=0, q_heads=4, kv_heads=2, kv_dtype=kv_dtype)
    case = cases.paged([empty], page_size=page_size, layout=layout, spare_pages=7, **scales)
    pages = torch.tensor([[5, 0, 6, 2, 3]], dtype=torch.int32)
    case = cases.Case(
        case.q,
        case.k_cache,
        case.v_cache,
        pages,
        torch.tensor([seq_len], dtype=torch.int32),
        case.query_start_loc,
        case.options,
    )
    slots = pages[0, torch.arange(seq_len) // page_size] * page_size
    slots += torch.arange(seq_len) % page_size
    for first, last in ((0, 40), (40, 41), (41, 70)):
        fv.append_kv(
            key[first:last], value[first:last], case.k_cache, case.v_cache, slots[first:last],
            **scales,
        )  # fmt: skip
    expected = tolerances.expected(case)
    assert torch.isfinite(expected.exact.out).all()
    for route in backends.fp32_routes(backend, case.q, case.k_cache):
        result = backends.attend(case, backend, route=route)
        expected.check(result.out, result.lse, what=route)
