"""The result as JSON, as Markdown and for the terminal."""

import dataclasses
from typing import Any

from flashverify.abba import floors
from flashverify.abba.stats import Ratio
from flashverify.abba.text import describe_case, markdown_table, microseconds, plain_table
from flashverify.abba.timing import CpuTimer
from tools.benchmark_cpu import memory, round_robin
from tools.benchmark_cpu.experiment import Result
from tools.benchmark_cpu.results import Rate, SectionResult, SubjectResult
from tools.benchmark_cpu.sections import FP32
from tools.benchmark_cpu.targets import Target

SCHEMA = 1

_Table = tuple[list[str], list[list[str]]]


def to_json(result: Result) -> dict[str, Any]:
    """The contents of benchmark_cpu.json."""
    return {
        "schema": SCHEMA,
        "command": result.options.command,
        "flags": result.options.flag_values(),
        "environment": result.environment,
        "native": result.native,
        "method": {
            "order": round_robin.DESCRIPTION,
            "timer": CpuTimer.description,
            "matmul": floors.MATMUL_DESCRIPTION["cpu"],
            "bandwidth": floors.READ_DESCRIPTION["cpu"],
            "memory": memory.METHOD,
        },
        "targets": [dataclasses.asdict(target) for target in result.targets],
        "sections": {name: _section(found) for name, found in result.sections.items()},
        "memory": None if result.memory is None else dataclasses.asdict(result.memory),
        "slots": [dataclasses.asdict(slot) for slot in result.slots],
        "rates": [dataclasses.asdict(sample) for sample in result.rates],
    }


def for_terminal(result: Result) -> str:
    """The result as it is printed."""
    lines = [*_head(result), ""]
    for _, table in _tables(result):
        lines += [*plain_table(*table), ""]
    return "\n".join([*lines, _verdict(result)])


def for_markdown(result: Result) -> str:
    """The contents of benchmark_cpu.md."""
    lines = ["# CPU benchmark", "", *(f"- {line}" for line in _head(result)), ""]
    for title, table in _tables(result):
        lines += [f"## {title}", "", *markdown_table(*table), ""]
    lines += [_verdict(result), "", "## Cases", ""]
    lines += [f"- {name}: {describe_case(found.case)}" for name, found in result.sections.items()]
    lines += ["", "## Method", ""]
    lines += [f"- {name}: {text}" for name, text in to_json(result)["method"].items()]
    lines += ["", "## Environment", ""]
    for name, value in {**result.environment, **result.native}.items():
        lines.append(f"- {name}: {'none' if value is None else value}")
    return "\n".join([*lines, f"- command: `{result.options.command}`", ""])


def _section(found: SectionResult) -> dict[str, Any]:
    return {
        "case": dataclasses.asdict(found.case),
        "matmul_gflop_s": _rate(found.matmul_gflop_s),
        "read_gb_s": _rate(found.read_gb_s),
        "subjects": {name: _subject(found, name, one) for name, one in found.subjects.items()},
    }


def _subject(found: SectionResult, name: str, one: SubjectResult) -> dict[str, Any]:
    return {
        "route": one.bound.route,
        "kv_dtype": one.case.kv_dtype,
        "flops": one.case.flops,
        "kv_bytes": one.case.kv_live_bytes,
        "workspace_bytes": one.bound.workspace_bytes,
        "calls": one.calls,
        "latency_us": dataclasses.asdict(one.summary),
        "over_arithmetic_floor": _ratio(found.over_arithmetic(name)),
        "over_arithmetic_floor_at_best_rate": found.over_arithmetic_at_best(name),
        "over_larger_floor": _ratio(found.over_floor(name)),
        "over_grouped_fp32": _ratio(found.ratio(name, FP32)) if FP32 in found.subjects else None,
    }


def _rate(rate: Rate | None) -> dict[str, float] | None:
    return None if rate is None else {"best": rate.best, **dataclasses.asdict(rate.summary)}


def _ratio(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else dataclasses.asdict(ratio)


def _head(result: Result) -> list[str]:
    environment = result.environment
    load = [environment[f"load_average_{when}"][0] for when in ("before", "after")]
    return [
        f"{environment['device']}, {environment['cpu_isa']}, {environment['threads']} threads, "
        f"torch {environment['torch']} with {environment['torch_threads']}",
        f"flashverify {environment['flashverify']}, build {result.native['build_id']}",
        f"{result.options.rounds} rounds after {result.options.warmups}; "
        f"load average {load[0]:.2f} before, {load[1]:.2f} after",
    ]


def _tables(result: Result) -> list[tuple[str, _Table]]:
    return [
        ("Targets", _targets(result.targets)),
        ("Times", _times(result.sections)),
        ("Rates of the machine", _rates(result.sections)),
    ]


def _targets(targets: list[Target]) -> _Table:
    def row(target: Target) -> list[str]:
        measured = "-" if target.measured is None else f"{target.measured:.3g} {target.unit}"
        interval = "-" if target.ci95 is None else "{:.3g} .. {:.3g}".format(*target.ci95)
        sign = ">=" if target.at_least else "<="
        return [
            target.name,
            target.note,
            measured,
            interval,
            f"{sign} {target.limit:.3g} {target.unit}",
            "-" if target.met is None else "yes" if target.met else "NO",
        ]

    header = ["target", "how", "measured", "95 % interval", "limit", "met"]
    return header, [row(target) for target in targets]


def _times(sections: dict[str, SectionResult]) -> _Table:
    def ratio(value: Ratio | float | None) -> str:
        median = value.median if isinstance(value, Ratio) else value
        return "-" if median is None else f"{median:.3f}"

    rows = []
    for section, found in sections.items():
        for name, one in found.subjects.items():
            summary = one.summary
            times = (summary.median, summary.mad, summary.p10, summary.p90)
            over_fp32 = found.ratio(name, FP32) if FP32 in found.subjects else None
            ratios = (
                found.over_arithmetic(name),
                found.over_arithmetic_at_best(name),
                found.over_floor(name),
                over_fp32,
            )
            rows.append([section, name, *map(microseconds, times), *map(ratio, ratios)])
    header = ["case", "subject", "median us", "MAD us", "p10 us", "p90 us"]
    header += ["x arith. floor", "at best rate", "x larger floor", f"x {FP32}"]
    return header, rows


def _rates(sections: dict[str, SectionResult]) -> _Table:
    rows = []
    for section, found in sections.items():
        for name, rate in (
            ("FP32 matmul, GFLOP/s", found.matmul_gflop_s),
            ("read of K and V, GB/s", found.read_gb_s),
        ):
            if rate is not None:
                summary = rate.summary
                values = (summary.median, summary.mad, summary.p10, summary.p90, rate.best)
                rows.append([section, name, *(f"{value:.1f}" for value in values)])
    return ["case", "rate", "median", "MAD", "p10", "p90", "best"], rows


def _verdict(result: Result) -> str:
    judged = [target for target in result.targets if target.met is not None]
    if not judged:
        return "No target was judged."
    reached = sum(1 for target in judged if target.met)
    text = f"{reached} of {len(judged)} targets reached"
    left = len(result.targets) - len(judged)
    return f"{text}; {left} not measured or not judged." if left else f"{text}."
