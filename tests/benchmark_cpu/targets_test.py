"""Verdicts on made-up measurements that just reach, or just miss, a target."""

import dataclasses

import pytest

from tools.benchmark_cpu import targets
from tools.benchmark_cpu.memory import CallMemory
from tools.benchmark_cpu.results import Rate, SectionResult, SubjectResult
from tools.benchmark_cpu.sections import (
    FP32,
    HALF,
    ONE_THREAD,
    TINY_APPEND,
    TINY_ATTENTION,
    TORCH,
    all_sections,
)
from tools.benchmark_cpu.subjects import Bound

ROUNDS = 3
GFLOP_S, GB_S = 230.0, 15.0


def section(name, times_us, gflop_s=GFLOP_S):
    case = all_sections()[name].case
    subjects = {
        subject: SubjectResult(case, Bound(print), subject != ONE_THREAD, ROUNDS, (us,) * ROUNDS)
        for subject, us in times_us.items()
    }
    rated = name != "tiny"
    return SectionResult(
        case=case,
        subjects=subjects,
        matmul_gflop_s=Rate((gflop_s,) * ROUNDS) if rated else None,
        read_gb_s=Rate((GB_S,) * ROUNDS) if rated else None,
        seed=0,
    )


def rows(found, memory=None, *, judged=True):
    return {row.name: row for row in targets.rows(found, memory, judged=judged)}


# Of the operations (4 x rows x keys x head_dim) at GFLOP_S, and of the bytes at GB_S.
ARITHMETIC_64K_US = 4 * 48 * 65536 * 256 / GFLOP_S / 1e3
ARITHMETIC_256K_US = 4 * ARITHMETIC_64K_US
BYTES_256K_US = 2 * 262144 * 256 / GB_S / 1e3


@pytest.mark.parametrize(
    ("name", "subjects", "row", "measured"),
    [
        (
            "64k",
            {FP32: 1.3 * ARITHMETIC_64K_US, HALF: 1.0},
            "64k: grouped_fp32 over the arithmetic floor",
            1.3,
        ),
        ("64k", {FP32: 104.0, HALF: 100.0}, "64k: grouped_fp32 over grouped_half", 1.04),
        ("4k", {FP32: 104.0, HALF: 100.0}, "4k: grouped_fp32 over grouped_half", 1.04),
        (
            "256k",
            {FP32: 100.0, HALF: 100.0, TORCH: 810.0},
            "256k: torch FP32 eager over grouped_fp32",
            8.1,
        ),
        (
            "256k",
            {FP32: 85e3, HALF: 1.0, TORCH: 1.0},
            "256k: grouped_fp32, half of vLLM's time",
            85,
        ),
        ("256k_q1", {FP32: 13e3}, "256k_q1: grouped_fp32, half of vLLM's time", 13),
        (
            "256k_q1",
            {FP32: 1.4 * BYTES_256K_US},
            "256k_q1: grouped_fp32 over the larger floor",
            1.4,
        ),
        ("b4_q8", {FP32: 10.5e3}, "b4_q8: grouped_fp32", 10.5),
        ("b4_q1", {FP32: 3.4e3}, "b4_q1: grouped_fp32", 3.4),
        (
            "64k",
            {FP32: 100.0, HALF: 100.0, ONE_THREAD: 181.0},
            "64k: 1 thread over all threads",
            1.81,
        ),
        (
            "tiny",
            {TINY_ATTENTION: 14.9, TINY_APPEND: 1.0},
            "tiny: paged_attention from Python",
            14.9,
        ),
        ("tiny", {TINY_ATTENTION: 1.0, TINY_APPEND: 14.9}, "tiny: append_kv from Python", 14.9),
    ],
)
def test_a_target_is_reached_and_a_tenth_slower_is_missed(name, subjects, row, measured):
    reached = rows({name: section(name, subjects)})[row]
    assert reached.measured == pytest.approx(measured, rel=1e-3)
    assert reached.met is True
    slower = {
        subject: us * (1.1 if subject in (FP32, TINY_ATTENTION, TINY_APPEND) else 1.0)
        for subject, us in subjects.items()
    }
    assert rows({name: section(name, slower)})[row].met is False


def test_the_larger_floor_is_that_of_arithmetic_where_the_matrix_rate_is_low():
    times = {FP32: 1.4 * ARITHMETIC_256K_US / 4}
    found = {"256k_q1": section("256k_q1", times, gflop_s=GFLOP_S / 2)}
    row = rows(found)["256k_q1: grouped_fp32 over the larger floor"]
    assert row.measured == pytest.approx(1.4, rel=1e-3)
    assert row.met is True


@pytest.mark.parametrize("name", ["64k", "256k_q1", "b4_q8"])
def test_a_beaten_floor_is_no_success(name):
    found = {name: section(name, {FP32: 1.0, HALF: 1.0})}
    (row,) = (
        row
        for row in targets.rows(found, None, judged=True)
        if row.measured is not None and "floor" in row.note
    )
    assert row.met is None
    assert row.note.startswith("NOT JUDGED, machine too busy: floor beaten, 0.00 x")


def test_absolute_targets_scale_with_the_matrix_rate():
    row = rows({"b4_q8": section("b4_q8", {FP32: 10.9e3}, gflop_s=230.0)})["b4_q8: grouped_fp32"]
    assert (row.raw_limit, row.limit, row.met) == (11.0, 11.0, True)
    row = rows({"b4_q8": section("b4_q8", {FP32: 10.9e3}, gflop_s=260.0)})["b4_q8: grouped_fp32"]
    assert row.raw_limit == 11.0
    assert row.limit == pytest.approx(11 * 230 / 260)
    assert row.met is False


def test_quoted_numbers_say_so():
    quoted = [row for row in targets.rows({}, None, judged=True) if "vLLM" in row.name]
    assert [row.limit for row in quoted] == [86.0, 13.5]
    assert all("quoted, not measured here" in row.note for row in quoted)


@pytest.mark.parametrize(("size", "met"), [(16 << 20, True), ((16 << 20) + 1, False)])
def test_memory(size, met):
    found = rows({}, CallMemory(workspace_bytes=size, growth_bytes=size))
    assert found["256k: workspace"].met is met
    assert found["256k: growth of the resident set in a call"].met is met
    unknown = rows({}, CallMemory(workspace_bytes=size, growth_bytes=None))
    assert unknown["256k: growth of the resident set in a call"].met is None


def test_what_was_not_measured_is_not_judged():
    everything = targets.rows({}, None, judged=True)
    assert len(everything) == 17
    assert {row.measured for row in everything} == {None}
    assert {row.met for row in everything} == {None}


def test_what_is_not_judged_keeps_its_measurement():
    found = {"256k_q1": section("256k_q1", {FP32: 13e3})}
    judged, unjudged = (
        rows(found, judged=flag)["256k_q1: grouped_fp32, half of vLLM's time"]
        for flag in (True, False)
    )
    assert judged.met is True
    assert unjudged == dataclasses.replace(judged, met=None)
