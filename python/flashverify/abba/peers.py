"""Other implementations of the same attention, timed after the arms on the same inputs."""

import dataclasses
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional

from flashverify.abba import reference
from flashverify.abba.stats import Summary, summarise
from flashverify.abba.timing import Timer
from flashverify.abba.workload import Workload, as_integers

_MAX_WARMUPS = 3


@dataclasses.dataclass(frozen=True)
class PeerResult:
    """One peer's time and error, or why there is none."""

    description: str
    status: str
    reason: str | None
    latency_us: Summary | None
    relative_l2: float | None


@dataclasses.dataclass(frozen=True)
class Peer:
    """``module`` is what must be importable; ``make`` binds the peer to a workload."""

    module: str
    description: str
    make: Callable[[Workload], Callable[[], torch.Tensor]]


def _torch_sdpa(workload: Workload) -> Callable[[], torch.Tensor]:
    case = workload.case
    slots = torch.stack([workload.slots(b, 0, case.context) for b in range(case.batch)])
    # The query heads of a group are rows of their KV head, so that torch repeats no key.
    q = workload.q.view(case.batch, case.q_len, case.kv_heads, case.group, case.head_dim)
    q = q.permute(0, 2, 1, 3, 4).reshape(case.batch, case.kv_heads, -1, case.head_dim).float()
    device = q.device
    last_visible = case.context - case.q_len + torch.arange(case.q_len, device=device)
    visible = torch.arange(case.context, device=device)[None, :] <= last_visible[:, None]
    mask = visible.repeat_interleave(case.group, dim=0)

    def dequantise(cache: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        flat = as_integers(cache).view(-1, case.kv_heads, case.head_dim)
        wide = flat[slots].view(cache.dtype).to(torch.float32)
        return wide.mul_(scale[:, None]).transpose(1, 2)

    def run() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            dequantise(workload.k_cache, workload.k_dequant_scale),
            dequantise(workload.v_cache, workload.v_dequant_scale),
            attn_mask=mask,
            scale=workload.softmax_scale,
        )
        out = out.view(case.batch, case.kv_heads, case.q_len, case.group, case.head_dim)
        rows = out.permute(0, 2, 1, 3, 4).reshape(case.rows, case.q_heads, case.head_dim)
        return rows.to(torch.float16)

    return run


def _flashinfer(workload: Workload) -> Callable[[], torch.Tensor]:
    import flashinfer  # type: ignore[import-not-found]

    case, device = workload.case, workload.q.device
    if device.type != "cuda":
        raise RuntimeError("FlashInfer runs on CUDA only")
    scratch = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD")
    requests = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    last_page = (case.context - 1) % case.page_size + 1
    wrapper.plan(
        requests * case.q_len,
        requests * case.pages_per_request,
        workload.page_table.reshape(-1),
        torch.full((case.batch,), last_page, dtype=torch.int32, device=device),
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        causal=True,
        sm_scale=workload.softmax_scale,
        q_data_type=workload.q.dtype,
        kv_data_type=workload.k_cache.dtype,
    )
    # It takes one scale for all heads, as a number.
    scales = {
        "k_scale": float(workload.k_dequant_scale.max()),
        "v_scale": float(workload.v_dequant_scale.max()),
    }
    return lambda: wrapper.run(workload.q, (workload.k_cache, workload.v_cache), **scales)


PEERS = {
    "torch": Peer(
        module="torch",
        description=(
            "torch scaled_dot_product_attention in FP32; the time includes gathering the pages "
            "and dequantising K and V to FP32, and rounding the output to FP16"
        ),
        make=_torch_sdpa,
    ),
    "flashinfer": Peer(
        module="flashinfer",
        description=(
            "FlashInfer's batch prefill over the paged cache, planned once; per-head scales are "
            "not among its arguments, and the largest is used"
        ),
        make=_flashinfer,
    ),
}


def measure(
    name: str,
    workload: Workload,
    exact: torch.Tensor,
    timer: Timer,
    *,
    warmups: int,
    repetitions: int,
    step: Callable[[], object],
) -> PeerResult:
    """Times one peer; a peer that cannot be imported or fails is "not run" with a reason."""
    peer = PEERS[name]
    try:
        importlib.import_module(peer.module)
        run = peer.make(workload)
        out = run().cpu()
        for _ in range(min(warmups, _MAX_WARMUPS)):
            run()
        times_us = []
        for _ in range(repetitions):
            times_us.append(timer.time_us(lambda: _discard(run())))
            step()
    except (ImportError, RuntimeError, ValueError, TypeError, MemoryError) as failure:
        reason = f"{type(failure).__name__}: {failure}"
        return PeerResult(peer.description, "not run", reason, None, None)
    error = reference.compare(out, exact)
    return PeerResult(peer.description, "measured", None, summarise(times_us), error.relative_l2)


def _discard(_: torch.Tensor) -> None:
    pass
