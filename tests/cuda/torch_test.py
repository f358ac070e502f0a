"""torch around the calls: the ops' checks, torch.compile, its CUDA graphs, inference mode."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import flashverify as fv
from flashverify import workspace
from tests.support import backends, cases

CUDA = pytest.mark.skipif(backends.CUDA.missing is not None, reason=str(backends.CUDA.missing))
OPS = torch.ops.flashverify
HEADS, KV_HEADS, DIM, HIDDEN, PAGE = 4, 2, 64, 96, 16


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def inputs_of(kv_dtype: str) -> dict[str, Any]:
    request = cases.random_request(1, q_len=3, seq_len=70, q_heads=4, kv_heads=2, kv_dtype=kv_dtype)
    named = backends.arguments(cases.paged([request], layout="paired"), "cuda")
    if kv_dtype.startswith("fp8"):  # opcheck cannot compare tensors of float8 types
        for cache in ("k_cache", "v_cache"):
            named[cache] = named[cache].view(torch.uint8)
        named["kv_dtype"] = kv_dtype
    return named


@CUDA
@pytest.mark.parametrize("kv_dtype", ["float16", "fp8_e4m3"])
@pytest.mark.parametrize("route", ["grouped_fp32", "scalar_fp32"])
def test_opcheck(kv_dtype: str, route: str) -> None:
    named = inputs_of(kv_dtype)
    tensors = tuple(
        named.pop(name) for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens")
    )
    torch.library.opcheck(
        OPS.paged_attention.default, tensors, {**named, "route": route, "return_lse": True}
    )
    rows = torch.randn((3, 2, 64), device="cuda", dtype=torch.float16)
    caches = torch.zeros((3, 2, 16, 2, 64), device="cuda", dtype=torch.float16)
    slots = torch.tensor([3, -1, 40], device="cuda")
    torch.library.opcheck(
        OPS.append_kv.default, (rows, rows + 1, caches[:, 0].clone(), caches[:, 1].clone(), slots)
    )
    states = torch.randn((3, 2, 4, 8), device="cuda"), torch.randn((3, 2, 4), device="cuda")
    torch.library.opcheck(OPS.merge_states.default, states)


class Decoder(torch.nn.Module):
    """One attention layer over an FP8 cache: [K or V, pages, ...], halved where ``halved`` says."""

    def __init__(self, halved: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        for name, size in sizes.items():
            weight = torch.randn(HIDDEN, size, generator=generator) / 10
            self.register_buffer(name, weight.half().cuda())
        cache = torch.zeros((2, 4, PAGE, KV_HEADS, DIM), dtype=torch.uint8, device="cuda")
        cache = cache.view(torch.float8_e4m3fn)
        if halved == "in the graph":
            self.cache = cache
        elif halved == "before":
            self.cache = cache.unbind()
        else:
            self.cache = cache[0].clone(), cache[1].clone()
        self.page_table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32, device="cuda")

    def forward(
        self, hidden: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        rows = hidden.shape[0]
        k_cache, v_cache = self.cache
        fv.append_kv(
            (hidden @ self.k).view(rows, KV_HEADS, DIM),
            (hidden @ self.v).view(rows, KV_HEADS, DIM),
            k_cache,
            v_cache,
            slots,
            k_dequant_scale=0.5,
        )
        return fv.paged_attention(
            (hidden @ self.q).view(rows, HEADS, DIM),
            k_cache,
            v_cache,
            self.page_table,
            seq_lens,
            k_dequant_scale=0.5,
        )


def decode(model: Any) -> list[torch.Tensor]:
    """Five blocks of 8 rows, so that torch's own CUDA graphs are recorded and replayed."""
    generator = torch.Generator().manual_seed(1)
    results = []
    for step in range(5):
        tokens = torch.arange(8 * step, 8 * step + 8)
        slots = torch.tensor([2, 0, 3, 1])[tokens // PAGE] * PAGE + tokens % PAGE
        hidden = torch.randn((8, HIDDEN), generator=generator).half().cuda()
        seq_lens = torch.tensor([8 * step + 8], dtype=torch.int32, device="cuda")
        results.append(model(hidden, seq_lens, slots.cuda()).clone())
    return results


@CUDA
@pytest.mark.parametrize("halved", ["never", "in the graph", "before"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_decode_step(mode: str, halved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        expected = decode(Decoder(halved))
        # No workspace yet: the compiled step's first call allocates it.
        monkeypatch.setattr(workspace, "_of_thread", threading.local())
        step = torch.compile(Decoder(halved), fullgraph=True, mode=mode)
        if halved == "before" and torch.__version__ < "2.13":
            with pytest.raises(Exception, match="UnsupportedError: v_cache: a storage offset"):
                decode(step)
            return
        actual = decode(step)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@CUDA
def test_autograd_is_refused() -> None:
    named = inputs_of("float16")
    named["q"].requires_grad_()
    with pytest.raises(fv.UnsupportedError, match="q"):
        fv.paged_attention(**named)


@CUDA
def test_tensors_of_two_devices_are_refused() -> None:
    named = inputs_of("float16")
    named["seq_lens"] = named["seq_lens"].cpu()
    with pytest.raises(fv.InvalidArgumentError, match="seq_lens: on device cpu"):
        fv.paged_attention(**named)
