"""Subjects bound to their inputs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

import flashverify as fv
from flashverify.abba import reference
from flashverify.abba.arms import Arm
from flashverify.abba.workload import Workload
from tools.benchmark_cpu.sections import APPEND, EAGER, Subject


@dataclasses.dataclass(frozen=True)
class Bound:
    """What to call, the route that the native side says it took, and its workspace."""

    call: Callable[[], object]
    route: str | None = None
    workspace_bytes: int | None = None


@contextlib.contextmanager
def conditions(subject: Subject) -> Iterator[None]:
    """The subject's threads and instruction set, entered outside of what is timed."""
    with contextlib.ExitStack() as stack:
        if subject.isa is not None:
            stack.enter_context(fv.cpu_isa_override(subject.isa))
        if subject.threads is not None:
            stack.callback(fv.set_num_threads, fv.get_num_threads())
            fv.set_num_threads(subject.threads)
        yield


def bind(subject: Subject, workload: Workload) -> Bound:
    """The subject over a workload. Raises NotRunError where the library refuses it."""
    if subject.kind == EAGER:
        return Bound(lambda: reference.fp32(workload))
    if subject.kind == APPEND:
        return Bound(_append(workload))
    with conditions(subject):
        arm = Arm(subject.name, subject.route, workload)
        return Bound(arm, arm.first_run(), arm.workspace_bytes)


def _append(workload: Workload) -> Callable[[], None]:
    case = workload.case
    row = torch.ones(1, case.kv_heads, case.head_dim, dtype=torch.float16)
    slots = torch.zeros(1, dtype=torch.int64)

    def call() -> None:
        fv.append_kv(
            row,
            row,
            workload.k_cache,
            workload.v_cache,
            slots,
            k_dequant_scale=workload.k_dequant_scale,
            v_dequant_scale=workload.v_dequant_scale,
        )

    return call
