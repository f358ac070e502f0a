"""Workspaces: sizes known before, no aliasing, growth, and use from several threads."""

import threading
from typing import Any

import pytest
import torch

import flashverify as fv
from flashverify import workspace as workspaces
from tests.support import backends, cases

CAPACITY = {
    "batch": 3,
    "rows": 24,
    "q_heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "max_seq_len": 5000,
    "page_size": 48,
}


def arguments(seq_len: int = 5000, q_len: int = 8, batch: int = 3) -> dict[str, Any]:
    requests = [
        cases.random_request(seed, q_len=q_len, seq_len=seq_len, q_heads=6, kv_heads=2)
        for seed in range(batch)
    ]
    return backends.arguments(cases.paged(requests, page_size=48))


def addresses(workspace: fv.Workspace) -> dict[str, range]:
    return {
        state: range(buffer.address, buffer.address + buffer.nbytes)
        for state, buffer in workspace.buffers.items()
    }


def test_the_size_is_known_before_anything_is_allocated() -> None:
    workspace = fv.Workspace("cpu", **CAPACITY, routes=fv.Route)
    assert workspace.nbytes == sum(workspace.state_nbytes.values()) > 0
    assert all(workspace.state_nbytes[state] > 0 for state in ("fp32", "half"))
    assert not workspace.buffers
    workspace.allocate()
    assert {s: b.nbytes for s, b in workspace.buffers.items()} == workspace.state_nbytes


def test_only_the_states_asked_for() -> None:
    assert fv.Workspace(**CAPACITY).state_nbytes["half"] == 0
    halves = fv.Workspace(**CAPACITY, routes=["grouped_half"])
    assert halves.state_nbytes["fp32"] == 0 and halves.state_nbytes["half"] > 0


@pytest.mark.parametrize("route", ["grouped_fp32", "scalar_fp32", "grouped_half", "scalar_half"])
def test_what_is_planned_suffices(route: str) -> None:
    """For every call within the capacity, one allocation, which never moves."""
    workspace = fv.Workspace("cpu", **CAPACITY, routes=[route])
    planned = dict(workspace.state_nbytes)
    workspace.allocate()
    before = addresses(workspace)
    for seq_len, q_len, batch in [(5000, 8, 3), (1, 1, 1), (4999, 8, 2), (1024, 24, 1)]:
        called = arguments(seq_len, q_len, batch)
        expected = fv.paged_attention(**called, route=route)
        out = fv.paged_attention(**called, route=route, workspace=workspace)
        assert torch.equal(cases.bits(out), cases.bits(expected))
    assert addresses(workspace) == before
    assert workspace.state_nbytes == planned


@pytest.mark.parametrize("route", list(fv.Route))
def test_states_never_alias(route: fv.Route) -> None:
    """By address, and by poison: a call leaves the other state's bytes alone."""
    workspace = fv.Workspace("cpu", **CAPACITY, routes=fv.Route)
    workspace.allocate()
    fp32, half = addresses(workspace)["fp32"], addresses(workspace)["half"]
    assert fp32.stop <= half.start or half.stop <= fp32.start
    own = "fp32" if route.keeps_fp32_state else "half"
    for buffer in workspace.buffers.values():
        buffer.tensor.fill_(0xFF)
    called = arguments(q_len=1 if route is fv.Route.xqa_half else 8)
    out = fv.paged_attention(**called, route=route, workspace=workspace)
    expected = fv.paged_attention(**called, route=route)
    assert torch.equal(cases.bits(out), cases.bits(expected)), "what was in the buffer mattered"
    for state, buffer in workspace.buffers.items():
        assert bool((buffer.tensor != 0xFF).any()) == (state == own)


def test_it_grows_beyond_its_plan() -> None:
    small = fv.Workspace("cpu", **{**CAPACITY, "batch": 1, "rows": 1, "max_seq_len": 1})
    planned = small.nbytes
    called = arguments()
    out = fv.paged_attention(**called, workspace=small)
    assert torch.equal(out, fv.paged_attention(**called))
    assert small.nbytes > planned
    assert small.buffers["fp32"].nbytes == small.nbytes


def test_a_layer_after_another_reuses_it() -> None:
    workspace = fv.Workspace("cpu", **CAPACITY)
    found = set()
    for _ in range(5):
        fv.paged_attention(**arguments(), workspace=workspace)
        found.add(workspace.buffers["fp32"].address)
    assert len(found) == 1


