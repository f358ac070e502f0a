"""Times all subjects round-robin.

Every round visits every section, and in it every subject, with the machine's rates measured
before and after them; every other round runs backwards. What is compared is thus never more
than a part of a round apart, and ratios are taken round by round.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from flashverify.abba.floors import MachineRates
from flashverify.abba.timing import CpuTimer, Timer, collector_off
from flashverify.abba.workload import Workload
from tools.benchmark_cpu.sections import Section, Subject
from tools.benchmark_cpu.subjects import Bound, conditions

# Idle OpenMP threads of torch spin for up to 15 ms before they sleep, on cores that the next
# subject needs.
_QUIET_SECONDS = 0.02
# Untimed calls that bring back the subject's own threads, code and data.
_SETTLE_US = 5_000.0
# Short calls are timed more often, one by one; the slot's time is their median.
_SLOT_US = 20_000.0
_MAX_CALLS = 200

DESCRIPTION = (
    f"a slot: {_QUIET_SECONDS * 1e3:.0f} ms of sleep, untimed calls for "
    f"{_SETTLE_US / 1e3:.0f} ms (one at least), then 1 to {_MAX_CALLS} timed calls, as many as "
    f"take {_SLOT_US / 1e3:.0f} ms, of which the median counts; one slot of every subject in a "
    "round, every other round in reverse order; rates are the best of six samples before and "
    "after a section, ratios and floors are taken within a round"
)


@dataclasses.dataclass(frozen=True)
class BoundSection:
    """A section with its subjects ready to run. ``rates`` is None for one that is not rated."""

    section: Section
    bound: dict[Subject, Bound]
    rates: MachineRates | None

    @classmethod
    def of(
        cls, section: Section, workload: Workload, bound: dict[Subject, Bound]
    ) -> "BoundSection":
        """The section over the workload whose bytes also measure the read bandwidth."""
        return cls(section, bound, MachineRates(workload, CpuTimer()) if section.rated else None)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One subject's turn in a round."""

    round: int
    section: str
    subject: str
    calls: int
    latency_us: float


@dataclasses.dataclass(frozen=True)
class RateSample:
    """The machine's best rates before and after one section in one round."""

    round: int
    section: str
    matmul_gflop_s: float
    read_gb_s: float


def steps(sections: Sequence[BoundSection], *, warmups: int, rounds: int) -> int:
    """How often ``run`` calls ``step``."""
    return (warmups + rounds) * sum(len(section.bound) for section in sections)


def run(
    sections: Sequence[BoundSection],
    timer: Timer,
    *,
    warmups: int,
    rounds: int,
    step: Callable[[str], object],
) -> tuple[list[Slot], list[RateSample]]:
    """Runs ``warmups`` rounds that do not count, then ``rounds`` that do; both as they ran.

    ``step`` is called with its name after each subject's turn.
    """
    slots: list[Slot] = []
    rates: list[RateSample] = []
    with collector_off():
        for number in range(-warmups, rounds):
            direction = -1 if number % 2 else 1
            for bound_section in sections[::direction]:
                name = bound_section.section.name
                machine = bound_section.rates
                samples_before = len(machine.read_gb_s) if machine is not None else 0
                _sample(machine)
                for subject, bound in list(bound_section.bound.items())[::direction]:
                    with conditions(subject):
                        times_us = _turn(bound.call, timer)
                    if number >= 0:
                        latency_us = statistics.median(times_us)
                        slots.append(Slot(number, name, subject.name, len(times_us), latency_us))
                    step(f"{name} {subject.name}")
                _sample(machine)
                if machine is not None and number >= 0:
                    matmul = max(machine.matmul_gflop_s[samples_before:])
                    read = max(machine.read_gb_s[samples_before:])
                    rates.append(RateSample(number, name, matmul, read))
    return slots, rates


def _sample(machine: MachineRates | None) -> None:
    if machine is not None:
        time.sleep(_QUIET_SECONDS)
        machine.sample()


def _turn(call: Callable[[], object], timer: Timer) -> list[float]:
    def run_once() -> None:
        call()

    time.sleep(_QUIET_SECONDS)
    settled_us, last_us = 0.0, 0.0
    while settled_us < _SETTLE_US:
        last_us = timer.time_us(run_once)
        settled_us += last_us
    calls = max(1, min(_MAX_CALLS, round(_SLOT_US / max(last_us, 1e-3))))
    return [timer.time_us(run_once) for _ in range(calls)]
