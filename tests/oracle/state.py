"""The merge of partial attention results, in float64."""

import math

import torch


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges outs [n, rows, heads, dim] by lses [n, rows, heads]; -inf is a state of nothing."""
    exact_lses = lses.to(torch.float64)
    seen = exact_lses != -math.inf
    top = exact_lses.amax(0)
    weights = torch.where(seen, torch.exp(exact_lses - torch.where(top == -math.inf, 0.0, top)), 0)
    total = weights.sum(0)
    terms = torch.where(seen[..., None], outs.to(torch.float64) * weights[..., None], 0.0)
    empty = total == 0
    out = torch.where(empty[..., None], 0.0, terms.sum(0) / total[..., None])
    return out, torch.where(empty, -math.inf, top + torch.log(total))
