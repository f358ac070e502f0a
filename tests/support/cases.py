"""Random paged problems, with poison in every byte that must not matter.

A `Request` is contents only: queries, and the keys and values they may see. `paged`
puts requests into a cache of any layout, with shuffled pages, NaN in every byte that
holds no token and nonsense in every page-table entry past the last page. The same
requests placed twice are the same problem, and must give the same bits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.oracle import attention as oracle
from tests.oracle import fp8

CACHE_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# 0xFF in every byte is NaN in all four cache dtypes, and -1 in a page table.
_POISON = 0xFF
STALE_PAGES = (-1, 2**31 - 1, -(2**31), 1_000_000)


@dataclasses.dataclass(frozen=True)
class Request:
    """The contents of one request, without an address.

    q: [q_len, q_heads, head_dim] float32, float16 or bfloat16
    k, v: [seq_len, kv_heads, head_dim] of a cache dtype
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def q_len(self) -> int:
        """Query rows."""
        return self.q.shape[0]

    @property
    def seq_len(self) -> int:
        """Keys that the last row sees."""
        return self.k.shape[0]

    def rows(self, first: int, last: int) -> "Request":
        """The request of rows first to last - 1 alone: the keys that the last of them sees."""
        stop = max(self.seq_len - self.q_len + last, 0)
        return Request(self.q[first:last], self.k[:stop], self.v[:stop])

    def decode_steps(self) -> "list[Request]":
        """One q_len = 1 request per row: what decoding the same tokens one by one computes."""
        return [self.rows(row, row + 1) for row in range(self.q_len)]

    def heads(self, first_kv: int, last_kv: int) -> "Request":
        """The share of a rank that holds KV heads first_kv to last_kv - 1."""
        group = self.q.shape[1] // self.k.shape[1]
        return Request(
            self.q[:, first_kv * group : last_kv * group],
            self.k[:, first_kv:last_kv],
            self.v[:, first_kv:last_kv],
        )


def to_cache_dtype(values: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Rounds float values to a cache dtype, by the oracle's own encoder for FP8."""
    dtype = CACHE_DTYPES[kv_dtype]
    if kv_dtype in fp8.BY_NAME:
        return fp8.BY_NAME[kv_dtype].encode(values).view(dtype)
    return values.to(dtype)


@functools.lru_cache(maxsize=64)
def random_request(
    seed: int,
    *,
    q_len: int = 8,
    seq_len: int,
    q_heads: int = 6,
    kv_heads: int = 1,
    head_dim: int = 64,
    kv_dtype: str = "fp8_e4m3",
    q_dtype: torch.dtype = torch.float16,
) -> Request:
    """A request of standard normal queries, keys and values; shared, so never written to."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((q_len, q_heads, head_dim), generator=generator)
    kv = torch.randn((2, seq_len, kv_heads, head_dim), generator=generator)
    stored = to_cache_dtype(kv, kv_dtype)
    return Request(q.to(q_dtype), stored[0], stored[1])


# Layouts: each gives K and V views [pages, page_size, kv_heads, head_dim] of poisoned
# storage. `empty` makes storage of a given shape; the last axis stays contiguous.
_Empty = Callable[..., torch.Tensor]


def _nhd(empty: _Empty, pages: int, page: int, heads: int, dim: int) -> Sequence[torch.Tensor]:
    return empty(pages, page, heads, dim), empty(pages, page, heads, dim)


def _hnd(empty: _Empty, pages: int, page: int, heads: int, dim: int) -> Sequence[torch.Tensor]:
    return [empty(pages, heads, page, dim).transpose(1, 2) for _ in range(2)]


def _paired(empty: _Empty, pages: int, page: int, heads: int, dim: int) -> Sequence[torch.Tensor]:
    return empty(pages, 2, page, heads, dim).unbind(1)


def _paired_hnd(
    empty: _Empty, pages: int, page: int, heads: int, dim: int
) -> Sequence[torch.Tensor]:
    return empty(pages, 2, heads, page, dim).transpose(2, 3).unbind(1)


def _k_beside_v(
    empty: _Empty, pages: int, page: int, heads: int, dim: int
) -> Sequence[torch.Tensor]:
    return empty(pages, heads, page, 2 * dim).transpose(1, 2).split(dim, dim=-1)


def _padded(empty: _Empty, pages: int, page: int, heads: int, dim: int) -> Sequence[torch.Tensor]:
    """Odd strides everywhere, and a first element that is not aligned to anything."""
    k = empty(pages, page + 1, heads + 1, dim + 3)[:, 1:, 1:, 3:]
    v = empty(pages, page + 2, heads + 2, dim + 1)[:, 2:, :-2, 1:]
    return k, v


def _mixed(empty: _Empty, pages: int, page: int, heads: int, dim: int) -> Sequence[torch.Tensor]:
    """K and V of different strides."""
    return empty(pages, page, heads, dim), empty(pages, heads, page, dim).transpose(1, 2)


LAYOUTS = {
    "nhd": _nhd,
    "hnd": _hnd,
    "paired": _paired,
    "paired_hnd": _paired_hnd,
    "k_beside_v": _k_beside_v,
    "padded": _padded,
    "mixed": _mixed,
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that -0.0 differs from 0.0 and NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def poisoned_storage(dtype: torch.dtype, *shape: int, fill: int = _POISON) -> torch.Tensor:
    """A tensor whose every byte is `fill`: NaN, unless said otherwise."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.full((math.prod(shape) * size,), fill, dtype=torch.uint8).view(dtype).view(shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensor arguments of one call, all on the CPU, and the options passed by name."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def expected(self, **how: Any) -> oracle.Answer:
        """The oracle's answer; `how` takes its dtype and with_bounds."""
        return oracle.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.page_table,
            self.seq_lens,
            query_start_loc=self.query_start_loc,
            **self.options,
            **how,
        )


