"""What the machine itself can do, measured in the same run as the arms.

The byte floor is the time of reading the live KV bytes once; the arithmetic floor the time of
the pass's operations at the rate of torch's own FP32 matrix product.
"""

from collections.abc import Callable

import torch

from flashverify.abba.cuda import captured
from flashverify.abba.timing import Timer
from flashverify.abba.workload import Workload

_BEST = "the best sample of the run, the median beside it"
READ_DESCRIPTION = {
    "cpu": "torch.amax over the int64 view of the same K and V caches, all of torch's threads; "
    + _BEST,
    "cuda": "torch.amax over the int64 view of the same K and V caches, side by side in one graph, "
    "whose replay is timed as the arms are; " + _BEST,
}
MATMUL_DESCRIPTION = {
    "cpu": "torch.mm of two 1024 x 1024 FP32 matrices, all of torch's threads; " + _BEST,
    "cuda": "torch.mm of two 8192 x 8192 FP16 matrices, which tensor cores multiply; " + _BEST,
}

_SAMPLES_PER_CALL = 3
_MATRICES = {"cpu": (1024, torch.float32), "cuda": (8192, torch.float16)}


class MachineRates:
    """Collects samples of read bandwidth and matrix rate, by the timer of the arms."""

    def __init__(self, workload: Workload, timer: Timer) -> None:
        # Of reductions in torch, the int64 maximum alone keeps pace with memory here: 60 GB/s
        # out of the last-level cache on 2 cores, where a sum over bytes gives 1.
        self._caches = [_as_int64(cache) for cache in (workload.k_cache, workload.v_cache)]
        device = workload.q.device
        size, dtype = _MATRICES[device.type]
        self._matrix = torch.rand(size, size, device=device).to(dtype)
        self._product = torch.empty_like(self._matrix)
        self._timer = timer
        self._read: Callable[[], object] = self._read_caches
        if device.type == "cuda":
            # One after the other, the second would wait for the first one's last blocks.
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._read_caches_at_once()
            self._read = captured(self._read_caches_at_once)
        self.read_gb_s: list[float] = []
        self.matmul_gflop_s: list[float] = []

    def sample(self) -> None:
        """Takes a few samples of both rates."""
        for _ in range(_SAMPLES_PER_CALL):
            elapsed_us = self._timer.time_us(self._multiply)
            self.matmul_gflop_s.append(2e-3 * len(self._matrix) ** 3 / elapsed_us)
        read_bytes = sum(cache.nbytes for cache in self._caches)
        for _ in range(_SAMPLES_PER_CALL):
            self.read_gb_s.append(1e-3 * read_bytes / self._timer.time_us(self._read))

    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)

    def _read_caches(self) -> None:
        for cache in self._caches:
            cache.amax()

    def _read_caches_at_once(self) -> None:
        stream = torch.cuda.current_stream()
        self._beside.wait_stream(stream)
        with torch.cuda.stream(self._beside):
            self._caches[1].amax()
        self._caches[0].amax()
        stream.wait_stream(self._beside)


def _as_int64(cache: torch.Tensor) -> torch.Tensor:
    """The cache's bytes but the last few; those of a cache below eight bytes as they are."""
    data = cache.view(-1).view(torch.uint8)
    return data[: len(data) // 8 * 8].view(torch.int64) if len(data) >= 8 else data
