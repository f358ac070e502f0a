"""Verifying a token in a block gives bit for bit what decoding it alone gives.

One stream of tokens, a query for each. Decoding it, a q_len = 1 request per token, is
the reference; then the stream is verified in blocks of every length that end at every
length around the boundaries of tiles (64 keys) and splits (1024 keys), and every row
must have the bits of its token's decode.
"""

import functools
from collections.abc import Iterable

import pytest
import torch

from tests.support import backends, cases

FP32_ROUTES = pytest.mark.parametrize("route", backends.FP32_ROUTES)
TILE = 64
SPLIT = 1024

Blocks = list[tuple[int, int]]


@functools.lru_cache(maxsize=4)
def stream(tokens: int, **shape: object) -> cases.Request:
    return cases.random_request(77, **{"q_len": tokens, "seq_len": tokens, "q_heads": 3, **shape})


def check_blocks(
    tokens: cases.Request,
    blocks: Blocks,
    backend: backends.Backend,
    route: str,
    out_dtype: torch.dtype = torch.float32,
    **how: object,
) -> None:
    """Compares every row of every block with the decode of the same token.

    FP32 output by default: FP16 would hide what its rounding swallows.
    """
    positions = sorted({row for first, last in blocks for row in range(first, last)})
    decode = backends.attend(
        cases.shared_prefix(tokens, [(row, row + 1) for row in positions], **how),
        backend,
        route=route,
        out_dtype=out_dtype,
    )
    verified = backends.attend(
        cases.shared_prefix(tokens, blocks, **how), backend, route=route, out_dtype=out_dtype
    )
    index = {row: place for place, row in enumerate(positions)}
    rows = [index[row] for first, last in blocks for row in range(first, last)]
    expected = backends.Result(decode.out[rows], decode.lse[rows])
    assert torch.isfinite(expected.out).all()
    backends.assert_same_bits(verified, expected, f"{route} on {backend} {how}")


def around(boundaries: Iterable[int], before: int, after: int) -> list[int]:
    return sorted({b + d for b in boundaries for d in range(-before, after + 1) if b + d > 0})


def ending_at(lengths: Iterable[int], q_len: int = 8) -> Blocks:
    return [(max(length - q_len, 0), length) for length in lengths]


@FP32_ROUTES
@backends.on_every_backend
def test_q8_at_every_length_around_boundaries(route: str, backend: backends.Backend) -> None:
    """All lengths to 140, then all that put a boundary before, inside or after the block."""
    tiles = range(2 * TILE, 2 * SPLIT + 2 * TILE, TILE)
    lengths = sorted({*range(1, 140), *around(tiles, 1, 8)})
    check_blocks(stream(2 * SPLIT + 3 * TILE), ending_at(lengths), backend, route, page_size=48)


@FP32_ROUTES
@backends.on_every_backend
def test_every_q_len(route: str, backend: backends.Backend) -> None:
    ends = (65, 127, 128, SPLIT, SPLIT + 1, SPLIT + 33, SPLIT + 70)
    blocks = [(end - q_len, end) for q_len in range(1, 65) for end in ends]
    check_blocks(stream(SPLIT + 70, q_heads=1), blocks, backend, route, page_size=100)


@FP32_ROUTES
@backends.on_every_device
def test_many_splits(route: str, backend: backends.Backend) -> None:
    """Up to 69 splits, around every change of the merge tree's shape."""
    ends = around([2 * SPLIT, 3 * SPLIT, 4 * SPLIT, 8 * SPLIT, 16 * SPLIT, 33 * SPLIT], 1, 8)
    ends += [64 * SPLIT + 3, 69 * SPLIT - 1, 69 * SPLIT + 4]
    check_blocks(stream(69 * SPLIT + 4), ending_at(ends), backend, route, page_size=1728)


