"""The FP32 LM head: 16-bit operands, FP32 accumulation, FP32 logits.

A 16-bit logit near 100 has a step of 1/16 (FP16) or 1/2 (BF16), more than what
often lies between the two best tokens: rounding makes them equal, and argmax
then takes the one with the lower index. So nothing here is rounded on the way.

Rows are computed in tiles of fixed size, padded with zero rows. A row's logits
then come from the same kernel whatever else is in the batch: verifying a token
beside seven drafts gives bit for bit what decoding it alone gives. That rests on
the BLAS treating the rows of one tile alike, which the tests check.

Tensor-parallel vocabularies: each rank calls `lm_head_logits` with its rows of
the weight (`vocab_shard`) and gathers in rank order, either whole logits
(`combine_logits`) or, for greedy decoding, one candidate per rank and token
(`greedy_candidates`, `combine_greedy`). A gather does no arithmetic, so the
result is the bits of one device holding the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from flashverify.dtypes import dtype_name
from flashverify.errors import InvalidArgumentError, UnsupportedError

# Four rows are one register tile of the CPU's GEMM, and blocks of fewer than a
# dozen columns take another kernel with another summation order (measured with
# MKL 2024.2): hence even tiles, and columns padded to a multiple.
_CPU_TILE_ROWS: Final = 8
_COLUMN_MULTIPLE: Final = 64
# The FP32 copy of a block of the weight: small enough to be read back from cache.
_WEIGHT_BLOCK_BYTES: Final = 16 << 20
_HIDDEN_BLOCK_BYTES: Final = 16 << 20
# Tensor cores take 64 rows in the time that reading the weight takes anyway: 422 us
# against 409 for one row, vocab 152064, hidden 5120, H200. Calls of many more rows
# pay for their fixed bits, reading the weight once a tile.
_CUDA_TILE_ROWS: Final = 64

_OPERAND_DTYPES: Final = (torch.float16, torch.bfloat16)


def lm_head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits in FP32: ``hidden @ weight.T + bias``, never rounded on the way.

    Args:
      hidden: [..., hidden_size], float16 or bfloat16.
      weight: [vocab, hidden_size], the dtype and device of ``hidden``.
      bias: [vocab], float32, float16 or bfloat16; added in FP32.

    Returns:
      float32 [..., vocab]. Beyond it, at most 64 MiB are allocated up to a
      hidden_size of 65536.

    Raises:
      InvalidArgumentError: Shapes, dtypes or devices that do not belong together.
      UnsupportedError: Other dtypes; gradients; or a torch setting under which
        matmul itself rounds the operands or the sums.
    """
    _check(hidden, weight, bias)
    rows = hidden.detach().reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
    weight = weight.detach()
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        if out.numel() == 0:
            pass
        elif rows.shape[1] == 0:
            out.zero_()
        elif _has_fp32_output_mm(hidden):
            _mixed_mm(rows, weight, out)
        else:
            _blocked_mm(rows, weight, out)
        if bias is not None:
            out += bias.detach()
    return out.reshape(*hidden.shape[:-1], weight.shape[0])


def _check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if hidden.dtype not in _OPERAND_DTYPES:
        raise UnsupportedError(
            f"hidden: dtype {dtype_name(hidden.dtype)}; accepted: float16, bfloat16"
        )
    if weight.dtype != hidden.dtype:
        raise InvalidArgumentError(
            f"weight: dtype {dtype_name(weight.dtype)}; accepted: the dtype of hidden, "
            f"{dtype_name(hidden.dtype)}"
        )
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise InvalidArgumentError(
            f"weight: shape {list(weight.shape)} with hidden of shape {list(hidden.shape)}; "
            "accepted: [vocab, hidden_size] with [..., hidden_size]"
        )
    if bias is not None:
        if bias.dtype not in (torch.float32, *_OPERAND_DTYPES):
            raise UnsupportedError(
                f"bias: dtype {dtype_name(bias.dtype)}; accepted: float32, float16, bfloat16"
            )
        if bias.shape != weight.shape[:1]:
            raise InvalidArgumentError(
                f"bias: shape {list(bias.shape)}; accepted: [{weight.shape[0]}]"
            )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise InvalidArgumentError(
                f"{name}: on {tensor.device}; accepted: the device of hidden, {hidden.device}"
            )
    if hidden.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"hidden: on {hidden.device}; accepted: cpu, cuda")
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        raise UnsupportedError(
            "hidden or weight: requires grad; accepted: a call under torch.no_grad() or "
            "torch.inference_mode() (nothing here has a backward pass)"
        )
    _check_torch_settings(hidden)


