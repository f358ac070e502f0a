import numpy as np
import pytest

from flashverify.abba.stats import paired_ratio, summarise


def test_summary_of_known_values():
    summary = summarise([5.0, 1.0, 2.0, 3.0, 100.0])
    assert summary.median == 3.0
    assert summary.mad == 2.0
    assert summary.p10 == pytest.approx(1.4)
    assert summary.p90 == pytest.approx(62.0)


def test_summary_of_one_value():
    summary = summarise([7.5])
    assert (summary.median, summary.mad, summary.p10, summary.p90) == (7.5, 0.0, 7.5, 7.5)


def test_equal_ratios_give_an_interval_without_width():
    ratio = paired_ratio([1.25] * 10, seed=0)
    assert ratio.median == 1.25
    assert ratio.ci95 == (1.25, 1.25)


def test_one_block_gives_no_interval():
    assert paired_ratio([1.25], seed=0).ci95 is None


def test_the_seed_decides_the_interval():
    # Many values, so that no percentile falls on the same one twice.
    ratios = list(np.random.default_rng(1).normal(1.1, 0.05, size=2000))
    assert paired_ratio(ratios, seed=3) == paired_ratio(ratios, seed=3)
    assert paired_ratio(ratios, seed=3).median == paired_ratio(ratios, seed=4).median
    assert paired_ratio(ratios, seed=3).ci95 != paired_ratio(ratios, seed=4).ci95


def test_the_interval_is_the_bootstraps_not_the_samples():
    # Of two values, a resample's median is the low one, the mean or the high one with
    # probability 1/4, 1/2, 1/4: the 2.5 and 97.5 percentiles are the values themselves.
    assert paired_ratio([1.0, 2.0], seed=0).ci95 == (1.0, 2.0)
    # Of 101 values 0 .. 100, the median's standard error is about that of the binomial
    # order statistics 40 and 60.
    low, high = paired_ratio([float(value) for value in range(101)], seed=0).ci95 or (0, 0)
    assert low == pytest.approx(40, abs=1.5)
    assert high == pytest.approx(60, abs=1.5)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    generator = np.random.default_rng(5)
    runs, covered = 60, 0
    for run in range(runs):
        low, high = paired_ratio(list(generator.normal(1.0, 0.1, size=25)), seed=run).ci95 or (2, 2)
        covered += low <= 1.0 <= high
    # 95 % of 60 is 57; fewer than 50 would be a one in 10000 event.
    assert covered >= 50
