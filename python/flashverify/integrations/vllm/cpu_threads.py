"""The CPUs that vLLM gave its worker, for this library's threads too.

vLLM binds OpenMP's threads to CPUs, one each, and the thread that calls the model is the
first of them. Threads that it starts would all run on its one CPU, and a library that
counts the CPUs of its process would find one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from flashverify import runtime
from flashverify.kv_cache import append_kv

_WARMUP_TOKENS = 8192


def bound_cpus() -> set[int]:
    """The CPUs that any thread of this process may run on, OpenMP's started first."""
    torch.zeros(1 << 20).add_(1)
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - names alone are wanted
        # One that ended meanwhile has no CPUs.
        with contextlib.suppress(ProcessLookupError):
            found |= os.sched_getaffinity(int(thread))
    return found


@contextlib.contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """Inside, this thread, and those that it starts, may run on any of these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def adopt() -> int:
    """Lets this library use the CPUs of OpenMP's threads, as many as torch uses threads.

    Without a binding nothing changes. Returns the number of threads that calls now use.
    """
    cpus = bound_cpus()
    if len(cpus) > len(os.sched_getaffinity(0)):
        runtime.set_num_threads(max(1, min(len(cpus), torch.get_num_threads())))
        # The first call starts the threads, which keep the CPUs of the thread that did.
        with on_cpus(cpus):
            _start_threads()
    return runtime.get_num_threads()


def _start_threads() -> None:
    # A cache write, which no route's counter counts.
    rows = torch.zeros(_WARMUP_TOKENS, 8, 64, dtype=torch.bfloat16)
    caches = torch.zeros(2, 1, _WARMUP_TOKENS, 8, 64, dtype=torch.bfloat16)
    for _ in range(4):
        append_kv(rows, rows, caches[0], caches[1], torch.arange(_WARMUP_TOKENS))
