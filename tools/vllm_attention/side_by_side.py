"""One attention call of flashverify beside vLLM's own CPU op: time, error, invariance.

Both read the same E4M3 codes, scales, page table and bfloat16 query in one process, and
are timed in A B B A blocks: A is vLLM's op, B flashverify on the cache tensor that its
vLLM plugin gets. vLLM's per-step plan is made outside the timing, in its favour.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from absl import app, flags

import flashverify
from flashverify.abba import environment, reference, stats, timing, workload
from flashverify.abba.case import Case
from flashverify.abba.output import OutputFolder
from flashverify.integrations.vllm.cache_view import split_kv
from tools.vllm_attention.engine_op import VERSION, EngineAttention
from tools.vllm_attention.page import markdown

PROGRAM = "side_by_side"

_CONTEXTS = flags.DEFINE_list("contexts", ["4096", "16384", "65536", "262144"], "Keys.")
_Q_LENS = flags.DEFINE_list("q_lens", ["8", "1"], "Query rows of the request.")
_Q_HEADS = flags.DEFINE_integer("q_heads", 6, "Query heads.", 1)
_KV_HEADS = flags.DEFINE_integer("kv_heads", 1, "KV heads.", 1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 256, "Elements of a head.", 32, 512)
_PAGE_SIZE = flags.DEFINE_integer("page_size", 128, "Tokens of a page; vLLM's default on CPUs.", 1)
_WARMUPS = flags.DEFINE_integer("warmups", 3, "Untimed calls of each arm.", 1)
_BLOCKS = flags.DEFINE_integer("blocks", 15, "Timed A B B A blocks.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the inputs.")
_OUT = flags.DEFINE_string("out", None, "Folder of the result; default: a new one.")

_WRITE_TOKENS = 8192
_REST_SECONDS = 0.01


class RestingTimer(timing.CpuTimer):
    """Rests before each call: threads that wait for work by spinning have then stopped."""

    def time_us(self, call: Callable[[], object]) -> float:
        """Runs ``call`` once and returns its duration in microseconds."""
        time.sleep(_REST_SECONDS)
        return super().time_us(call)


class Pair:
    """Both implementations over one workload."""

    def __init__(self, case: Case, seed: int) -> None:
        made = workload.make(case, seed, None)
        # An engine's queries are of its model's dtype.
        self.work = dataclasses.replace(made, q=made.q.to(torch.bfloat16))
        shape = (case.pages_per_request, case.kv_heads, case.page_size, 2 * case.head_dim)
        # The codes past the last token are NaN: neither side may read them.
        self._ours = split_kv(torch.full(shape, 0x7F, dtype=torch.uint8), case.head_dim)
        self._theirs = EngineAttention(
            pages=case.pages_per_request,
            page_size=case.page_size,
            q_heads=case.q_heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
        )
        self._fill()
        self.isa = self._theirs.isa

    def _fill(self) -> None:
        work = self.work
        for start in range(0, work.case.context, _WRITE_TOKENS):
            stop = min(start + _WRITE_TOKENS, work.case.context)
            slots = work.slots(0, start, stop)
            # Decoded codes: numbers that E4M3 holds, which no rounding changes.
            key, value = (
                torch.stack(
                    [work.read(cache, 0, start, stop, head) for head in range(work.case.kv_heads)],
                    dim=1,
                ).to(torch.bfloat16)
                for cache in (work.k_cache, work.v_cache)
            )
            flashverify.append_kv(key, value, *self._ours, slots, kv_dtype="fp8_e4m3")
            self._theirs.write(key, value, slots)

    def ours(self, q: torch.Tensor, seq_len: int) -> Callable[[torch.Tensor], None]:
        """The call of flashverify for rows of the request when it has so many keys."""
        seq_lens = torch.tensor([seq_len], dtype=torch.int32)
        work = self.work

        def call(out: torch.Tensor) -> None:
            flashverify.paged_attention(
                q,
                *self._ours,
                work.page_table,
                seq_lens,
                scale=work.softmax_scale,
                k_dequant_scale=work.k_dequant_scale,
                v_dequant_scale=work.v_dequant_scale,
                kv_dtype="fp8_e4m3",
                route="grouped_fp32",
                out=out,
            )

        return call

    def theirs(self, q: torch.Tensor, seq_len: int) -> Callable[[torch.Tensor], None]:
        """The call of vLLM, planned for the threads that torch has now."""
        seq_lens = torch.tensor([seq_len], dtype=torch.int32)
        starts = torch.tensor([0, len(q)], dtype=torch.int32)
        plan = self._theirs.plan(seq_lens, starts)
        work = self.work

        def call(out: torch.Tensor) -> None:
            self._theirs.attend(
                q,
                out,
                plan=plan,
                page_table=work.page_table,
                seq_lens=seq_lens,
                query_start_loc=starts,
                softmax_scale=work.softmax_scale,
                k_scale=float(work.k_dequant_scale),
                v_scale=float(work.v_dequant_scale),
            )

        return call


@dataclasses.dataclass(frozen=True)
class Arm:
    """One implementation.

    Attributes:
      latency_us: Of one call.
      relative_l2: Error against FP64.
      max_row_relative_l2: Of the worst row.
      same_with_one_thread: Whether one thread gives the same bits.
      same_row_by_row: Whether each row alone (q 1) gives the bits that it has in the block.
      row_by_row_max_abs: Largest difference of the two.
    """

    latency_us: stats.Summary
    relative_l2: float | None
    max_row_relative_l2: float | None
    same_with_one_thread: bool
    same_row_by_row: bool
    row_by_row_max_abs: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One shape."""

    context: int
    q_len: int
    isa: str
    rounding_floor: float | None
    arms: dict[str, Arm]
    ours_over_theirs: stats.Ratio
    blocks: list[timing.Block]