def test_memory_beyond_inputs_and_outputs_is_bounded() -> None:
    """B1 L262144 q8 Hq6 Hkv1 D256: at most 16 MiB."""
    capacity = {
        "batch": 1, "rows": 8, "q_heads": 6, "kv_heads": 1, "head_dim": 256,
        "max_seq_len": 262144, "page_size": 3296,
    }  # fmt: skip
    assert fv.Workspace("cpu", **capacity).nbytes <= 16 << 20


@pytest.mark.parametrize("shared", [True, False])
def test_two_threads_at_once_do_not_race(shared: bool) -> None:
    """With a workspace that both were given, and with none, where each has its own."""
    workspace = fv.Workspace("cpu", **CAPACITY) if shared else None
    called = [arguments(seq_len) for seq_len in (5000, 3000)]
    expected = [fv.paged_attention(**one) for one in called]
    wrong: list[int] = []

    def attend(which: int) -> None:
        for _ in range(20):
            out = fv.paged_attention(**called[which], workspace=workspace)
            if not torch.equal(cases.bits(out), cases.bits(expected[which])):
                wrong.append(which)

    threads = [threading.Thread(target=attend, args=(which % 2,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_have_workspaces_of_their_own() -> None:
    cpu = torch.device("cpu")
    found = [workspaces.default_workspace(cpu, 0)]
    thread = threading.Thread(target=lambda: found.append(workspaces.default_workspace(cpu, 0)))
    thread.start()
    thread.join()
    assert found[0] is not found[1]
    assert workspaces.default_workspace(cpu, 0) is found[0]
    assert workspaces.default_workspace(cpu, 1) is not found[0], "streams share one"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 0}, "batch: 0; accepted: an int, 1 or more"),
        ({"batch": True}, "batch: True; accepted: an int"),
        ({"rows": -1}, "rows: -1; accepted: an int, 0 or more"),
        ({"rows": 1.0}, "rows: 1.0; accepted: an int"),
        ({"q_heads": 0}, "q_heads: 0"),
        ({"kv_heads": None}, "kv_heads: None"),
        ({"head_dim": "64"}, "head_dim: '64'"),
        ({"max_seq_len": -1}, "max_seq_len: -1"),
        ({"page_size": 0}, "page_size: 0"),
        ({"q_heads": 5}, "q_heads"),
        ({"page_size": 65537}, "page_size"),
        ({"head_dim": 513}, "head_dim: 513"),
        ({"head_dim": 513, "routes": ["scalar_fp32"]}, "head_dim 513"),
        ({"head_dim": 72, "routes": ["grouped_fp32"]}, "head_dim 72 for route grouped_fp32"),
        ({"rows": 1000}, "q_len: 334"),
        ({"rows": 2**40, "routes": ["grouped_fp32"]}, "q: axis 0"),
        ({"routes": ["fast"]}, "routes: 'fast'; accepted: grouped_fp32"),
        ({"routes": [None]}, "routes: None"),
        ({"q_dtype": torch.int8}, "int8"),
        ({"q_dtype": torch.int32}, "int32"),
        ({"kv_dtype": "fp9"}, "'fp9'"),
        ({"device": "meta"}, "device: 'meta'; accepted: cpu, cuda"),
        ({"device": "nowhere"}, "device: 'nowhere'; accepted: cpu, cuda"),
        ({"device": 1.5}, "device: 1.5; accepted: cpu, cuda"),
    ],
)
def test_an_impossible_capacity(change: dict[str, Any], words: str) -> None:
    with pytest.raises((fv.InvalidArgumentError, fv.UnsupportedError)) as caught:
        fv.Workspace(**{**CAPACITY, **change})
    assert words in str(caught.value)


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    with pytest.raises(fv.DeviceError, match="device: cuda"):
        fv.Workspace("cuda", **CAPACITY)


def test_a_capacity_beyond_all_memory() -> None:
    huge = {**CAPACITY, "batch": 1 << 20, "rows": 1 << 20, "max_seq_len": 2**31 - 1}
    workspace = fv.Workspace(**huge, routes=["scalar_half"])
    assert workspace.nbytes > 1 << 50
    with pytest.raises(fv.OutOfMemoryError, match=f"workspace: {workspace.nbytes} bytes on cpu"):
        workspace.allocate()
    assert not workspace.buffers


def test_its_description() -> None:
    workspace = fv.Workspace("cpu:0", **CAPACITY)
    bytes_planned = workspace.state_nbytes["fp32"]
    assert repr(workspace) == f"Workspace('cpu': fp32 {bytes_planned} bytes, half 0 bytes)"
