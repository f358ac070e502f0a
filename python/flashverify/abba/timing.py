"""Timing both arms in A B B A blocks.

A block gives each arm the same mean place in time, so that a drift that is linear over the
block (clock, temperature, neighbours) cancels in the block's ratio.
"""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

ORDER = "ABBA"

# Machine rates are sampled between blocks, before every fifth one: often enough to see a
# neighbour come and go, seldom enough that the untimed calls after a sample stay cheap.
BLOCKS_PER_SAMPLE = 5


class Timer(Protocol):
    """Times one call on a device."""

    description: str

    def time_us(self, call: Callable[[], object]) -> float:
        """Runs ``call`` once and returns its duration in microseconds."""


class CpuTimer:
    """The monotonic clock around a call that returns when its work is done."""

    description = (
        "wall clock (CLOCK_MONOTONIC) around one call from Python, checks included; "
        "caches are left as the previous call leaves them"
    )

    def time_us(self, call: Callable[[], object]) -> float:
        """Runs ``call`` once and returns its duration in microseconds."""
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1000


@dataclasses.dataclass(frozen=True)
class Slot:
    """One timed call."""

    arm: str
    latency_us: float


@dataclasses.dataclass(frozen=True)
class Block:
    """Four timed calls in the order in which they ran."""

    index: int
    slots: tuple[Slot, ...]

    def ratio_b_over_a(self) -> float:
        """Time of B's calls over time of A's."""
        return self.sum_us("B") / self.sum_us("A")

    def sum_us(self, arm: str) -> float:
        """Time of one arm's calls."""
        return sum(slot.latency_us for slot in self.slots if slot.arm == arm)


def run_blocks(
    arms: Mapping[str, Callable[[], None]],
    timer: Timer,
    *,
    warmups: int,
    blocks: int,
    sample: Callable[[], None],
    step: Callable[[], object],
) -> list[Block]:
    """Runs ``warmups`` untimed calls of each arm, then ``blocks`` timed blocks.

    ``sample`` measures the machine's rates between blocks; ``step`` is called after each
    warm-up pair and each block.
    """
    with collector_off():
        for _ in range(warmups):
            for call in arms.values():
                call()
            step()
        done = []
        for index in range(blocks):
            if index % BLOCKS_PER_SAMPLE == 0:
                sample()
                # The sample leaves its own threads spinning and its own data in the caches.
                for call in arms.values():
                    call()
            slots = tuple(Slot(arm, timer.time_us(arms[arm])) for arm in ORDER)
            done.append(Block(index, slots))
            step()
        sample()
    return done


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """A garbage collection would land in one arm's slot."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