Make = Callable[[torch.Tensor, int], Callable[[torch.Tensor], None]]


def _run(make: Make, q: torch.Tensor, seq_len: int) -> torch.Tensor:
    out = torch.full_like(q, float("nan"))
    make(q, seq_len)(out)
    return out


def _with_one_thread(make: Make, q: torch.Tensor, seq_len: int) -> torch.Tensor:
    torch_threads, our_threads = torch.get_num_threads(), flashverify.get_num_threads()
    torch.set_num_threads(1)
    flashverify.set_num_threads(1)
    try:
        return _run(make, q, seq_len)
    finally:
        torch.set_num_threads(torch_threads)
        flashverify.set_num_threads(our_threads)


def _row_by_row(make: Make, q: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Each row as the only one, when the request ended with it: as decoding computes it."""
    rows = [_run(make, q[row : row + 1], seq_len - len(q) + row + 1) for row in range(len(q))]
    return torch.cat(rows)


def measure(case: Case, *, seed: int, warmups: int, blocks: int) -> Result:
    """Measures one shape; the caches hold about twice the case's bytes twice."""
    pair = Pair(case, seed)
    q, context = pair.work.q, case.context
    exact = reference.fp64(pair.work)
    makes: dict[str, Make] = {"A": pair.theirs, "B": pair.ours}
    outs = {name: torch.empty_like(q) for name in makes}
    calls = {name: make(q, context) for name, make in makes.items()}

    def bound(name: str) -> Callable[[], None]:
        return lambda: calls[name](outs[name])

    timed = timing.run_blocks(
        {name: bound(name) for name in makes},
        RestingTimer(),
        warmups=warmups,
        blocks=blocks,
        sample=lambda: None,
        step=lambda: None,
    )
    arms = {}
    for name, make in makes.items():
        error = reference.compare(outs[name], exact)
        alone = _row_by_row(make, q, context)
        arms[name] = Arm(
            latency_us=stats.summarise(
                [slot.latency_us for block in timed for slot in block.slots if slot.arm == name]
            ),
            relative_l2=error.relative_l2,
            max_row_relative_l2=error.max_row_relative_l2,
            same_with_one_thread=workload.same_bits(outs[name], _with_one_thread(make, q, context)),
            same_row_by_row=workload.same_bits(outs[name], alone),
            row_by_row_max_abs=float((outs[name].float() - alone.float()).abs().max()),
        )
    return Result(
        context=context,
        q_len=case.q_len,
        isa=pair.isa,
        rounding_floor=reference.compare(exact.to(torch.bfloat16), exact).relative_l2,
        arms=arms,
        ours_over_theirs=stats.paired_ratio([block.ratio_b_over_a() for block in timed], seed),
        blocks=timed,
    )


def main(_arguments: Sequence[str]) -> int:
    """Measures what the flags say, and writes side_by_side.json and side_by_side.md."""
    caller = Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())
    files = (f"{PROGRAM}.json", f"{PROGRAM}.md")
    out = caller / _OUT.value if _OUT.value else None
    folder = OutputFolder(out, caller, program=PROGRAM)
    about: dict[str, object] = {
        "command": " ".join([f"bazelw run //tools/vllm_attention:{PROGRAM} --", *sys.argv[1:]]),
        "vllm": VERSION,
        "torch_threads": torch.get_num_threads(),
        **environment.describe(),
        "native_library_sha256": flashverify.native_info()["library_sha256"],
        "shape": f"{_Q_HEADS.value} query heads, {_KV_HEADS.value} KV heads, head_dim "
        f"{_HEAD_DIM.value}, page {_PAGE_SIZE.value}, E4M3 cache, bfloat16 query, one request",
        "timer": f"{timing.CpuTimer.description}; {_REST_SECONDS} s of rest before each",
        "load_before": os.getloadavg()[0],
    }
    results = []
    for context in map(int, _CONTEXTS.value):
        for q_len in map(int, _Q_LENS.value):
            case = Case(
                context=context,
                q_len=q_len,
                q_heads=_Q_HEADS.value,
                kv_heads=_KV_HEADS.value,
                head_dim=_HEAD_DIM.value,
                page_size=_PAGE_SIZE.value,
            )
            case.check()
            with torch.inference_mode():
                results.append(
                    measure(case, seed=_SEED.value, warmups=_WARMUPS.value, blocks=_BLOCKS.value)
                )
            print(f"{context} keys, q {q_len}: done", file=sys.stderr)
    about["load_after"] = os.getloadavg()[0]
    data = {"schema": 1, "about": about, "results": [dataclasses.asdict(one) for one in results]}
    page = markdown(data)
    texts = (json.dumps(data, indent=1, allow_nan=False) + "\n", page)
    folder.write({name: text.encode() for name, text in zip(files, texts, strict=True)})
    print(page)
    print(f"{', '.join(files)} are in {folder.path}")
    return 0


if __name__ == "__main__":
    app.run(main)
