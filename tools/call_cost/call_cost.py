"""What one call on a tiny problem costs from Python, checks included.

Prints the least time of many short runs: what the call costs when nothing else
has the CPU. Medians on a shared machine tell more about the neighbours.
"""

import json
import timeit
from collections.abc import Callable, Sequence
from typing import Final

import torch
from absl import app, flags

import flashverify as fv

LIMITS_US: Final = {"attention": 15.0, "append": 10.0}

_RUNS = flags.DEFINE_integer("runs", 400, "Runs of 200 calls each.", lower_bound=1)
_CALLS_PER_RUN: Final = 200


def calls() -> dict[str, Callable[[], object]]:
    """The calls that are timed: one query row over 16 keys, and one token's append."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 16, 1, 256)
    k_cache, v_cache = torch.randn(2, *shape, generator=generator).to(torch.float8_e4m3fn)
    q = torch.randn(1, 6, 256, generator=generator).half()
    key = torch.randn(1, 1, 256, generator=generator).half()
    page_table = torch.zeros(1, 1, dtype=torch.int32)
    seq_lens = torch.tensor([16], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    slot = torch.tensor([5])
    out = torch.empty_like(q)
    scale = torch.ones(1)
    return {
        "attention": lambda: fv.paged_attention(q, k_cache, v_cache, page_table, seq_lens),
        "attention, engine's arguments": lambda: fv.paged_attention(
            q, k_cache, v_cache, page_table, seq_lens, query_start_loc=starts, scale=0.0625,
            k_dequant_scale=scale, v_dequant_scale=scale, out=out,
        ),
        "append": lambda: fv.append_kv(key, key, k_cache, v_cache, slot),
    }  # fmt: skip


def measure(runs: int) -> dict[str, float]:
    """Least microseconds per call, by name."""
    return {
        name: min(timeit.repeat(call, number=_CALLS_PER_RUN, repeat=runs)) / _CALLS_PER_RUN * 1e6
        for name, call in calls().items()
    }


def main(arguments: Sequence[str]) -> None:
    """Prints the costs as JSON."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected: {' '.join(arguments[1:])}")
    print(json.dumps({"us_per_call": measure(_RUNS.value), "limits_us": LIMITS_US}, indent=2))


if __name__ == "__main__":
    app.run(main)
