"""Decode context parallelism: each rank holds some of a request's keys.

Token t lies on rank (t // interleave) % ranks, in that rank's own order. A row then sees
a prefix of each rank's keys, as long as here, and the ranks' partial results (normalised
output and log-sum-exp, FP32) are merged with their weights.
"""

from __future__ import annotations

import torch


def local_lengths(
    lengths: torch.Tensor, *, rank: int, ranks: int, interleave: int = 1
) -> torch.Tensor:
    """How many of the first ``lengths`` tokens lie on a rank.

    Args:
      lengths: int32 [n], 0 or more; on any device.
      rank: This rank, from 0.
      ranks: Ranks that share a request.
      interleave: Neighbouring tokens that lie on one rank.

    Returns:
      int32 [n].
    """
    turn = ranks * interleave
    rest = (lengths % turn - rank * interleave).clamp(0, interleave)
    return (lengths // turn * interleave + rest).to(torch.int32)
