"""Order, warm-ups and conditions of the turns, with calls that only note themselves."""

import pytest

import flashverify as fv
from flashverify.abba.case import Case
from tools.benchmark_cpu import results, round_robin
from tools.benchmark_cpu.round_robin import BoundSection
from tools.benchmark_cpu.sections import Section, Subject
from tools.benchmark_cpu.subjects import Bound


class FakeTimer:
    """Says that every call took ``us``."""

    description = "fake"

    def __init__(self, us):
        self.us = us

    def time_us(self, call):
        call()
        return self.us


class FakeRates:
    def __init__(self):
        self.matmul_gflop_s = []
        self.read_gb_s = []

    def sample(self):
        count = len(self.read_gb_s)
        self.matmul_gflop_s += [count + 1.0, count + 3.0, count + 2.0]
        self.read_gb_s += [10.0, 20.0 - count, 5.0]


def bound_section(name, subjects, notes, *, rated=False):
    def note(subject):
        return lambda: notes.append((subject.name, fv.get_num_threads(), fv.cpu_isa()))

    section = Section(name, Case(), tuple(subjects), rated)
    bound = {subject: Bound(note(subject)) for subject in subjects}
    return BoundSection(section, bound, FakeRates() if rated else None)


def run(sections, *, us=30_000.0, warmups=0, rounds=2):
    steps = []
    slots, rates = round_robin.run(
        sections, FakeTimer(us), warmups=warmups, rounds=rounds, step=steps.append
    )
    assert len(steps) == round_robin.steps(sections, warmups=warmups, rounds=rounds)
    return slots, rates


def test_every_other_round_runs_backwards():
    sections = [
        bound_section("s", [Subject("a"), Subject("b")], []),
        bound_section("t", [Subject("c")], []),
    ]
    slots, _ = run(sections, rounds=3)
    names = ["".join(slot.subject for slot in slots if slot.round == number) for number in range(3)]
    assert names == ["abc", "cba", "abc"]


def test_warmups_do_not_count():
    notes = []
    section = bound_section("s", [Subject("a")], notes, rated=True)
    slots, rates = run([section], warmups=3, rounds=1)
    # One call that settles and one that is timed, in each of four rounds.
    assert len(notes) == 8
    assert [slot.round for slot in slots] == [0]
    assert [sample.round for sample in rates] == [0]


@pytest.mark.parametrize(("us", "calls"), [(30_000.0, 1), (4_000.0, 5), (10.0, 200)])
def test_short_calls_are_timed_more_often(us, calls):
    slots, _ = run([bound_section("s", [Subject("a")], [])], us=us, rounds=1)
    assert [(slot.calls, slot.latency_us) for slot in slots] == [(calls, us)]


def test_threads_and_instruction_set_hold_for_their_subject_alone():
    notes = []
    isa = fv.available_cpu_isas()[-1]
    subjects = [Subject("a", threads=1), Subject("b", isa=isa), Subject("c")]
    threads = fv.get_num_threads()
    fv.set_num_threads(3)
    try:
        run([bound_section("s", subjects, notes)], rounds=1)
        assert fv.get_num_threads() == 3
    finally:
        fv.set_num_threads(threads)
    best = fv.cpu_isa()
    assert set(notes) == {("a", 1, best), ("b", 3, isa), ("c", 3, best)}


def test_a_rate_is_the_best_sample_before_and_after_its_section_in_its_round():
    section = bound_section("s", [Subject("a")], [], rated=True)
    slots, rates = run([section], warmups=1, rounds=2)
    # Six samples a round, those of the warm-up not counted.
    assert [sample.matmul_gflop_s for sample in rates] == [12.0, 18.0]
    assert [sample.read_gb_s for sample in rates] == [14.0, 10.0]
    found = results.collect([section], slots, rates, seed=0)
    assert found["s"].matmul_gflop_s.per_round == (12.0, 18.0)
    assert found["s"].matmul_gflop_s.best == 18.0
