"""Cuts long runs of query rows into blocks that the kernels take.

A prefill step brings hundreds of rows of one request; the kernels take a block of at
most 64 (32 on CUDA). Each block becomes a request of its own over the same pages, which
sees as many keys as its last row does. A row's bits do not depend on the block that it
is in, so the cut changes none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of query rows; all tensors are on the CPU.

    Attributes:
      query_start_loc: int32 [blocks + 1], first row of each block and, last, all rows.
      request: int64 [blocks], the request that a block is of.
      rows_after: int32 [blocks], rows of the same request after the block's last one.
    """

    query_start_loc: torch.Tensor
    request: torch.Tensor
    rows_after: torch.Tensor


def is_uniform(query_start_loc: torch.Tensor, rows: int, max_rows: int) -> bool:
    """Whether the rows are equal blocks, one for each request, that a call takes as they are.

    At the end, requests without rows may stand for padding, if the rows that they would
    have are there: a captured batch is one of these.

    Args:
      query_start_loc: int32 [requests + 1] on the CPU, as vLLM's.
      rows: Rows that the query has, padding included.
      max_rows: Most rows of a block.
    """
    requests = len(query_start_loc) - 1
    if requests < 1 or rows < 1 or rows % requests != 0 or rows // requests > max_rows:
        return False
    block, last = rows // requests, int(query_start_loc[-1])
    equal = (torch.arange(requests + 1, dtype=torch.int32) * block).clamp(max=last)
    return last % block == 0 and torch.equal(query_start_loc.to(torch.int32), equal)


def cut(query_start_loc: torch.Tensor, max_rows: int) -> RowBlocks:
    """Blocks of at most ``max_rows`` rows, in the order of the rows.

    A request without rows gives no block.

    Args:
      query_start_loc: int32 [requests + 1] on the CPU, as vLLM's.
      max_rows: 1 or more.
    """
    starts = query_start_loc.to(torch.int64)
    lengths = starts[1:] - starts[:-1]
    counts = (lengths + max_rows - 1) // max_rows
    request = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    first_block = torch.cumsum(counts, 0) - counts
    index = torch.arange(len(request)) - first_block[request]
    first_row = index * max_rows
    rows = torch.minimum(lengths[request] - first_row, torch.tensor(max_rows))
    ends = torch.cumsum(rows, 0)
    return RowBlocks(
        query_start_loc=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
        request=request,
        rows_after=(lengths[request] - first_row - rows).to(torch.int32),
    )


@dataclass(frozen=True)
class Span:
    """Blocks and rows that one call computes: [first, last) of each."""

    first_block: int
    last_block: int
    first_row: int
    last_row: int


def spans(query_start_loc: torch.Tensor, max_blocks: int, max_rows: int) -> list[Span]:
    """Divides blocks among calls that stay within the capacity of a workspace.

    Args:
      query_start_loc: int32 [blocks + 1] on the CPU.
      max_blocks: Blocks of one call, 1 or more.
      max_rows: Rows of one call, no fewer than the longest block has.
    """
    starts = query_start_loc.tolist()
    found: list[Span] = []
    first = 0
    for last in range(1, len(starts)):
        full = last - first == max_blocks
        end = last == len(starts) - 1
        if full or end or starts[last + 1] - starts[first] > max_rows:
            found.append(Span(first, last, starts[first], starts[last]))
            first = last
    return found
