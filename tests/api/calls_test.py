"""What the functions take: layouts, formats, scales, outputs, and calls with nothing to do."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch

import flashverify as fv
from tests.oracle import kv_cache as cache_oracle
from tests.support import backends, cases, tolerances

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def requests(kv_dtype: str = "fp8_e4m3") -> list[cases.Request]:
    return [
        cases.random_request(
            seed, q_len=q_len, seq_len=seq_len, q_heads=4, kv_heads=2, kv_dtype=kv_dtype
        )
        for seed, (q_len, seq_len) in enumerate([(2, 40), (0, 7), (1, 1), (3, 65)])
    ]


def attend(case: cases.Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return fv.paged_attention(**backends.arguments(case), **options, return_lse=True)


def assert_same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(cases.bits(ours), cases.bits(theirs))


@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
def test_every_layout_gives_the_same_bits(kv_dtype: str) -> None:
    placed = requests(kv_dtype)
    expected = attend(cases.paged(placed))
    check = tolerances.expected(cases.paged(placed))
    check.check(*expected, half_partials=False, what=kv_dtype)
    for layout in cases.LAYOUTS:
        assert_same(attend(cases.paged(placed, layout=layout, page_size=24)), expected)


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)])
def test_uint8_caches(name: str, dtype: torch.dtype) -> None:
    case = cases.paged(requests(name))
    arguments = backends.arguments(case)
    expected = fv.paged_attention(**arguments)
    assert_same((fv.paged_attention(**arguments, kv_dtype=name),), (expected,))
    for cache in ("k_cache", "v_cache"):
        arguments[cache] = arguments[cache].view(torch.uint8)
    assert_same((fv.paged_attention(**arguments, kv_dtype=name),), (expected,))
    if dtype is E4M3:
        assert_same((fv.paged_attention(**arguments, kv_dtype="fp8"),), (expected,))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: value,
        lambda value: torch.tensor(value),
        lambda value: torch.tensor([value]),
        lambda value: torch.tensor([[[value]]]),
        lambda value: torch.tensor([value, value]),
        lambda value: torch.tensor([[value], [value]]),
        lambda value: torch.nn.Parameter(torch.tensor(value), requires_grad=False),
    ],
    ids=["number", "0-d", "[1]", "[1, 1, 1]", "[kv_heads]", "[kv_heads, 1]", "parameter"],
)
def test_forms_of_a_scale(make: Any) -> None:
    case = cases.paged(requests())
    expected = attend(case, k_dequant_scale=0.375, v_dequant_scale=3.0)
    assert_same(attend(case, k_dequant_scale=make(0.375), v_dequant_scale=make(3.0)), expected)

    key, value = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(1))
    written = []
    for scale in (0.375, make(0.375)):
        caches = torch.zeros(2, 1, 16, 2, 64, dtype=torch.uint8).view(E4M3)
        fv.append_kv(
            key, value, *caches, torch.arange(3), k_dequant_scale=scale, v_dequant_scale=scale
        )
        written.append(caches.view(torch.uint8))
    assert torch.equal(*written)


def test_an_integer_is_a_number() -> None:
    case = cases.paged(requests())
    whole = {"k_dequant_scale": 2, "v_dequant_scale": 3, "scale": 1, "softcap": 5}
    assert_same(attend(case, **whole), attend(case, **{k: float(v) for k, v in whole.items()}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_out_of_another_dtype(dtype: torch.dtype) -> None:
    case = cases.paged(requests())
    exact = fv.paged_attention(**backends.arguments(case), out=torch.empty(6, 4, 64))
    out = cases.poisoned_storage(dtype, 6, 4, 64)
    returned = fv.paged_attention(**backends.arguments(case), out=out)
    assert returned is out
    assert_same((out,), (exact.to(dtype),))


def test_a_strided_out_and_strided_inputs() -> None:
    case = cases.paged(requests())
    expected = fv.paged_attention(**backends.arguments(case))
    storage = cases.poisoned_storage(torch.float16, 9, 5, 70)
    arguments = backends.arguments(case)
    wide = cases.poisoned_storage(torch.float16, 6, 7, 66)
    wide[:, 2:6, 1:65] = arguments["q"]
    arguments["q"] = wide[:, 2:6, 1:65]
    pages = arguments["page_table"].shape[1]
    table = cases.poisoned_storage(torch.int32, 4, pages + 4)[:, 3 : 3 + pages]
    arguments["page_table"] = table.copy_(arguments["page_table"])
    before = cases.bits(storage).clone()
    fv.paged_attention(**arguments, out=storage[2:8, 1:5, 3:67])
    assert_same((storage[2:8, 1:5, 3:67],), (expected,))
    storage[2:8, 1:5, 3:67] = before.view(torch.float16)[2:8, 1:5, 3:67]
    assert torch.equal(cases.bits(storage), before), "bytes around the output were written"


def test_out_is_fresh_contiguous_and_of_q_dtype() -> None:
    case = cases.paged(requests())
    arguments = backends.arguments(case)
    arguments["q"] = arguments["q"].transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = fv.paged_attention(**arguments, return_lse=True)
    assert out.is_contiguous() and out.dtype == torch.float16 and out.shape == (6, 4, 64)
    assert lse.is_contiguous() and lse.dtype == torch.float32 and lse.shape == (6, 4)
    assert fv.paged_attention(**arguments).data_ptr() != out.data_ptr()


def test_equal_blocks_without_query_start_loc() -> None:
    placed = [cases.random_request(seed, q_len=3, seq_len=9 + seed) for seed in range(4)]
    arguments = backends.arguments(cases.paged(placed))
    expected = fv.paged_attention(**arguments)
    del arguments["query_start_loc"]
    assert_same((fv.paged_attention(**arguments),), (expected,))


@pytest.mark.parametrize("with_starts", [False, True])
def test_a_batch_of_nothing(with_starts: bool) -> None:
    cache = torch.zeros(3, 16, 2, 64, dtype=torch.float16)
    out, lse = fv.paged_attention(
        torch.zeros(0, 4, 64),
        cache,
        cache,
        torch.zeros(0, 5, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        query_start_loc=torch.zeros(1, dtype=torch.int32) if with_starts else None,
        return_lse=True,
    )
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_requests_without_rows() -> None:
    cache = torch.zeros(3, 16, 2, 64, dtype=torch.float16)
    table = torch.full((2, 5), -7, dtype=torch.int32)
    out = fv.paged_attention(
        torch.zeros(0, 4, 64), cache, cache, table, torch.tensor([3, 80], dtype=torch.int32)
    )
    assert out.shape == (0, 4, 64)


def test_a_cache_without_pages() -> None:
    cache = torch.zeros(0, 16, 2, 64, dtype=torch.float16)
    out, lse = fv.paged_attention(
        torch.ones(2, 4, 64),
        cache,
        cache,
        torch.zeros(1, 0, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        return_lse=True,
        out=torch.full((2, 4, 64), math.nan),
    )
    assert torch.equal(out, torch.zeros(2, 4, 64))
    assert torch.equal(lse, torch.full((2, 4), -math.inf))


def test_appending_nothing() -> None:
    caches = torch.zeros(2, 3, 16, 2, 64, dtype=torch.float16)
    nothing = torch.zeros(0, 2, 64)
    assert fv.append_kv(nothing, nothing, *caches, torch.zeros(0, dtype=torch.int64)) is None
    skipped = torch.ones(2, 2, 64)
    fv.append_kv(skipped, skipped, *caches, torch.tensor([-1, -(2**62)]))
    assert not caches.any()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_append_writes_its_slots_and_nothing_else(layout: str, slots: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    key, value = torch.randn(2, 5, 2, 64, generator=generator)
    slot_mapping = torch.tensor([0, 33, -1, 17, 47], dtype=slots)
    views, wanted = (
        cases.LAYOUTS[layout](lambda *shape: cases.poisoned_storage(E4M3, *shape), 3, 16, 2, 64)
        for _ in range(2)
    )
    fv.append_kv(key, value, *views, slot_mapping, k_dequant_scale=0.5)
    for target, source, scale in zip(wanted, (key, value), (0.5, 1.0), strict=True):
        codes = cache_oracle.encode(source, scale, E4M3)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                target.view(torch.uint8)[slot // 16, slot % 16] = codes[token]
    for view, target in zip(views, wanted, strict=True):  # with all that lies between
        whole, expected = (
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            for tensor in (view, target)
        )
        assert torch.equal(whole, expected)


def test_appended_tokens_are_attended() -> None:
    """Caches of one [pages, 2, ...] tensor, filled token by token, against one write."""
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 20, 2, 64, generator=generator)
    caches = torch.zeros(2, 4, 2, 16, 2, 64, dtype=torch.uint8).view(E4M3)
    for cache, step in zip(caches, (20, 1), strict=True):
        for start in range(0, 20, step):
            tokens = slice(start, start + step)
            fv.append_kv(key[tokens], value[tokens], *cache.unbind(1), torch.arange(20)[tokens])
    assert torch.equal(*caches.view(torch.uint8))


@pytest.mark.parametrize("states", [1, 2, 3, 7])
def test_merge_of_partial_results(states: int) -> None:
    generator = torch.Generator().manual_seed(states)
    outs = torch.randn(states, 3, 2, 8, generator=generator)
    lses = torch.randn(states, 3, 2, generator=generator)
    out, lse = fv.merge_states(outs, lses)
    weights = torch.softmax(lses.double(), dim=0)
    torch.testing.assert_close(out.double(), (weights[..., None] * outs).sum(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(0), rtol=0, atol=1e-6)
    # Strided partials, as an all-gather leaves them, give the same bits.
    swapped = outs.transpose(0, 1).contiguous().transpose(0, 1)
    strided = lses.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert_same(fv.merge_states(swapped, strided), (out, lse))


def test_merge_of_nothing_seen() -> None:
    outs = torch.full((3, 2, 2, 8), math.nan)
    out, lse = fv.merge_states(outs, torch.full((3, 2, 2), -math.inf))
    assert torch.equal(out, torch.zeros(2, 2, 8))
    assert torch.equal(lse, torch.full((2, 2), -math.inf))


def test_a_negated_view_means_its_values() -> None:
    """The imaginary part of a conjugate is stored with the other sign."""
    lses = torch.complex(torch.zeros(2, 3, 2), torch.randn(2, 3, 2)).conj().imag
    assert lses.is_neg()
    outs = torch.randn(2, 3, 2, 8)
    assert_same(fv.merge_states(outs, lses), fv.merge_states(outs, lses.resolve_neg()))


def test_arguments_may_be_parameters_and_copies() -> None:
    case = cases.paged(requests(), sinks=torch.randn(4))
    arguments = backends.arguments(case)
    expected = fv.paged_attention(**arguments)
    for name in ("sinks", "q"):
        arguments[name] = torch.nn.Parameter(arguments[name], requires_grad=False)
    assert_same((fv.paged_attention(**copy.deepcopy(arguments)),), (expected,))


@pytest.mark.parametrize("page_size", [1, 5, 784, 1568, 1648, 3296, 3456, 65536])
def test_any_page_size(page_size: int) -> None:
    placed = requests()
    expected = attend(cases.paged(placed))
    case = cases.paged(placed, page_size=page_size, spare_pages=1)
    assert_same(attend(case), expected)
    assert fv.last_route() == fv.Route.grouped_fp32


def test_every_pair_of_query_and_cache_dtype() -> None:
    for q_dtype, kv_dtype in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), cases.CACHE_DTYPES
    ):
        request = cases.random_request(5, seq_len=30, q_dtype=q_dtype, kv_dtype=kv_dtype)
        out = fv.paged_attention(**backends.arguments(cases.paged([request])))
        assert out.dtype == q_dtype
