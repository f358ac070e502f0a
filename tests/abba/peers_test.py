import pytest
import torch

from flashverify.abba import peers, reference, workload
from flashverify.abba.case import Case
from flashverify.abba.timing import CpuTimer


def measure(name, case, **keywords):
    made = workload.make(case, 0, None)
    steps = []
    options = {"warmups": 1, "repetitions": 3, "step": lambda: steps.append(1), **keywords}
    result = peers.measure(name, made, reference.fp64(made), CpuTimer(), **options)
    return result, len(steps)


@pytest.mark.parametrize(
    "case",
    [
        Case(context=100, q_len=3, q_heads=4, kv_heads=2, head_dim=64, page_size=48, batch=2),
        Case(context=50, q_len=1, q_heads=6, kv_heads=1, head_dim=80, page_size=7),
    ],
    ids=str,
)
def test_torch_computes_the_same_attention(case):
    result, steps = measure("torch", case)
    assert result.status == "measured" and result.reason is None
    assert result.latency_us is not None and result.latency_us.median > 0
    # Its output is rounded once to FP16, as the arms' is.
    assert result.relative_l2 == pytest.approx(2.07e-4, rel=0.1)
    assert "dequantising" in result.description
    assert steps == 3


def test_a_peer_that_cannot_be_imported_is_not_run(monkeypatch):
    missing = peers.Peer(module="no_such_module_here", description="", make=peers._torch_sdpa)
    monkeypatch.setitem(peers.PEERS, "missing", missing)
    result, _ = measure("missing", Case(context=16, head_dim=64))
    assert result.status == "not run"
    assert "No module named 'no_such_module_here'" in (result.reason or "")
    assert result.latency_us is None and result.relative_l2 is None


def test_a_peer_that_fails_is_not_run(monkeypatch):
    def make(_):
        def run() -> torch.Tensor:
            raise RuntimeError("out of everything")

        return run

    monkeypatch.setitem(peers.PEERS, "failing", peers.Peer("torch", "", make))
    result, _ = measure("failing", Case(context=16, head_dim=64))
    assert (result.status, result.reason) == ("not run", "RuntimeError: out of everything")
