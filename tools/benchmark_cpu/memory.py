"""Memory that one call takes beyond its inputs and outputs."""

import ctypes
import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

from flashverify.abba import workload
from flashverify.abba.arms import Arm
from flashverify.abba.case import Case
from flashverify.abba.workload import Workload

METHOD = (
    "peak resident set of the first call (VmHWM, reset before it) minus the resident set before "
    "it; inputs and outputs were touched before, and a small call had started the threads"
)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclasses.dataclass(frozen=True)
class CallMemory:
    """Planned workspace, and growth of the resident set, workspace included.

    ``growth_bytes`` is None where this kernel lets no process reset its peak.
    """

    workspace_bytes: int
    growth_bytes: int | None


def measure(inputs: Workload, route: str, seed: int) -> CallMemory:
    """Memory of the first call of a route over ``inputs``."""
    small = dataclasses.replace(inputs.case, context=min(inputs.case.context, 4096))
    Arm("small", route, workload.make(small, seed, None))()
    arm = Arm("memory", route, inputs)
    return CallMemory(arm.workspace_bytes, growth_bytes(arm))


def growth_bytes(call: Callable[[], object]) -> int | None:
    """How far the resident set rises while ``call`` runs; None where the kernel cannot tell."""
    _give_back_free_memory()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def required_bytes(cases: list[Case]) -> int:
    """Peak memory of a run over these cases: all their caches at once, one at work."""
    return sum(case.kv_allocated_bytes for case in cases) + max(
        sum(case.memory_parts_bytes().values()) for case in cases
    )


def _give_back_free_memory() -> None:
    # Freed memory that the allocator keeps is resident, and would hide what a call takes of it.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
