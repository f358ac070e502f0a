"""The FP32 LM head: its error, its bits, its memory, and the greedy choice it saves."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashverify import logits as lib
from flashverify.errors import InvalidArgumentError, UnsupportedError
from flashverify.logits import (
    combine_greedy,
    combine_logits,
    greedy_candidates,
    lm_head_logits,
    vocab_shard,
)

DTYPES = [torch.float16, torch.bfloat16]
FP32_UNIT = 2.0**-24

on_every_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                not torch.cuda.is_available(), reason="torch sees no CUDA device"
            ),
        ),
    ],
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other crawl where the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem(
    rows: int, hidden: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, hidden, generator=generator).to(dtype).to(device),
        torch.randn(vocab, hidden, generator=generator).to(dtype).to(device),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "hidden", "vocab"),
    [(1, 64, 1), (8, 64, 3), (9, 100, 65), (3, 4097, 500), (17, 896, 2500), (130, 33, 1000)],
)
def test_error_is_that_of_fp32_accumulation(
    rows: int, hidden: int, vocab: int, dtype: torch.dtype, device: str
) -> None:
    h, w = problem(rows, hidden, vocab, dtype, device)
    found = lm_head_logits(h, w)
    assert found.dtype == torch.float32
    assert found.shape == (rows, vocab)
    exact = h.double() @ w.double().t()
    # A sum of n exact products in FP32, in any order: n u sum|h w|.
    bound = hidden * FP32_UNIT * (h.double().abs() @ w.double().abs().t())
    assert bool(((found.double() - exact).abs() <= bound).all())
    # The bound tells FP32 from a result that was rounded on the way.
    if hidden < 1000:
        assert not bool(((exact.to(dtype).double() - exact).abs() <= bound).all())


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32_logits_save_the_greedy_choice(dtype: torch.dtype, device: str) -> None:
    """Rounded logits tie or swap the two best tokens; FP32 logits keep their order.

    The problem is plain normal data at the scale of a language model's logits
    (standard deviation 20). Nothing is chosen: every row whose choice flips counts.
    """
    rows, hidden, vocab = 256, 400, 8192
    h, w = problem(rows, hidden, vocab, dtype, device)
    exact = h.double() @ w.double().t()
    best_two = exact.topk(2).values
    clear = best_two[:, 0] - best_two[:, 1] > 1e-3
    greedy = exact.argmax(-1)

    rounded = torch.nn.functional.linear(h, w)
    assert rounded.dtype == dtype
    flips = (rounded.argmax(-1) != greedy) & clear
    assert int(flips.sum()) >= 1
    assert bool((lm_head_logits(h, w).argmax(-1) == greedy)[clear].all())


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 100, 896, 5120])
def test_a_rows_bits_depend_on_that_row_alone(hidden: int, dtype: torch.dtype, device: str) -> None:
    h, w = problem(70, hidden, 1500, dtype, device)
    whole = lm_head_logits(h, w)
    for row in (0, 1, 7, 8, 37, 63, 64, 69):
        assert same_bits(lm_head_logits(h[row : row + 1], w), whole[row : row + 1]), row
    for start, stop in ((0, 8), (5, 13), (60, 70)):
        assert same_bits(lm_head_logits(h[start:stop], w), whole[start:stop]), start
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    assert same_bits(lm_head_logits(h[order], w), whole[order])
    # A neighbour's NaN stays with the neighbour.
    h[3] = float("nan")
    poisoned = lm_head_logits(h, w)
    assert bool(poisoned[3].isnan().all())
    assert same_bits(poisoned[4:], whole[4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_no_block_and_no_thread(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, w = problem(20, 896, 2500, dtype, "cpu")
    whole = lm_head_logits(h, w)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert same_bits(lm_head_logits(h, w), whole), count
    torch.set_num_threads(1)
    for block_bytes in (1, 1 << 18, 1 << 20):
        monkeypatch.setattr(lib, "_WEIGHT_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(lib, "_HIDDEN_BLOCK_BYTES", block_bytes)
        assert same_bits(lm_head_logits(h, w), whole), block_bytes


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
def test_vocabulary_shards_give_one_devices_bits(
    world_size: int, dtype: torch.dtype, device: str
) -> None:
    vocab = 2500
    h, w = problem(9, 896, vocab, dtype, device)
    bias = torch.randn(vocab, device=device)
    whole = lm_head_logits(h, w, bias)
    shards = [vocab_shard(vocab, rank, world_size) for rank in range(world_size)]
    parts = [lm_head_logits(h, w[s.start : s.stop], bias[s.start : s.stop]) for s in shards]
    if device == "cpu":  # cuBLAS chooses its kernel by the width of the shard
        assert same_bits(combine_logits(parts), whole)
    torch.testing.assert_close(combine_logits(parts), whole, rtol=1e-5, atol=1e-3)

    candidates = [greedy_candidates(part, s) for part, s in zip(parts, shards, strict=True)]
    values = torch.stack([value for value, _ in candidates])
    tokens = torch.stack([token for _, token in candidates])
    assert combine_greedy(values, tokens).tolist() == combine_logits(parts).argmax(-1).tolist()


def test_shards_partition_the_vocabulary() -> None:
    for vocab in (1, 2, 7, 8, 9, 100, 152064):
        for world_size in (1, 2, 3, 8, 16):
            shards = [vocab_shard(vocab, rank, world_size) for rank in range(world_size)]
            assert [token for s in shards for token in s] == list(range(vocab))
            assert max(map(len, shards)) == -(-vocab // world_size)


def test_padded_shards_are_trimmed() -> None:
    parts = [torch.arange(4.0).repeat(2, 1), torch.tensor([[4.0, 5.0, 99.0, 99.0]]).repeat(2, 1)]
    assert combine_logits(parts, vocab_size=6).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
    value, token = greedy_candidates(parts[1], range(4, 6))
    assert value.tolist() == [5.0, 5.0]
    assert token.tolist() == [5, 5]


def test_ties_and_nans_choose_as_argmax_does() -> None:
    inf, nan = float("inf"), float("nan")
    whole = torch.tensor(
        [
            [1.0, 3.0, 3.0, 3.0, 2.0],
            [1.0, 3.0, 2.0, nan, nan],
            [-inf, -inf, -inf, -inf, -inf],
            [0.0, inf, 1.0, inf, nan],
            [-0.0, 0.0, -0.0, 0.0, -1.0],
        ]
    )
    # Seven ranks: one of them has a token of its own, the last two have none.
    for world_size in (1, 2, 3, 7):
        shards = [vocab_shard(5, rank, world_size) for rank in range(world_size)]
        candidates = [greedy_candidates(whole[:, s.start : s.stop], s) for s in shards]
        found = combine_greedy(*(torch.stack(side) for side in zip(*candidates, strict=True)))
        assert found.tolist() == whole.argmax(-1).tolist(), world_size


@on_every_device
def test_bias_and_leading_axes(device: str) -> None:
    h, w = problem(6, 64, 50, torch.bfloat16, device)
    plain = lm_head_logits(h, w)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        bias = torch.randn(50, device=device).to(dtype)
        assert same_bits(lm_head_logits(h, w, bias), plain + bias.float())
    assert same_bits(lm_head_logits(h.reshape(2, 3, 64), w), plain.reshape(2, 3, 50))
    assert same_bits(lm_head_logits(h[0], w), plain[0])


@on_every_device
def test_strides_do_not_matter(device: str) -> None:
    h, w = problem(6, 64, 50, torch.float16, device)
    plain = lm_head_logits(h, w)
    assert same_bits(lm_head_logits(h.t().contiguous().t(), w), plain)
    assert same_bits(lm_head_logits(h, w.t().contiguous().t()), plain)
    wide = torch.full((100, 128), float("nan"), dtype=w.dtype, device=device)
    wide[::2, ::2] = w
    assert same_bits(lm_head_logits(h, wide[::2, ::2]), plain)


@on_every_device
def test_nothing_to_compute(device: str) -> None:
    h, w = problem(2, 64, 5, torch.float16, device)
    assert lm_head_logits(h[:0], w).shape == (0, 5)
    assert lm_head_logits(h, w[:0]).shape == (2, 0)
    assert lm_head_logits(h[:, :0], w[:, :0]).tolist() == [[0.0] * 5] * 2


def test_large_values_keep_their_size() -> None:
    """A logit beyond 65504, where FP16 ends, is a number like any other."""
    h = torch.full((1, 128), 100.0, dtype=torch.float16)
    w = torch.full((2, 128), 100.0, dtype=torch.float16)
    assert torch.nn.functional.linear(h, w).isinf().all()
    assert lm_head_logits(h, w).tolist() == [[128e4, 128e4]]


_MEASURE = """
import json, resource, sys
import torch
from flashverify.logits import lm_head_logits