def _check_torch_settings(hidden: torch.Tensor) -> None:
    if hidden.device.type == "cuda":
        if getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
            raise UnsupportedError(
                "torch.backends.cuda.matmul.allow_fp16_accumulation: True; accepted: False (logits "
                "accumulate in FP32)"
            )
        return
    # TF32 keeps every bit of a float16 or bfloat16 operand; BF16 does not.
    onednn = getattr(torch.backends.mkldnn, "matmul", None)
    precision = torch.get_float32_matmul_precision() if onednn is None else onednn.fp32_precision
    if precision in ("medium", "bf16"):
        raise UnsupportedError(
            f"torch.set_float32_matmul_precision: {precision!r}, which rounds operands to BF16 on "
            "the CPU; accepted: 'highest', 'high'"
        )


def _has_fp32_output_mm(hidden: torch.Tensor) -> bool:
    if hidden.device.type != "cuda" or not hasattr(torch.ops.aten.mm, "dtype"):
        return False
    # There are no BF16 tensor cores, and no BF16 GEMM, before SM80.
    capability = torch.cuda.get_device_capability(hidden.device)
    return hidden.dtype == torch.float16 or capability >= (8, 0)


def _tiles(rows: int, tile_rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, tile_rows):
        yield start, min(start + tile_rows, rows)


