"""Threads, the GIL, forks and instruction sets."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import flashverify as fv
from flashverify import runtime
from tests.support import backends, cases


def arguments(seq_len: int, **shape: Any) -> dict[str, Any]:
    return backends.arguments(cases.paged([cases.random_request(1, seq_len=seq_len, **shape)]))


@pytest.fixture
def long_call() -> dict[str, Any]:
    """A call of tens of milliseconds."""
    return arguments(1 << 16, q_len=64, q_heads=8, head_dim=128)


def test_the_gil_is_released(long_call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs Python while one call computes on the thread that made it."""
    monkeypatch.setattr(runtime, "_num_threads", 1)
    started, finished = threading.Event(), threading.Event()
    ticks = 0

    def count() -> None:
        nonlocal ticks
        started.set()
        while not finished.is_set():
            ticks += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    started.wait()
    before, start = ticks, time.monotonic()
    fv.paged_attention(**long_call)
    during, seconds = ticks - before, time.monotonic() - start
    finished.set()
    counter.join()
    assert seconds > 0.01, "the call is too short to tell"
    # Held throughout, the other thread would get none of it.
    assert during > 100


def test_calls_of_several_threads_give_the_same_bits() -> None:
    called = [arguments(seq_len, q_len=q_len) for seq_len, q_len in [(3000, 8), (1, 1), (1500, 3)]]
    expected = [fv.paged_attention(**one) for one in called]
    wrong: list[int] = []
    barrier = threading.Barrier(6)

    def attend(which: int) -> None:
        barrier.wait()
        for _ in range(15):
            out = fv.paged_attention(**called[which])
            if not torch.equal(cases.bits(out), cases.bits(expected[which])):
                wrong.append(which)

    threads = [threading.Thread(target=attend, args=(which % 3,)) for which in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_any_number_of_threads_gives_the_same_bits() -> None:
    called = arguments(5000)
    before = fv.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3, 7, 16):
            fv.set_num_threads(threads)
            assert fv.get_num_threads() == threads
            outs.append(cases.bits(fv.paged_attention(**called)))
    finally:
        fv.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_the_default_is_what_the_process_may_use() -> None:
    assert fv.get_num_threads() == min(len(os.sched_getaffinity(0)), runtime.MAX_THREADS)


@pytest.mark.parametrize("value", [1.0, "2", None, True])
def test_a_number_of_threads_that_is_none(value: Any) -> None:
    with pytest.raises(fv.InvalidArgumentError, match=r"num_threads: .*; accepted: an int, 1 to"):
        fv.set_num_threads(value)


@pytest.mark.parametrize("value", [0, -1, 1025, 10**30])
def test_a_number_of_threads_out_of_range(value: int) -> None:
    before = fv.get_num_threads()
    with pytest.raises(fv.OutOfRangeError, match=f"num_threads: {value}; accepted: 1 to 1024"):
        fv.set_num_threads(value)
    assert fv.get_num_threads() == before


def _attend_in_child(called: dict[str, Any], results: Any) -> None:
    results.put(cases.bits(fv.paged_attention(**called)).numpy().tobytes())


def test_a_forked_child_computes() -> None:
    """The pool's threads do not exist in a child; its calls must end all the same."""
    called = arguments(5000)
    expected = cases.bits(fv.paged_attention(**called)).numpy().tobytes()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_attend_in_child, args=(called, results))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail("the forked child hangs")
    assert child.exitcode == 0
    assert results.get() == expected


def test_an_interrupt_is_not_lost(long_call: dict[str, Any]) -> None:
    """Ctrl-C during a call is raised when it returns."""

    def attend_for_ever() -> None:
        for _ in range(1000):
            fv.paged_attention(**long_call)

    timer = threading.Timer(0.005, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        attend_for_ever()


def test_each_instruction_set_that_this_cpu_has() -> None:
    assert fv.available_cpu_isas()[-1] == "portable"
    assert fv.cpu_isa() == fv.available_cpu_isas()[0] == fv.native_info()["cpu_isa"]
    called = arguments(200)
    reference = fv.paged_attention(**called).float()
    for isa in fv.available_cpu_isas():
        with fv.cpu_isa_override(isa):
            assert fv.cpu_isa() == isa
            torch.testing.assert_close(
                fv.paged_attention(**called).float(), reference, rtol=2e-3, atol=2e-4
            )
    assert fv.cpu_isa() == fv.available_cpu_isas()[0]


@pytest.mark.parametrize("isa", ["AVX2", "sse", "", None, 2, ["avx2"]])
def test_an_instruction_set_that_is_none(isa: Any) -> None:
    with (
        pytest.raises(fv.InvalidArgumentError, match=r"isa: .*; accepted: portable, avx2, avx512"),
        fv.cpu_isa_override(isa),
    ):
        pass


def test_an_instruction_set_that_this_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime._native, "has_cpu_isa", lambda code: code == 1)
    with (
        pytest.raises(fv.UnsupportedError, match=r"'avx512'; accepted on this CPU: portable$"),
        fv.cpu_isa_override("avx512"),
    ):
        pass


def test_an_override_is_of_one_thread_and_task() -> None:
    best = fv.available_cpu_isas()[0]
    seen: list[str] = []

    async def overridden() -> None:
        with fv.cpu_isa_override("portable"):
            await asyncio.sleep(0)
            seen.append(fv.cpu_isa())
            await asyncio.sleep(0)

    async def plain() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            seen.append(fv.cpu_isa())

    async def both() -> None:
        await asyncio.gather(overridden(), plain())

    asyncio.run(both())
    with fv.cpu_isa_override("portable"):
        thread = threading.Thread(target=lambda: seen.append(fv.cpu_isa()))
        thread.start()
        thread.join()
    assert sorted(seen) == sorted([*[best] * 4, "portable"])
