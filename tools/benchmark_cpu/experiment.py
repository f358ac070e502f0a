"""One run from options to result."""

import dataclasses
import os
from typing import Any

import torch
from tqdm import tqdm

import flashverify as fv
from flashverify.abba import environment, workload
from flashverify.abba.case import Case, available_memory_bytes, format_bytes
from flashverify.abba.outcome import UsageError
from flashverify.abba.timing import CpuTimer
from flashverify.abba.workload import Workload
from tools.benchmark_cpu import memory, results, round_robin, targets
from tools.benchmark_cpu.memory import CallMemory
from tools.benchmark_cpu.options import Options
from tools.benchmark_cpu.results import SectionResult
from tools.benchmark_cpu.round_robin import BoundSection, RateSample, Slot
from tools.benchmark_cpu.sections import FP32
from tools.benchmark_cpu.subjects import bind
from tools.benchmark_cpu.targets import Target

# The section whose memory is measured.
_MEMORY_SECTION = "256k"


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything measured in one run."""

    options: Options
    environment: dict[str, Any]
    native: dict[str, Any]
    sections: dict[str, SectionResult]
    memory: CallMemory | None
    targets: list[Target]
    slots: list[Slot]
    rates: list[RateSample]


def check_memory(options: Options) -> None:
    """Raises UsageError where the cases need more memory than there is."""
    needed, available = memory.required_bytes(_cases(options)), available_memory_bytes()
    if needed > available:
        raise UsageError(
            f"these cases need {format_bytes(needed)} of memory, and this machine has "
            f"{format_bytes(available)} to give: name fewer in --cases"
        )


def run(options: Options) -> Result:
    """Measures. Raises NotRunError where a kernel cannot run."""
    # torch gets the threads that the kernels have.
    torch.set_num_threads(fv.get_num_threads())
    load_before = os.getloadavg()
    cases = _cases(options)
    with tqdm(total=len(cases), unit="case", leave=False, disable=None) as bar:
        bar.set_description("filling caches")
        inputs, call_memory = {}, None
        for case in cases:
            inputs[case] = workload.make(case, options.seed, None)
            bar.update()
    for section in options.sections:
        # Before anything of this size ran, while no freed memory could hide what a call takes.
        if section.name == _MEMORY_SECTION:
            call_memory = memory.measure(inputs[section.case], FP32, options.seed)
    bound = _bind(options, inputs)
    total = round_robin.steps(bound, warmups=options.warmups, rounds=options.rounds)
    with tqdm(total=total, unit="slot", leave=False, disable=None) as bar:

        def step(name: str) -> None:
            bar.set_description(name)
            bar.update()

        slots, rates = round_robin.run(
            bound,
            CpuTimer(),
            warmups=options.warmups,
            rounds=options.rounds,
            step=step,
        )
    found = results.collect(bound, slots, rates, options.seed)
    info = fv.native_info()
    return Result(
        options=options,
        environment={
            **environment.describe(),
            "torch_threads": torch.get_num_threads(),
            "load_average_before": list(load_before),
            "load_average_after": list(os.getloadavg()),
        },
        native={
            "precision_revision": info["precision_revision"],
            "build_id": info["build_id"],
            "library_sha256": info["library_sha256"],
            "extension_sha256": info["extension_sha256"],
        },
        sections=found,
        memory=call_memory,
        targets=targets.rows(found, call_memory, judged=options.shrink == 1),
        slots=slots,
        rates=rates,
    )


def _cases(options: Options) -> list[Case]:
    cases = [
        section.case_of(subject) for section in options.sections for subject in section.subjects
    ]
    return list(dict.fromkeys(cases))


def _bind(options: Options, inputs: dict[Case, Workload]) -> list[BoundSection]:
    return [
        BoundSection.of(
            section,
            inputs[section.case],
            {
                subject: bind(subject, inputs[section.case_of(subject)])
                for subject in section.subjects
            },
        )
        for section in options.sections
    ]