def _mixed_mm(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """16-bit operands straight into an FP32 product, in tiles of fixed size."""
    tile = _CUDA_TILE_ROWS
    transposed = weight.t()
    for start, stop in _tiles(rows.shape[0], tile):
        block = rows[start:stop]
        if stop - start < tile:
            padded = rows.new_zeros((tile, rows.shape[1]))
            padded[: stop - start] = block
            product = torch.mm(padded, transposed, out_dtype=torch.float32)
            out[start:stop] = product[: stop - start]
        else:
            out[start:stop] = torch.mm(block, transposed, out_dtype=torch.float32)


def _blocked_mm(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """FP32 products of exact FP32 copies, a block of the vocabulary at a time."""
    tile = _CPU_TILE_ROWS
    vocab, hidden_size = weight.shape
    row_bytes = 4 * hidden_size
    block_columns = _multiple(_WEIGHT_BLOCK_BYTES // row_bytes, _COLUMN_MULTIPLE)
    block_columns = min(block_columns, -(-vocab // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE)
    block_rows = _multiple(_HIDDEN_BLOCK_BYTES // row_bytes, tile)
    block_rows = min(block_rows, -(-rows.shape[0] // tile) * tile)

    weight_block = out.new_zeros((block_columns, hidden_size))
    hidden_block = out.new_empty((block_rows, hidden_size))
    product = out.new_empty((tile, block_columns))
    for row_start, row_stop in _tiles(rows.shape[0], block_rows):
        count = row_stop - row_start
        hidden_block[:count] = rows[row_start:row_stop]
        hidden_block[count:].zero_()
        for start, stop in _tiles(vocab, block_columns):
            # The last block keeps older columns behind its own; their products
            # are not looked at.
            weight_block[: stop - start] = weight[start:stop]
            for first, last in _tiles(count, tile):
                torch.mm(hidden_block[first : first + tile], weight_block.t(), out=product)
                out[row_start + first : row_start + last, start:stop] = product[
                    : last - first, : stop - start
                ]


def _multiple(value: int, of: int) -> int:
    """The largest multiple of `of` up to `value`, and at least `of`."""
    return max(value // of, 1) * of


def vocab_shard(vocab_size: int, rank: int, world_size: int) -> range:
    """The token ids whose logits a tensor-parallel rank computes.

    Contiguous, in rank order, ceil(vocab_size / world_size) ids each; the last
    ranks may hold fewer, or none.

    Raises:
      InvalidArgumentError: A rank outside 0..world_size - 1, or no vocabulary.
    """
    if vocab_size < 1:
        raise InvalidArgumentError(f"vocab_size: {vocab_size}; accepted: 1 and more")
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank: {rank}; accepted: 0..{world_size - 1}")
    width = -(-vocab_size // world_size)
    return range(min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))


def combine_logits(shards: Sequence[torch.Tensor], vocab_size: int | None = None) -> torch.Tensor:
    """Whole logits from the shards of all ranks, in rank order.

    Args:
      shards: float32 [..., shard width] each.
      vocab_size: The vocabulary's true size where the last shards are padded;
        logits beyond it are dropped. None: the shards hold no padding.

    Raises:
      InvalidArgumentError: No shards, another dtype than float32 (a logit was
        rounded on the way), or fewer logits than vocab_size.
    """
    if not shards:
        raise InvalidArgumentError("shards: none; accepted: one tensor per rank")
    for rank, shard in enumerate(shards):
        if shard.dtype != torch.float32:
            raise InvalidArgumentError(
                f"shards[{rank}]: dtype {dtype_name(shard.dtype)}; accepted: float32"
            )
    logits = torch.cat(tuple(shards), dim=-1)
    if vocab_size is None:
        return logits
    if not 0 < vocab_size <= logits.shape[-1]:
        raise InvalidArgumentError(
            f"vocab_size: {vocab_size}; accepted: 1..{logits.shape[-1]}, the logits given"
        )
    return logits[..., :vocab_size]


def greedy_candidates(logits: torch.Tensor, shard: range) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's best token: what it sends instead of all its logits.

    Args:
      logits: float32 [..., width], width at least len(shard); what lies beyond
        is padding.
      shard: The rank's token ids, as `vocab_shard` gives them.

    Returns:
      (logit float32 [...], token id int64 [...]). A rank without tokens sends
      -inf, and an id beyond the vocabulary.

    Raises:
      InvalidArgumentError: Another dtype than float32, or fewer logits than ids.
    """
    if logits.dtype != torch.float32:
        raise InvalidArgumentError(f"logits: dtype {dtype_name(logits.dtype)}; accepted: float32")
    if logits.shape[-1] < len(shard):
        raise InvalidArgumentError(
            f"logits: shape {list(logits.shape)}; accepted: at least {len(shard)} logits a row"
        )
    if len(shard) == 0:
        shape = logits.shape[:-1]
        return (
            logits.new_full(shape, float("-inf")),
            torch.full(shape, shard.start, dtype=torch.int64, device=logits.device),
        )
    best, index = logits[..., : len(shard)].max(dim=-1)
    return best, index + shard.start


def combine_greedy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The greedy tokens of the whole vocabulary from every rank's candidates.

    Equal to torch.argmax of the whole logits: of equal logits the lowest token
    id wins, and a NaN is greater than any number.

    Args:
      logits: float32 [ranks, ...], gathered in rank order.
      tokens: int64, the same shape.

    Returns:
      int64 [...].

    Raises:
      InvalidArgumentError: Shapes that differ, or no ranks.
    """
    if logits.shape != tokens.shape or logits.dim() < 1 or logits.shape[0] == 0:
        raise InvalidArgumentError(
            f"tokens: shape {list(tokens.shape)} with logits of shape {list(logits.shape)}; "
            "accepted: [ranks, ...] both"
        )
    winner = logits.argmax(dim=0, keepdim=True)
    return tokens.gather(0, winner).squeeze(0)
