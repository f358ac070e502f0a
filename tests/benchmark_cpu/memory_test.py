"""Growth of the resident set is seen, also where the memory is given back."""

import pytest
import torch

from tools.benchmark_cpu import memory
from tools.benchmark_cpu.sections import all_sections

_MIB = 1 << 20


def growth_bytes(call):
    growth = memory.growth_bytes(call)
    if growth is None:
        pytest.skip("this kernel resets no peak")
    return growth


@pytest.mark.parametrize("mib", [32, 100])
def test_memory_that_a_call_takes_and_frees_is_seen(mib):
    growth = growth_bytes(lambda: torch.ones(mib * _MIB, dtype=torch.uint8))
    # The kernel counts resident pages in batches.
    assert (mib - 1) * _MIB < growth < (mib + 8) * _MIB


def test_memory_that_an_earlier_call_freed_hides_nothing():
    # Small blocks, which the allocator keeps when they are freed.
    blocks = [bytearray(4096) for _ in range(16 * 256)]
    del blocks
    assert growth_bytes(lambda: len([bytearray(4096) for _ in range(8 * 256)])) > 6 * _MIB


def test_a_call_that_takes_nothing_grows_by_nothing():
    assert growth_bytes(lambda: None) < _MIB


def test_required_memory_counts_every_cache():
    cases = [section.case for section in all_sections().values()]
    assert memory.required_bytes(cases) > sum(case.kv_allocated_bytes for case in cases)
    assert memory.required_bytes(cases) < 8 << 30
