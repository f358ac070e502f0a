"""Paged attention in float64, straight from its definition.

The answer of a row is computed from what the row sees and nothing else: masked
keys are left out, not multiplied by zero. Float arguments are rounded to FP32
first, because that is how the C ABI carries them: they are inputs, not errors.
"""

import dataclasses
import itertools
import math

import torch

from tests.oracle import fp8

# Tokens decoded to float64 at a time: 16384 x 256 x 8 bytes are 32 MiB.
_BLOCK_TOKENS = 16384


@dataclasses.dataclass(frozen=True)
class Answer:
    """What paged attention should give, and what its error bounds need.

    out: [rows, q_heads, head_dim]
    lse: [rows, q_heads], natural logarithm
    out_magnitude: like out, the same weighted average over |v|; None unless asked for
    score_magnitude: like lse, the largest sum over d of |q_d k_d| times the scale that
        a visible key has, before the softcap; None unless asked for
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_magnitude: torch.Tensor | None = None
    score_magnitude: torch.Tensor | None = None


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _per_head(scale: float | torch.Tensor | None, kv_heads: int) -> list[float]:
    if scale is None:
        return [1.0] * kv_heads
    if isinstance(scale, torch.Tensor):
        values = [float(x) for x in scale.reshape(-1)]
        return values * kv_heads if len(values) == 1 else values
    return [_fp32(scale)] * kv_heads


def decode(stored: torch.Tensor, kv_dtype: str | None = None) -> torch.Tensor:
    """Exact float64 values of cache elements of any cache dtype."""
    if stored.dtype == torch.uint8:
        assert kv_dtype is not None
        return fp8.BY_NAME[kv_dtype].decode(stored)
    if stored.dtype in fp8.BY_DTYPE:
        return fp8.BY_DTYPE[stored.dtype].decode(stored.view(torch.uint8))
    return stored.to(torch.float64)


def _rows(
    cache: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, head: int
) -> torch.Tensor:
    """One head of some tokens; as bytes where elements are bytes, for torch 2.6 gathers no FP8."""
    stored = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return stored[pages, offsets, head].view(cache.dtype)


def visible_keys(
    row: int, q_len: int, seq_len: int, *, causal: bool = True, window: int | None = None
) -> tuple[int, int]:
    """First key that row `row` of a request sees, and one past the last."""
    stop = max(seq_len - q_len + row + 1, 0) if causal else seq_len
    start = max(stop - window, 0) if window else 0
    return start, stop


def request_rows(
    rows: int, batch: int, query_start_loc: torch.Tensor | None
) -> list[tuple[int, int]]:
    """First row of every request, and one past its last."""
    if query_start_loc is None:
        starts = [request * (rows // batch) for request in range(batch + 1)]
    else:
        starts = [int(x) for x in query_start_loc]
    return list(itertools.pairwise(starts))


class _OnlineSoftmax:
    """(m, l, o) of a block of rows, in the dtype that the answer is computed in."""

    def __init__(self, queries: torch.Tensor, head_dim: int, with_bounds: bool) -> None:
        shape = queries.shape[:-1]
        self.m = queries.new_full(shape, -math.inf)
        self.l = queries.new_zeros(shape)
        self.o = queries.new_zeros((*shape, head_dim))
        self.magnitude = torch.zeros_like(self.o) if with_bounds else None

    def _rescale(self, m: torch.Tensor) -> torch.Tensor:
        """Moves to the new maximum; returns it with 0 in place of -inf."""
        reference = torch.where(m == -math.inf, 0.0, m)
        factor = torch.exp(self.m - reference)
        self.m = m
        self.l = self.l * factor
        self.o = self.o * factor[..., None]
        if self.magnitude is not None:
            self.magnitude = self.magnitude * factor[..., None]
        return reference

    def add(self, scores: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> None:
        """Takes scores [q_len, group, keys], values [keys, head_dim], visible [q_len, keys]."""
        scores = torch.where(visible[:, None], scores, -math.inf)
        reference = self._rescale(torch.maximum(self.m, scores.amax(-1)))
        weights = torch.exp(scores - reference[..., None])
        self.l = self.l + weights.sum(-1)
        finite = torch.isfinite(values)
        self.o = self.o + weights @ torch.where(finite, values, 0.0)
        for key in (~finite).any(-1).nonzero().flatten().tolist():
            special = torch.where(finite[key], 0.0, weights[..., key, None] * values[key])
            self.o = self.o + torch.where(visible[:, key, None, None], special, 0.0)
        if self.magnitude is not None:
            self.magnitude = self.magnitude + weights @ values.abs()

    def add_sink(self, sinks: torch.Tensor) -> None:
        """Adds exp(sink) to the denominator; sinks [group]."""
        reference = self._rescale(torch.maximum(self.m, sinks.expand_as(self.m)))
        self.l = self.l + torch.exp(sinks - reference)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_dequant_scale: float | torch.Tensor | None = None,
    v_dequant_scale: float | torch.Tensor | None = None,
    kv_dtype: str | None = None,
    dtype: torch.dtype = torch.float64,
    with_bounds: bool = False,
) -> Answer:
    """The exact answer to flashverify.paged_attention's arguments.

    With dtype=torch.float32 the same formulas run in FP32, in torch's own order of
    summation: the second reference that tolerances are derived from.
    """
    rows, q_heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group = q_heads // kv_heads
    softmax_scale = _fp32(head_dim**-0.5 if scale is None else scale)
    softcap = _fp32(softcap)
    k_scales = _per_head(k_dequant_scale, kv_heads)
    v_scales = _per_head(v_dequant_scale, kv_heads)

    out = torch.zeros((rows, q_heads, head_dim), dtype=dtype)
    lse = torch.full((rows, q_heads), -math.inf, dtype=dtype)
    out_magnitude = torch.zeros_like(out) if with_bounds else None
    score_magnitude = torch.zeros_like(lse) if with_bounds else None

    for request, (first, last) in enumerate(request_rows(rows, len(seq_lens), query_start_loc)):
        seq_len = int(seq_lens[request])
        q_len = last - first
        spans = torch.tensor(
            [visible_keys(j, q_len, seq_len, causal=causal, window=window) for j in range(q_len)]
        ).reshape(-1, 2)
        if not q_len or int(spans[:, 1].max()) == 0:
            continue
        sees_something = (spans[:, 1] > spans[:, 0])[:, None]
        for head in range(kv_heads):
            heads = slice(head * group, (head + 1) * group)
            queries = q[first:last, heads].to(dtype)
            factor = softmax_scale * k_scales[head]
            state = _OnlineSoftmax(queries, head_dim, with_bounds)
            largest = queries.new_zeros((q_len, group))
            start, stop = int(spans[:, 0].min()), int(spans[:, 1].max())
            for block in range(start, stop, _BLOCK_TOKENS):
                tokens = torch.arange(block, min(block + _BLOCK_TOKENS, stop))
                pages = page_table[request].long()[tokens // page_size]
                offsets = tokens % page_size
                keys = decode(_rows(k_cache, pages, offsets, head), kv_dtype).to(dtype)
                values = decode(_rows(v_cache, pages, offsets, head), kv_dtype).to(dtype)
                visible = (tokens >= spans[:, :1]) & (tokens < spans[:, 1:])
                scores = queries @ keys.T * factor
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                state.add(scores, values, visible)
                if with_bounds:
                    sums = queries.abs() @ keys.abs().T * abs(factor)
                    sums = torch.where(visible[:, None], sums, 0.0)
                    largest = torch.maximum(largest, sums.amax(-1))
            if sinks is not None:
                state.add_sink(sinks[heads].to(dtype))
            normalised = state.o / state.l[..., None] * v_scales[head]
            out[first:last, heads] = torch.where(sees_something[..., None], normalised, 0.0)
            state_lse = state.m + torch.log(state.l)
            lse[first:last, heads] = torch.where(sees_something, state_lse, -math.inf)
            if out_magnitude is not None and score_magnitude is not None:
                assert state.magnitude is not None
                magnitude = state.magnitude / state.l[..., None] * abs(v_scales[head])
                out_magnitude[first:last, heads] = torch.where(
                    sees_something[..., None], magnitude, 0.0
                )
                score_magnitude[first:last, heads] = largest
    return Answer(out, lse, out_magnitude, score_magnitude)
