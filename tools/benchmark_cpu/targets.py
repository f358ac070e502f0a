"""The speed that the CPU kernels are held to, as rows that say whether it was reached."""

import dataclasses
from collections.abc import Callable, Mapping

from flashverify.abba.stats import Ratio
from tools.benchmark_cpu.memory import CallMemory
from tools.benchmark_cpu.results import SectionResult
from tools.benchmark_cpu.sections import (
    FP32,
    HALF,
    ONE_THREAD,
    TINY_APPEND,
    TINY_ATTENTION,
    TORCH,
)

# vLLM 0.32's CPU attention operator (bf16 query, FP8 cache, page 128) on a machine of this kind.
QUOTED_VLLM_MS = {"256k": 172.0, "256k_q1": 27.0}

# What the absolute targets were set at.
REFERENCE_GFLOP_S = 230.0

# Nothing beats a floor. Where something did, by more than noise, the machine was too busy while
# its rates were measured, and what hangs on them is not judged.
BEATEN_FLOOR = 0.95

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """One row. ``measured`` and ``met`` are None where nothing was measured or is judged.

    ``raw_limit`` is the limit before it was scaled to this machine's matrix rate.
    """

    name: str
    note: str
    unit: str
    at_least: bool
    limit: float
    measured: float | None
    ci95: tuple[float, float] | None
    raw_limit: float | None
    met: bool | None


def rows(
    found: Mapping[str, SectionResult], memory: CallMemory | None, *, judged: bool
) -> list[Target]:
    """Every target. ``judged`` False leaves the verdicts out: the cases were not the real ones."""

    def row(
        name: str,
        limit: float,
        measured: "float | Ratio | None",
        *,
        unit: str = "x",
        at_least: bool = False,
        note: str = "",
        raw_limit: float | None = None,
        floor: Ratio | None = None,
    ) -> Target:
        ci95 = measured.ci95 if isinstance(measured, Ratio) else None
        value = measured.median if isinstance(measured, Ratio) else measured
        met = None
        if floor is not None and floor.median < BEATEN_FLOOR:
            note = f"NOT JUDGED, machine too busy: floor beaten, {floor.median:.2f} x"
        elif judged and value is not None:
            met = value >= limit if at_least else value <= limit
        return Target(name, note, unit, at_least, limit, value, ci95, raw_limit, met)

    def of(
        section: str, measure: Callable[[SectionResult], "float | Ratio | None"], *needed: str
    ) -> "float | Ratio | None":
        result = found.get(section)
        if result is None or any(name not in result.subjects for name in needed):
            return None
        return measure(result)

    def floor_of(section: str) -> Ratio | None:
        result = found.get(section)
        return None if result is None else result.over_floor(FP32)

    def median_us(subject: str) -> Callable[[SectionResult], float]:
        return lambda result: result.subjects[subject].summary.median

    def median_ms(result: SectionResult) -> float:
        return result.subjects[FP32].summary.median / 1e3

    targets = []
    for section in ("64k", "256k"):
        result = found.get(section)
        over_arithmetic = None if result is None else result.over_arithmetic(FP32)
        targets.append(
            row(
                f"{section}: {FP32} over the arithmetic floor",
                1.35,
                over_arithmetic,
                note="floor at torch's FP32 matmul rate of the same round",
                floor=over_arithmetic,
            )
        )
    targets += [
        row(
            f"{section}: {FP32} over {HALF}",
            1.05,
            of(section, lambda result: result.ratio(FP32, HALF)),
            note="same bytes, same round",
        )
        for section in ("4k", "16k", "64k", "256k")
    ]
    targets.append(
        row(
            f"256k: {TORCH} over {FP32}",
            8.0,
            of("256k", lambda result: result.ratio(TORCH, FP32)),
            at_least=True,
            note="dequantise, matmul, softmax, matmul",
        )
    )
    for section, quoted_ms in QUOTED_VLLM_MS.items():
        targets.append(
            row(
                f"{section}: {FP32}, half of vLLM's time",
                quoted_ms / 2,
                of(section, median_ms),
                unit="ms",
                note=f"vLLM {quoted_ms:g} ms quoted, not measured here",
            )
        )
    targets.append(
        row(
            f"256k_q1: {FP32} over the larger floor",
            1.5,
            floor_of("256k_q1"),
            note="of reading K and V once, and of arithmetic",
            floor=floor_of("256k_q1"),
        )
    )
    for section, raw_ms in (("b4_q8", 11.0), ("b4_q1", 3.5)):
        result = found.get(section)
        rate = result.matmul_gflop_s if result is not None else None
        scale = REFERENCE_GFLOP_S / rate.summary.median if rate is not None else 1.0
        targets.append(
            row(
                f"{section}: {FP32}",
                raw_ms * scale,
                of(section, median_ms),
                unit="ms",
                note=f"{raw_ms:g} ms at {REFERENCE_GFLOP_S:g} GFLOP/s, scaled by {scale:.3f}",
                raw_limit=raw_ms,
                floor=floor_of(section),
            )
        )
    targets.append(
        row(
            "64k: 1 thread over all threads",
            1.8,
            of("64k", lambda result: result.ratio(ONE_THREAD, FP32), ONE_THREAD),
            at_least=True,
            note="set for 2 threads",
        )
    )
    for subject in (TINY_ATTENTION, TINY_APPEND):
        targets.append(
            row(
                f"tiny: {subject} from Python",
                15.0,
                of("tiny", median_us(subject)),
                unit="us",
                note="q 1, 16 keys; checks included",
            )
        )
    for name, size in (
        ("workspace", memory.workspace_bytes if memory else None),
        ("growth of the resident set in a call", memory.growth_bytes if memory else None),
    ):
        targets.append(
            row(
                f"256k: {name}",
                16.0,
                None if size is None else size / _MIB,
                unit="MiB",
                note="beyond inputs and outputs",
            )
        )
    return targets
