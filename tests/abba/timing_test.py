import gc
import itertools

import pytest

from flashverify.abba.stats import paired_ratio
from flashverify.abba.timing import BLOCKS_PER_SAMPLE, Block, CpuTimer, Slot, run_blocks


class Recorder:
    """Arms, samples and steps that write down when they ran, and a timer on a made-up clock."""

    description = "made up"

    def __init__(self, drift_us=0.0, speed=None):
        self.log = []
        self.speed = speed or {"A": 100.0, "B": 120.0}
        self.drift_us = drift_us
        self.calls = 0

    def arms(self):
        return {name: lambda name=name: self.log.append(name) for name in ("A", "B")}

    def time_us(self, call):
        call()
        self.log[-1] = self.log[-1].lower()
        self.calls += 1
        return self.speed[self.log[-1].upper()] + self.drift_us * self.calls

    def run(self, warmups, blocks):
        return run_blocks(
            self.arms(),
            self,
            warmups=warmups,
            blocks=blocks,
            sample=lambda: self.log.append("sample"),
            step=lambda: self.log.append("step"),
        )


def test_order_of_calls_is_warm_ups_then_abba():
    recorder = Recorder()
    blocks = recorder.run(warmups=2, blocks=2)
    expected = ["A", "B", "step"] * 2 + ["sample", "A", "B"] + ["a", "b", "b", "a", "step"] * 2
    assert recorder.log == [*expected, "sample"]
    assert [[slot.arm for slot in block.slots] for block in blocks] == [list("ABBA")] * 2
    assert [block.index for block in blocks] == [0, 1]


def test_rates_are_sampled_through_the_whole_run_and_the_arms_warmed_after():
    recorder = Recorder()
    recorder.run(warmups=0, blocks=2 * BLOCKS_PER_SAMPLE + 1)
    places = [index for index, entry in enumerate(recorder.log) if entry == "sample"]
    assert len(places) == 4
    assert all(recorder.log[place + 1 : place + 4] == ["A", "B", "a"] for place in places[:-1])


def test_each_slot_keeps_its_raw_time():
    (block,) = Recorder(drift_us=1.0).run(warmups=0, blocks=1)
    assert [slot.latency_us for slot in block.slots] == [101.0, 122.0, 123.0, 104.0]
    assert block.sum_us("A") == 205.0
    assert block.ratio_b_over_a() == 245.0 / 205.0


@pytest.mark.parametrize("drift_us", [5.0, -0.3])
def test_abba_removes_a_linear_drift_that_unpaired_halves_keep(drift_us):
    blocks = Recorder(drift_us, {"A": 100.0, "B": 100.0}).run(warmups=0, blocks=10)
    assert [block.ratio_b_over_a() for block in blocks] == pytest.approx([1.0] * 10, abs=1e-12)
    # Had the arms run in the order A B A B, the drift would look like a difference.
    paired = [
        (block.slots[1].latency_us + block.slots[3].latency_us)
        / (block.slots[0].latency_us + block.slots[2].latency_us)
        for block in blocks
    ]
    assert abs(paired_ratio(paired, seed=0).median - 1) > 1e-3


def test_a_neighbour_that_slows_whole_blocks_does_not_move_the_ratio():
    slow = itertools.cycle((1.0, 3.0, 1.7))
    blocks = [
        Block(
            index,
            tuple(
                Slot(arm, factor * us) for arm, us in zip("ABBA", (100, 110, 110, 100), strict=True)
            ),
        )
        for index, factor in zip(range(30), slow, strict=False)
    ]
    ratio = paired_ratio([block.ratio_b_over_a() for block in blocks], seed=0)
    assert ratio.median == pytest.approx(1.1)
    assert ratio.ci95 == pytest.approx((1.1, 1.1))


def test_no_garbage_collection_while_timing_and_the_setting_comes_back():
    seen = []
    run_blocks(
        {"A": lambda: seen.append(gc.isenabled()), "B": lambda: None},
        CpuTimer(),
        warmups=1,
        blocks=1,
        sample=lambda: None,
        step=lambda: None,
    )
    assert seen and not any(seen)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        run_blocks(
            {"A": lambda: 1 / 0, "B": lambda: None},
            CpuTimer(),
            warmups=1,
            blocks=1,
            sample=lambda: None,
            step=lambda: None,
        )
    assert gc.isenabled()


def test_cpu_timer_measures_in_microseconds():
    import time

    assert 20_000 <= CpuTimer().time_us(lambda: time.sleep(0.02)) < 2_000_000