rows, hidden, vocab = map(int, sys.argv[1:])
# The peak so far lies in the imports: what is held now must be more than that.
ballast = torch.ones(1 << 29, dtype=torch.uint8)
weight = torch.empty(vocab, hidden, dtype=torch.bfloat16)
weight.view(torch.int16).random_(0x3c00, 0x3d00)  # small normal numbers, in place
h = torch.ones(rows, hidden, dtype=torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = lm_head_logits(h, weight)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"extra_bytes": (after - before) * 1024 - out.numel() * 4}))
"""


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab"),
    [(8, 5120, 152064), (1024, 5120, 4096)],
    ids=["a verification step of a large vocabulary", "many rows"],
)
def test_memory_beyond_the_output(rows: int, hidden: int, vocab: int) -> None:
    """Peak resident memory of a fresh process, BLAS buffers and all."""
    package = Path(lib.__file__).parents[1]
    path = [str(package), *(entry for entry in sys.path if entry)]
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(rows), str(hidden), str(vocab)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"},
    )
    extra_bytes = json.loads(result.stdout)["extra_bytes"]
    assert extra_bytes <= 64 << 20
    assert extra_bytes > 1 << 20, "the measurement sees nothing"


@pytest.mark.parametrize("setting", ["legacy", "onednn"])
def test_a_setting_that_rounds_operands_is_refused(setting: str) -> None:
    h, w = problem(2, 64, 5, torch.float16, "cpu")
    onednn: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if setting == "onednn" and onednn is None:
        pytest.skip("this torch has no precision of its own for oneDNN")
    before = torch.get_float32_matmul_precision()
    try:
        if setting == "legacy":
            torch.set_float32_matmul_precision("medium")
        else:
            onednn.fp32_precision = "bf16"
        with pytest.raises(UnsupportedError, match="rounds operands to BF16"):
            lm_head_logits(h, w)
    finally:
        if setting == "onednn":
            onednn.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)
    lm_head_logits(h, w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_fp16_accumulation_is_refused() -> None:
    if not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"):
        pytest.skip("this torch has no FP16 accumulation")
    h, w = problem(2, 64, 5, torch.float16, "cuda")
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        with pytest.raises(UnsupportedError, match="allow_fp16_accumulation"):
            lm_head_logits(h, w)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


def test_gradients_are_refused_and_not_dropped() -> None:
    h, w = problem(2, 64, 5, torch.float16, "cpu")
    w.requires_grad_()
    with pytest.raises(UnsupportedError, match="requires grad"):
        lm_head_logits(h, w)
    with torch.no_grad():
        found = lm_head_logits(h, w)
    with torch.inference_mode():
        assert same_bits(lm_head_logits(h, w), found)
    assert not found.requires_grad


HALF = torch.float16


@pytest.mark.parametrize(
    ("hidden", "weight", "bias", "error", "message"),
    [
        ((2, 8), (5, 9), None, InvalidArgumentError, r"weight: shape \[5, 9\] with hidden of"),
        ((2, 8), (5, 8, 1), None, InvalidArgumentError, "weight: shape"),
        ((), (5, 8), None, InvalidArgumentError, "weight: shape"),
        ((2, 8), (5, 8), (4,), InvalidArgumentError, r"bias: shape \[4\]; accepted: \[5\]"),
        ((2, 8), (5, 8), (1, 5), InvalidArgumentError, "bias: shape"),
    ],
)
def test_wrong_shapes(
    hidden: Any, weight: Any, bias: Any, error: type[Exception], message: str
) -> None:
    tensor = None if bias is None else torch.ones(bias)
    with pytest.raises(error, match=message):
        lm_head_logits(torch.ones(hidden, dtype=HALF), torch.ones(weight, dtype=HALF), tensor)


def test_wrong_dtypes_and_devices() -> None:
    h, w = problem(2, 8, 5, HALF, "cpu")
    with pytest.raises(UnsupportedError, match="hidden: dtype float32; accepted: float16"):
        lm_head_logits(h.float(), w.float())
    with pytest.raises(InvalidArgumentError, match=r"weight: dtype bfloat16; accepted: .* float16"):
        lm_head_logits(h, w.bfloat16())
    with pytest.raises(UnsupportedError, match="bias: dtype float64"):
        lm_head_logits(h, w, torch.ones(5, dtype=torch.float64))
    with pytest.raises(InvalidArgumentError, match=r"weight: on meta; accepted: .* cpu"):
        lm_head_logits(h, w.to("meta"))
    with pytest.raises(UnsupportedError, match="hidden: on meta; accepted: cpu, cuda"):
        lm_head_logits(h.to("meta"), w.to("meta"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vocab_shard(0, 0, 1), "vocab_size: 0; accepted: 1 and more"),
        (lambda: vocab_shard(8, 2, 2), r"rank: 2; accepted: 0\.\.1"),
        (lambda: vocab_shard(8, -1, 2), r"rank: -1; accepted: 0\.\.1"),
        (lambda: combine_logits([]), "shards: none"),
        (
            lambda: combine_logits([torch.ones(1, 2), torch.ones(1, 2, dtype=HALF)]),
            r"shards\[1\]: dtype float16; accepted: float32",
        ),
        (lambda: combine_logits([torch.ones(1, 2)], 3), r"vocab_size: 3; accepted: 1\.\.2"),
        (lambda: greedy_candidates(torch.ones(1, 2), range(3)), "at least 3 logits a row"),
        (
            lambda: greedy_candidates(torch.ones(1, 2, dtype=HALF), range(2)),
            "logits: dtype float16; accepted: float32",
        ),
        (
            lambda: combine_greedy(torch.ones(2, 3), torch.ones(2, 4, dtype=torch.int64)),
            r"tokens: shape \[2, 4\] with logits of shape \[2, 3\]",
        ),
        (
            lambda: combine_greedy(torch.ones(0, 3), torch.ones(0, 3, dtype=torch.int64)),
            r"accepted: \[ranks, \.\.\.\] both",
        ),
    ],
)
def test_refused_shards(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call()
