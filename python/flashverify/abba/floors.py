"""What the machine itself can do, measured in the same run as the arms.

The byte floor is the time of reading the live KV bytes once; the arithmetic floor the time of
the pass's operations at the rate of torch's own FP32 matrix product.
"""

import time

import torch

from flashverify.abba.workload import Workload

READ_DESCRIPTION = (
    "torch.amax over the int64 view of the same K and V caches, all of torch's threads; "
    "the best sample of the run, the median beside it"
)
MATMUL_DESCRIPTION = (
    "torch.mm of two 1024 x 1024 FP32 matrices, all of torch's threads; "
    "the best sample of the run, the median beside it"
)

_SAMPLES_PER_CALL = 3
_MATRIX_SIZE = 1024


class MachineRates:
    """Collects samples of read bandwidth and FP32 matrix rate."""

    def __init__(self, workload: Workload) -> None:
        # Of reductions in torch, the int64 maximum alone keeps pace with memory here: 60 GB/s
        # out of the last-level cache on 2 cores, where a sum over bytes gives 1.
        self._caches = [_as_int64(cache) for cache in (workload.k_cache, workload.v_cache)]
        self._matrix = torch.rand(_MATRIX_SIZE, _MATRIX_SIZE)
        self._product = torch.empty_like(self._matrix)
        self.read_gb_s: list[float] = []
        self.matmul_gflop_s: list[float] = []

    def sample(self) -> None:
        """Takes a few samples of both rates."""
        for _ in range(_SAMPLES_PER_CALL):
            start = time.perf_counter()
            torch.mm(self._matrix, self._matrix, out=self._product)
            seconds = time.perf_counter() - start
            self.matmul_gflop_s.append(2e-9 * _MATRIX_SIZE**3 / seconds)
        read_bytes = sum(cache.nbytes for cache in self._caches)
        for _ in range(_SAMPLES_PER_CALL):
            start = time.perf_counter()
            for cache in self._caches:
                cache.amax()
            seconds = time.perf_counter() - start
            self.read_gb_s.append(1e-9 * read_bytes / seconds)


def _as_int64(cache: torch.Tensor) -> torch.Tensor:
    """The cache's bytes but the last few; those of a cache below eight bytes as they are."""
    data = cache.view(-1).view(torch.uint8)
    return data[: len(data) // 8 * 8].view(torch.int64) if len(data) >= 8 else data
