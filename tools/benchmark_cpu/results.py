"""What was measured, with ratios taken within each round."""

import dataclasses
from collections.abc import Callable, Sequence

from flashverify.abba.case import Case
from flashverify.abba.stats import Ratio, Summary, paired_ratio, summarise
from tools.benchmark_cpu.round_robin import BoundSection, RateSample, Slot
from tools.benchmark_cpu.subjects import Bound


@dataclasses.dataclass(frozen=True)
class Rate:
    """A rate of the machine beside one section, a value per round."""

    per_round: tuple[float, ...]

    @property
    def summary(self) -> Summary:
        """Over the rounds."""
        return summarise(self.per_round)

    @property
    def best(self) -> float:
        """Of any round."""
        return max(self.per_round)


@dataclasses.dataclass(frozen=True)
class SubjectResult:
    """One subject's times, a value per round."""

    case: Case
    bound: Bound
    # At full threads, so that the machine's rates are its own.
    comparable_with_floor: bool
    calls: int
    latency_us: tuple[float, ...]

    @property
    def summary(self) -> Summary:
        """Over the rounds."""
        return summarise(self.latency_us)


@dataclasses.dataclass(frozen=True)
class SectionResult:
    """A section's subjects by name; the rates are None for a section that is not rated."""

    case: Case
    subjects: dict[str, SubjectResult]
    matmul_gflop_s: Rate | None
    read_gb_s: Rate | None
    seed: int

    def ratio(self, subject: str, over: str) -> Ratio:
        """Time of one subject over another's."""
        return self._paired(subject, self.subjects[over].latency_us)

    def over_arithmetic(self, subject: str) -> Ratio | None:
        """Time over that of the operations at the rate of torch's matrix product."""
        return self._over(subject, self._arithmetic_us)

    def over_arithmetic_at_best(self, subject: str) -> float | None:
        """Median time over that of the operations at the run's best matrix rate: the strictest."""
        found = self.subjects[subject]
        if self.matmul_gflop_s is None or not found.comparable_with_floor:
            return None
        return found.summary.median * 1e3 * self.matmul_gflop_s.best / found.case.flops

    def over_floor(self, subject: str) -> Ratio | None:
        """Time over the larger of the arithmetic floor and of reading K and V once."""
        return self._over(
            subject,
            lambda case, index: max(self._arithmetic_us(case, index), self._bytes_us(case, index)),
        )

    def _over(self, subject: str, floor_us: Callable[[Case, int], float]) -> Ratio | None:
        found = self.subjects[subject]
        if self.matmul_gflop_s is None or not found.comparable_with_floor:
            return None
        rounds = range(len(found.latency_us))
        return self._paired(subject, [floor_us(found.case, index) for index in rounds])

    def _arithmetic_us(self, case: Case, index: int) -> float:
        assert self.matmul_gflop_s is not None
        return case.flops / self.matmul_gflop_s.per_round[index] / 1e3

    def _bytes_us(self, case: Case, index: int) -> float:
        assert self.read_gb_s is not None
        return case.kv_live_bytes / self.read_gb_s.per_round[index] / 1e3

    def _paired(self, subject: str, others: Sequence[float]) -> Ratio:
        times = self.subjects[subject].latency_us
        return paired_ratio([a / b for a, b in zip(times, others, strict=True)], self.seed)


def collect(
    sections: Sequence[BoundSection],
    slots: Sequence[Slot],
    rates: Sequence[RateSample],
    seed: int,
) -> dict[str, SectionResult]:
    """Results by section name, from the slots and samples in the order in which they ran."""
    results = {}
    for bound_section in sections:
        section = bound_section.section
        own_rates = [sample for sample in rates if sample.section == section.name]
        subjects = {}
        for subject, bound in bound_section.bound.items():
            own = [s for s in slots if (s.section, s.subject) == (section.name, subject.name)]
            subjects[subject.name] = SubjectResult(
                case=section.case_of(subject),
                bound=bound,
                comparable_with_floor=subject.threads is None,
                calls=sum(slot.calls for slot in own),
                latency_us=tuple(slot.latency_us for slot in own),
            )
        results[section.name] = SectionResult(
            case=section.case,
            subjects=subjects,
            matmul_gflop_s=_rate([sample.matmul_gflop_s for sample in own_rates]),
            read_gb_s=_rate([sample.read_gb_s for sample in own_rates]),
            seed=seed,
        )
    return results


def _rate(values: Sequence[float]) -> Rate | None:
    return Rate(tuple(values)) if values else None
