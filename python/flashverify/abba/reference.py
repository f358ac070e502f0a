"""The exact answer: attention of a workload in FP64, and in plain FP32 PyTorch."""

import dataclasses

import torch

from flashverify.abba.case import CHUNK_TOKENS
from flashverify.abba.workload import Workload

DESCRIPTION = (
    f"FP64 PyTorch on the arms' device, blocked over {CHUNK_TOKENS} keys, from the same bytes, "
    "scales and query: relative_l2, max_row_relative_l2, max_abs, fp16_rounding_floor and the "
    "peers' relative_l2; "
    "FP32 PyTorch eager (dequantise, matmul, softmax, matmul): relative_l2_fp32"
)


@dataclasses.dataclass(frozen=True)
class Error:
    """How far an output is from a reference, and how many of its elements are not finite.

    A row is one (query token, head) pair. The errors are None where an element is not finite.
    """

    relative_l2: float | None
    max_row_relative_l2: float | None
    max_abs: float | None
    nonfinite_elements: int


def compare(out: torch.Tensor, exact: torch.Tensor) -> Error:
    """Error of ``out`` against ``exact``, both [rows, heads, head_dim]."""
    wide = out.to(torch.float64)
    nonfinite = int((~torch.isfinite(wide)).sum())
    if nonfinite:
        return Error(None, None, None, nonfinite)
    difference = wide - exact.to(torch.float64)
    row_norm = exact.to(torch.float64).norm(dim=-1)
    row_error = difference.norm(dim=-1)
    # A row that sees nothing is exactly zero, and so must the answer be.
    exempt = (row_norm == 0) & (row_error == 0)
    row_relative = torch.where(exempt, 0.0, row_error / row_norm)
    total = float(row_norm.norm())
    return Error(
        relative_l2=float(row_error.norm()) / total if total > 0 else float(row_error.norm()),
        # Finite, since JSON has no infinity: an answer where there should be none.
        max_row_relative_l2=float(row_relative.clamp(max=1e300).max()),
        max_abs=float(difference.abs().max()),
        nonfinite_elements=0,
    )


def _hidden(workload: Workload, start: int, stop: int) -> torch.Tensor:
    """Which keys a query token must not see, bool [q_len * group, stop - start]."""
    case = workload.case
    device = workload.q.device
    last_visible = case.context - case.q_len + torch.arange(case.q_len, device=device)
    hidden = torch.arange(start, stop, device=device)[None, :] > last_visible[:, None]
    return hidden.repeat_interleave(case.group, dim=0)


def _head_rows(workload: Workload, request: int, head: int) -> torch.Tensor:
    """The rows of one request that share a KV head, [q_len * group, head_dim]."""
    case = workload.case
    q = workload.q[request * case.q_len : (request + 1) * case.q_len]
    return q[:, head * case.group : (head + 1) * case.group].reshape(-1, case.head_dim)


def _store(workload: Workload, out: torch.Tensor, rows: torch.Tensor, b: int, head: int) -> None:
    case = workload.case
    place = out[b * case.q_len : (b + 1) * case.q_len, head * case.group : (head + 1) * case.group]
    place.copy_(rows.view(case.q_len, case.group, case.head_dim))


def _scale(scale: torch.Tensor, head: int) -> torch.Tensor:
    return scale[head if scale.numel() > 1 else 0]


def fp64(workload: Workload) -> torch.Tensor:
    """Exact output, float64 [rows, q_heads, head_dim], with memory for one block of keys."""
    case = workload.case
    shape = (case.rows, case.q_heads, case.head_dim)
    out = torch.zeros(shape, dtype=torch.float64, device=workload.q.device)
    for request in range(case.batch):
        for head in range(case.kv_heads):
            q = _head_rows(workload, request, head).to(torch.float64)
            score_scale = _scale(workload.k_dequant_scale, head).double() * workload.softmax_scale
            row_max = torch.full_like(q[:, :1], -torch.inf)
            row_sum = torch.zeros_like(row_max)
            total = torch.zeros_like(q)
            for start in range(0, case.context, CHUNK_TOKENS):
                stop = min(start + CHUNK_TOKENS, case.context)
                k = workload.read(workload.k_cache, request, start, stop, head).double()
                v = workload.read(workload.v_cache, request, start, stop, head).double()
                scores = (q @ k.T) * score_scale
                scores.masked_fill_(_hidden(workload, start, stop), -torch.inf)
                new_max = torch.maximum(row_max, scores.amax(dim=1, keepdim=True))
                # A row that has seen nothing yet keeps weights of 0, not exp(-inf + inf).
                pivot = torch.where(torch.isinf(new_max), 0.0, new_max)
                weights = torch.exp(scores - pivot)
                decay = torch.exp(row_max - pivot)
                row_sum = row_sum * decay + weights.sum(dim=1, keepdim=True)
                total = total * decay + weights @ v
                row_max = new_max
            rows = torch.where(row_sum > 0, total / row_sum, 0.0)
            _store(workload, out, rows * _scale(workload.v_dequant_scale, head), request, head)
    return out


def fp32(workload: Workload) -> torch.Tensor:
    """What plain FP32 PyTorch gives, float32 [rows, q_heads, head_dim]."""
    case = workload.case
    shape = (case.rows, case.q_heads, case.head_dim)
    out = torch.zeros(shape, device=workload.q.device)
    for request in range(case.batch):
        for head in range(case.kv_heads):
            q = _head_rows(workload, request, head).to(torch.float32)
            k = workload.read(workload.k_cache, request, 0, case.context, head)
            k *= _scale(workload.k_dequant_scale, head)
            scores = (q @ k.T) * workload.softmax_scale
            del k
            scores.masked_fill_(_hidden(workload, 0, case.context), -torch.inf)
            weights = torch.softmax(scores, dim=1).nan_to_num_(0.0)
            v = workload.read(workload.v_cache, request, 0, case.context, head)
            v *= _scale(workload.v_dequant_scale, head)
            _store(workload, out, weights @ v, request, head)
    return out


def fp16_rounding_floor(exact: torch.Tensor) -> float | None:
    """Relative L2 error of rounding the exact output to FP16 and nothing else.

    None where the exact output is beyond FP16.
    """
    return compare(exact.to(torch.float16), exact).relative_l2
