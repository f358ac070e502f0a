"""What a run on CUDA needs: graphs, a timer with a defined state of the L2 cache, device names.

A pass takes microseconds there, so the arms and the reads that they are held against are
captured into CUDA graphs and timed by events on the device. What the pass before leaves in the
L2 cache would decide the time: each timed call follows one of three flushes.
"""

import subprocess
from collections.abc import Callable

import torch

FLUSHES = {
    "read": "L2 flushed before each call by reading 256 MiB of other data, which leaves it clean",
    "memset": "L2 flushed before each call by a memset of 256 MiB, which leaves it dirty",
    "none": "L2 left as the previous call leaves it",
}
_FLUSH_BYTES = 256 << 20


class CudaTimer:
    """CUDA events around one call on the current stream, after a flush of ``FLUSHES``."""

    def __init__(self, flush: str = "read") -> None:
        self.flush = flush
        self.description = f"CUDA events around one graph replay; {FLUSHES[flush]}"
        # Longer than any L2 cache, and than what one can keep of it.
        self._filler = torch.zeros(_FLUSH_BYTES // 8, dtype=torch.int64, device="cuda")
        self._sink = torch.empty((), dtype=torch.int64, device="cuda")
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def time_us(self, call: Callable[[], object]) -> float:
        """Runs ``call`` once and returns its duration on the device in microseconds."""
        if self.flush == "read":
            torch.amax(self._filler, dim=0, out=self._sink)
        elif self.flush == "memset":
            self._filler.zero_()
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return 1e3 * float(self._start.elapsed_time(self._end))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """``call`` as the replay of a CUDA graph; it must have run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()

    return replay


def device_name() -> str:
    """The current CUDA device's name."""
    return torch.cuda.get_device_name()


def driver_version() -> str | None:
    """The driver's version as nvidia-smi tells it; None where there is no such program."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None
