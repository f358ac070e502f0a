import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashverify as fv
from flashverify.integrations.vllm.cache_view import split_kv
from flashverify.integrations.vllm.row_blocks import Span, cut, is_uniform, spans


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_an_example():
    blocks = cut(starts_of([5, 0, 2, 9]), 4)
    assert blocks.query_start_loc.tolist() == [0, 4, 5, 7, 11, 15, 16]
    assert blocks.request.tolist() == [0, 0, 2, 3, 3, 3]
    assert blocks.rows_after.tolist() == [1, 0, 0, 5, 1, 0]
    assert blocks.query_start_loc.dtype == blocks.rows_after.dtype == torch.int32


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 9))
def test_every_row_keeps_its_request_and_what_it_sees(lengths, max_rows):
    """Row j of n sees seq_len - n + j + 1 keys, before the cut and after it."""
    starts = starts_of(lengths)
    blocks = cut(starts, max_rows)
    row = 0
    expected = [
        (request, -(length - 1 - j))
        for request, length in enumerate(lengths)
        for j in range(length)
    ]
    found = []
    edges = blocks.query_start_loc.tolist()
    for block, request in enumerate(blocks.request.tolist()):
        rows = edges[block + 1] - edges[block]
        assert 1 <= rows <= max_rows
        for j in range(rows):
            found.append((request, -int(blocks.rows_after[block]) - (rows - 1 - j)))
            row += 1
    assert found == expected
    assert row == edges[-1] == int(starts[-1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6), st.integers(9, 30))
def test_calls_cover_all_blocks_within_their_capacity(lengths, max_blocks, max_rows):
    edges = starts_of(lengths)
    found = spans(edges, max_blocks, max_rows)
    assert [span.first_block for span in found] == [0, *(span.last_block for span in found[:-1])]
    assert found[-1].last_block == len(lengths)
    for span in found:
        assert 1 <= span.last_block - span.first_block <= max_blocks
        assert 1 <= span.last_row - span.first_row <= max_rows
        assert (span.first_row, span.last_row) == (edges[span.first_block], edges[span.last_block])
    # None could have taken the next block too.
    for span in found[:-1]:
        full = span.last_block - span.first_block == max_blocks
        assert full or edges[span.last_block + 1] - span.first_row > max_rows


@pytest.mark.parametrize(
    ("lengths", "rows", "uniform"),
    [
        ([8, 8, 8], 24, True),
        ([1, 1], 2, True),
        ([8, 8, 0], 24, True),  # a request of padding, and its rows
        ([8, 8, 0], 16, False),
        ([3, 1], 6, False),  # rows of padding, and no request of it
        ([3, 1], 4, False),
        ([0, 8, 8], 24, False),
        ([4, 8, 4], 16, False),
        ([9, 9], 18, False),
        ([0, 0], 0, False),
        ([], 0, False),
    ],
)
def test_equal_blocks_are_told_from_others(lengths, rows, uniform):
    assert is_uniform(starts_of(lengths), rows, 8) is uniform


def test_no_rows_make_no_call():
    assert spans(cut(starts_of([0, 0]), 4).query_start_loc, 8, 8) == []
    assert spans(starts_of([3]), 8, 8) == [Span(0, 1, 0, 3)]


def test_a_cut_prefill_has_the_bits_of_single_rows():
    """The cut changes no bit: what vLLM's prefill relies on."""
    torch.manual_seed(0)
    heads, kv_heads, dim, page, length = 6, 2, 64, 16, 100
    pages = -(-length // page)
    cache = torch.zeros(pages, kv_heads, page, 2 * dim, dtype=torch.uint8)
    k_cache, v_cache = split_kv(cache, dim)
    key, value = torch.randn(2, length, kv_heads, dim, dtype=torch.bfloat16)
    fv.append_kv(key, value, k_cache, v_cache, torch.arange(length), kv_dtype="fp8_e4m3")
    q = torch.randn(length, heads, dim, dtype=torch.bfloat16)
    table = torch.arange(pages, dtype=torch.int32)[None]

    def attend(max_rows):
        blocks = cut(starts_of([length]), max_rows)
        return fv.paged_attention(
            q,
            k_cache,
            v_cache,
            table[blocks.request],
            length - blocks.rows_after,
            query_start_loc=blocks.query_start_loc,
            kv_dtype="fp8_e4m3",
        )

    single = attend(1)
    assert torch.equal(attend(64), single)
    assert torch.equal(attend(7), single)
    assert single.abs().sum() > 0


@pytest.mark.parametrize("strides", ["LBHNC", "LBNHC"])
def test_the_halves_of_a_cache_are_views(strides):
    pages, heads, page, dim = 3, 2, 4, 8
    if strides == "LBHNC":
        cache = torch.zeros(pages, heads, page, 2 * dim)
    else:
        cache = torch.zeros(pages, page, heads, 2 * dim).transpose(1, 2)
    k_cache, v_cache = split_kv(cache, dim)
    assert k_cache.shape == v_cache.shape == (pages, page, heads, dim)
    k_cache[2, 3, 1] = 1.0
    v_cache[0, 1, 0] = 2.0
    assert cache[2, 1, 3, :dim].eq(1).all() and cache[0, 0, 1, dim:].eq(2).all()
    assert cache.sum() == dim * 3


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(3, 2, 4, 8),
        torch.zeros(2, 3, 2, 4, 16),
        torch.zeros(3, 2, 16, 4).transpose(2, 3),
    ],
    ids=["contents", "rank", "strides"],
)
def test_other_caches_are_refused(cache):
    with pytest.raises(fv.InvalidArgumentError, match=r"kv_cache: shape .*accepted: \[pages"):
        split_kv(cache, 8)
