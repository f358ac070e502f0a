"""Robust summaries, and the paired bootstrap of the ratio of two arms."""

import dataclasses
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10000


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median, median absolute deviation from it, and the 10th and 90th percentile."""

    median: float
    mad: float
    p10: float
    p90: float


def summarise(values: Sequence[float]) -> Summary:
    """Summary of at least one value."""
    array = np.asarray(values, dtype=np.float64)
    median = float(np.median(array))
    p10, p90 = (float(value) for value in np.percentile(array, (10, 90)))
    return Summary(median, float(np.median(np.abs(array - median))), p10, p90)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median of the blocks' ratios; ``ci95`` is None where one block gives no interval."""

    median: float
    ci95: tuple[float, float] | None


def paired_ratio(block_ratios: Sequence[float], seed: int) -> Ratio:
    """Median of per-block ratios, with the percentile bootstrap's 95 % interval.

    Blocks are resampled whole, so that what the two arms of a block share stays shared.
    """
    ratios = np.asarray(block_ratios, dtype=np.float64)
    median = float(np.median(ratios))
    if len(ratios) < 2:
        return Ratio(median, None)
    generator = np.random.default_rng(seed)
    medians: list[float] = []
    while len(medians) < RESAMPLES:
        # So many at a time that the picks of a run with many blocks fit memory.
        count = min(RESAMPLES - len(medians), 1 + 10**6 // len(ratios))
        picks = generator.integers(len(ratios), size=(count, len(ratios)))
        medians.extend(np.median(ratios[picks], axis=1))
    low, high = np.percentile(medians, (2.5, 97.5))
    return Ratio(median, (float(low), float(high)))
