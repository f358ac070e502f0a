"""No copies, no leaks, and nothing of the caller's kept or freed."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import flashverify as fv
from tests.support import backends, cases

PAGE_BYTES = 4096


def arguments(seq_len: int = 40, **options: Any) -> dict[str, Any]:
    request = cases.random_request(1, q_len=2, seq_len=seq_len, q_heads=4, kv_heads=2)
    return backends.arguments(cases.paged([request], **options))


def everything() -> dict[str, Any]:
    return arguments(
        sinks=torch.zeros(4), k_dequant_scale=torch.ones(2), v_dequant_scale=torch.ones(1)
    ) | {"out": torch.empty(2, 4, 64)}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def bad_arguments() -> dict[str, Any]:
    return everything() | {"seq_lens": torch.tensor([-1], dtype=torch.int32)}


@pytest.mark.parametrize("refused", [False, True])
def test_reference_counts_stay(refused: bool) -> None:
    called = bad_arguments() if refused else everything()

    def call() -> None:
        try:
            fv.paged_attention(**called)
        except fv.OutOfRangeError:
            assert refused

    call()
    counts = {name: sys.getrefcount(value) for name, value in called.items()}
    for _ in range(100):
        call()
    gc.collect()
    assert {name: sys.getrefcount(value) for name, value in called.items()} == counts


@pytest.mark.parametrize("refused", [False, True])
def test_tensors_are_freed_with_their_last_reference(refused: bool) -> None:
    called = bad_arguments() if refused else everything()
    tensors = [weakref.ref(value) for value in called.values() if isinstance(value, torch.Tensor)]
    try:
        fv.paged_attention(**called)
    except fv.OutOfRangeError:
        assert refused
    del called
    gc.collect()
    assert not any(tensor() for tensor in tensors)


def test_memory_does_not_grow_with_calls() -> None:
    good, bad = everything(), bad_arguments()
    key = torch.randn(2, 2, 64)
    caches = torch.zeros(2, 1, 16, 2, 64, dtype=torch.float16)
    partials, lses = torch.randn(3, 2, 4, 64), torch.randn(3, 2, 4)

    def round_of_calls() -> None:
        for _ in range(500):
            fv.paged_attention(**good, return_lse=True)
            fv.append_kv(key, key, *caches, torch.arange(2))
            fv.merge_states(partials, lses)
            with pytest.raises(fv.OutOfRangeError):
                fv.paged_attention(**bad)
            with pytest.raises(fv.InvalidArgumentError):
                fv.paged_attention(**good | {"q": [1]})

    round_of_calls()
    before = resident_bytes()
    for _ in range(4):
        round_of_calls()
    # 10,000 calls: a leak of one tensor's 2 KiB each would be 20 MiB.
    assert resident_bytes() - before < 4 << 20


def test_caches_are_read_in_place() -> None:
    """A cache of 256 MiB is attended without a second one."""
    pages = 256
    cache = torch.zeros(pages, 2, 2048, 1, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    called = {
        "q": torch.zeros(1, 2, 256),
        "k_cache": cache[:, 0],
        "v_cache": cache[:, 1],
        "page_table": torch.arange(pages, dtype=torch.int32)[None],
        "seq_lens": torch.tensor([2048 * pages], dtype=torch.int32),
    }
    fv.paged_attention(**called | {"seq_lens": torch.tensor([1], dtype=torch.int32)})
    before = resident_bytes()
    out = fv.paged_attention(**called)
    assert resident_bytes() - before < 32 << 20
    assert not out.any()


def test_plans_of_ever_new_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashverify import attention

    monkeypatch.setattr(attention, "_MAX_PLANS", 8)
    attention._plans.clear()
    for page_size in range(1, 30):
        fv.paged_attention(**arguments(8) | _cache(page_size))
    assert len(attention._plans) <= 8


def _cache(page_size: int) -> dict[str, torch.Tensor]:
    cache = torch.zeros(1, page_size, 2, 64, dtype=torch.float16)
    return {
        "k_cache": cache,
        "v_cache": cache,
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
    }