OPTIONS = {
    "window 1": {"window": 1},
    "window 65": {"window": 65},
    "window 1030": {"window": 1030},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, 4.0, -2.0])},
    "scales": {"k_dequant_scale": 0.37, "v_dequant_scale": 1.9, "scale": 0.2},
    "all": {
        "window": 700,
        "softcap": 3.0,
        "sinks": torch.tensor([1.5, 0.0, -2.0]),
        "k_dequant_scale": torch.tensor([0.37]),
        "v_dequant_scale": torch.tensor([1.9]),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@FP32_ROUTES
@backends.on_every_backend
def test_options(options: dict[str, object], route: str, backend: backends.Backend) -> None:
    lengths = [*range(1, 20), *around([64, 128, 640, 704, 1024, 1088, 1728], 2, 9)]
    blocks = ending_at(lengths) + ending_at([300, 1100, 1795], q_len=33)
    check_blocks(stream(1800), blocks, backend, route, **options)


@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
@backends.on_every_backend
def test_dtypes(
    kv_dtype: str, q_dtype: torch.dtype, out_dtype: torch.dtype, backend: backends.Backend
) -> None:
    tokens = stream(300, kv_dtype=kv_dtype, q_dtype=q_dtype)
    for route in backends.fp32_routes(backend, tokens.q, tokens.k):
        check_blocks(tokens, ending_at((70, 129, 300)), backend, route, out_dtype)


@pytest.mark.parametrize("head_dim", backends.GROUPED_HEAD_DIMS)
@backends.on_every_backend
def test_head_dims(head_dim: int, backend: backends.Backend) -> None:
    tokens = stream(1100, head_dim=head_dim)
    blocks = ending_at((9, 64, 200, 1030)) + ending_at((90, 1100), q_len=17)
    for route in backends.fp32_routes(backend, tokens.q, tokens.k):
        check_blocks(tokens, blocks, backend, route)


@pytest.mark.parametrize("head_dim", [1, 5, 33, 100, 300])
@backends.on_every_backend
def test_odd_head_dims(head_dim: int, backend: backends.Backend) -> None:
    tokens = stream(150, head_dim=head_dim)
    check_blocks(tokens, ending_at((9, 64, 67, 150)), backend, "scalar_fp32")


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(1, 1), (2, 1), (5, 1), (6, 1), (8, 2), (12, 3), (16, 1), (40, 1)]
)
@backends.on_every_backend
def test_groups(q_heads: int, kv_heads: int, backend: backends.Backend) -> None:
    """Every number of rows per pass: from 1 to 64 x 40, full tiles of rows and remainders."""
    tokens = stream(200, q_heads=q_heads, kv_heads=kv_heads)
    blocks = [block for q_len in (2, 3, 5, 7, 8, 31, 64) for block in ending_at((130, 199), q_len)]
    for route in backends.fp32_routes(backend, tokens.q, tokens.k):
        check_blocks(tokens, blocks, backend, route)


@FP32_ROUTES
@backends.on_every_backend
def test_poison_after_each_row(route: str, backend: backends.Backend) -> None:
    """A block in its own pages, NaN right behind it, against decodes in theirs."""
    for seq_len in (8, 63, 64, 65, 71, 1023, 1024, 1025, 1031):
        request = cases.random_request(seq_len, q_len=8, seq_len=seq_len, q_heads=2)
        block = cases.paged([request], page_size=30)
        steps = cases.paged(request.decode_steps(), page_size=17, seed=1)
        backends.assert_same_bits(
            backends.attend(block, backend, route=route, out_dtype=torch.float32),
            backends.attend(steps, backend, route=route, out_dtype=torch.float32),
            f"{seq_len} keys",
        )


@pytest.mark.parametrize("window", [None, 100])
@FP32_ROUTES
@backends.on_every_backend
def test_non_causal_rows(window: int | None, route: str, backend: backends.Backend) -> None:
    """Without causality every row of a block sees what the block sees."""
    request = cases.random_request(5, q_len=8, seq_len=1100, q_heads=3)
    alone = [cases.Request(request.q[j : j + 1], request.k, request.v) for j in range(8)]
    block, single = (
        backends.attend(
            cases.paged(requests, causal=False, window=window),
            backend,
            route=route,
            out_dtype=torch.float32,
        )
        for requests in ([request], alone)
    )
    backends.assert_same_bits(block, single)


def test_comparison_can_fail() -> None:
    """Two summation orders differ in these bits: equal ones are not a matter of course."""
    case = cases.paged([stream(500).rows(492, 500)])
    grouped, scalar = (
        backends.attend(case, route=route, out_dtype=torch.float32)
        for route in backends.FP32_ROUTES
    )
    with pytest.raises(AssertionError, match="differ in their bits"):
        backends.assert_same_bits(grouped, scalar)
