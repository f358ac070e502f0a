import pytest

from flashverify.abba import floors, workload
from flashverify.abba.case import Case
from flashverify.abba.timing import CpuTimer


def test_rates_are_positive_and_collected():
    rates = floors.MachineRates(workload.make(Case(context=4096), 0, None), CpuTimer())
    rates.sample()
    rates.sample()
    assert len(rates.read_gb_s) == len(rates.matmul_gflop_s) == 6
    assert all(0.001 < rate < 10_000 for rate in rates.read_gb_s)
    assert all(0.01 < rate < 1_000_000 for rate in rates.matmul_gflop_s)


@pytest.mark.parametrize(("head_dim", "page_size"), [(1, 1), (3, 1), (3, 3), (64, 16)])
def test_every_whole_word_of_the_caches_is_read(head_dim, page_size):
    case = Case(context=1, q_len=1, q_heads=1, head_dim=head_dim, page_size=page_size)
    made = workload.make(case, 0, None)
    rates = floors.MachineRates(made, CpuTimer())
    rates.sample()
    read_bytes = sum(cache.nbytes for cache in rates._caches)
    assert made.k_cache.nbytes * 2 - 16 < read_bytes <= made.k_cache.nbytes * 2
    assert read_bytes > 0