def paged(
    requests: Sequence[Request],
    *,
    page_size: int = 16,
    layout: str = "nhd",
    seed: int = 0,
    spare_pages: int = 2,
    fill: int = _POISON,
    stale_pages: Sequence[int] = STALE_PAGES,
    **options: Any,
) -> Case:
    """Places requests into a cache, their pages shuffled among `spare_pages` unused ones.

    Bytes that hold no token are `fill`; page-table entries past a request's last page
    repeat `stale_pages`.
    """
    generator = torch.Generator().manual_seed(seed)
    _, kv_heads, head_dim = requests[0].k.shape
    dtype = requests[0].k.dtype
    page_counts = [-(-request.seq_len // page_size) for request in requests]
    pages = sum(page_counts) + spare_pages
    views = LAYOUTS[layout](
        functools.partial(poisoned_storage, dtype, fill=fill), pages, page_size, kv_heads, head_dim
    )
    order = torch.randperm(pages, generator=generator)
    width = max(page_counts) + 2
    stale = torch.tensor(stale_pages, dtype=torch.int32).repeat(-(-width // len(stale_pages)))
    page_table = stale[:width].repeat(len(requests), 1)
    used = 0
    for row, (request, count) in enumerate(zip(requests, page_counts, strict=True)):
        mine = order[used : used + count]
        used += count
        page_table[row, :count] = mine.to(torch.int32)
        tokens = torch.arange(request.seq_len)
        for cache, contents in zip(views, (request.k, request.v), strict=True):
            # Written through integer views: not every torch indexes float8 types.
            as_integers = _integer_view(cache)
            as_integers[mine[tokens // page_size], tokens % page_size] = _integer_view(contents)
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.q_len)
    return Case(
        q=torch.cat([request.q for request in requests]),
        k_cache=views[0],
        v_cache=views[1],
        page_table=page_table,
        seq_lens=torch.tensor([request.seq_len for request in requests], dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        options=options,
    )


def shared_prefix(stream: Request, blocks: Sequence[tuple[int, int]], **how: Any) -> Case:
    """A batch of blocks of one stream of tokens, all reading the same pages.

    stream.q has one query row per token. Block (first, last) is a request of rows first
    to last - 1, of which the last sees `last` keys. `how` is as in `paged`.
    """
    case = paged([stream], **how)
    lengths = torch.tensor([last - first for first, last in blocks])
    return dataclasses.replace(
        case,
        q=torch.cat([stream.q[first:last] for first, last in blocks]),
        page_table=case.page_table.repeat(len(blocks), 1),
        seq_lens=torch.tensor([last for _, last in blocks], dtype=torch.int32),
        query_start_loc=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
    )


def _integer_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()])
