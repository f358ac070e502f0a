"""torch.compile(fullgraph=True) over a small decode step."""

from pathlib import Path
from typing import Any

import pytest
import torch

import flashverify as fv

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, HIDDEN, PAGE = 4, 2, 64, 96, 16
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


class Decoder(torch.nn.Module):
    """One attention layer over an FP8 cache whose K and V are views of one tensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        for name, size in sizes.items():
            weight = torch.randn(HIDDEN, size, generator=generator) / 10
            self.register_buffer(name, weight)
        self.register_buffer("o", torch.randn(HEADS * DIM, HIDDEN, generator=generator) / 10)
        self.cache = torch.zeros(4, 2, PAGE, KV_HEADS, DIM, dtype=torch.uint8).view(E4M3)
        self.page_table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
        self.options = options

    def forward(
        self, hidden: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.shape[0]
        k_cache, v_cache = self.cache.unbind(1)
        fv.append_kv(
            (hidden @ self.k).view(rows, KV_HEADS, DIM),
            (hidden @ self.v).view(rows, KV_HEADS, DIM),
            k_cache,
            v_cache,
            slots,
            k_dequant_scale=0.5,
        )
        out, lse = fv.paged_attention(
            (hidden @ self.q).view(rows, HEADS, DIM),
            k_cache,
            v_cache,
            self.page_table,
            seq_lens,
            k_dequant_scale=0.5,
            return_lse=True,
            **self.options,
        )
        return out.reshape(rows, -1) @ self.o + hidden, lse


def decode(model: Any, decoder: Decoder) -> list[torch.Tensor]:
    """A block of 8 rows, then single tokens, then another block."""
    generator = torch.Generator().manual_seed(1)
    results: list[torch.Tensor] = []
    length = 0
    for rows in (8, 1, 1, 5):
        tokens = torch.arange(length, length + rows)
        slots = decoder.page_table[0, tokens // PAGE] * PAGE + tokens % PAGE
        length += rows
        hidden = torch.randn(rows, HIDDEN, generator=generator)
        results += model(hidden, torch.tensor([length], dtype=torch.int32), slots)
    return [*results, decoder.cache.view(torch.uint8)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"route": fv.Route.scalar_fp32, "window": 6, "softcap": 20.0, "scale": 0.2},
        {"route": "grouped_half", "causal": False, "sinks": torch.zeros(HEADS)},
    ],
    ids=["defaults", "scalar", "half"],
)
def test_a_decode_step(backend: str, options: dict[str, Any]) -> None:
    eager = Decoder(**options)
    expected = decode(eager, eager)
    compiled = Decoder(**options)
    model = torch.compile(compiled, fullgraph=True, backend=backend)
    before = fv.route_counts()
    with torch.no_grad():
        actual = decode(model, compiled)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    route = fv.Route(options.get("route", "grouped_fp32"))
    assert fv.route_counts()[route] - before[route] == 4
    assert fv.last_route() is route


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_given_output_and_a_given_workspace(backend: str) -> None:
    workspace = fv.Workspace(
        batch=1, rows=8, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, max_seq_len=PAGE
    )
    cache = torch.randn(1, PAGE, KV_HEADS, DIM).to(E4M3)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)

    def attend(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        fv.paged_attention(q, cache, cache, table, lengths, out=out[:, 1:], workspace=workspace)
        return out.sum()

    q = torch.randn(3, HEADS, DIM)
    outs = torch.full((2, 3, HEADS + 2, DIM), 7.0)
    expected = attend(q, outs[0][:, :-1])
    assert set(workspace.buffers) == {"fp32"}
    workspace.buffers.clear()
    total = torch.compile(attend, fullgraph=True, backend=backend)(q, outs[1][:, :-1])
    assert set(workspace.buffers) == {"fp32"}, "the compiled code used another workspace"
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(total, expected)


def test_a_given_output_of_another_shape() -> None:
    """A copy into it would broadcast."""
    cache = torch.zeros(1, PAGE, KV_HEADS, DIM, dtype=torch.float16)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)

    def attend(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return fv.paged_attention(q, cache, cache, table, lengths, out=out)

    compiled = torch.compile(attend, backend="eager")
    with pytest.raises(Exception, match=r"out: (shape|rank)"):
        compiled(torch.zeros(1, HEADS, DIM), torch.zeros(2, 1, HEADS, DIM))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "halves",
    [
        lambda cache: cache[2].unbind(1),
        lambda cache: (cache[2][:, 0], cache[2][:, 1]),
        lambda cache: cache[2].flatten(0, 1).split(3),
        lambda cache: (cache[2].flatten(0, 1)[1:4], cache[2].flatten(0, 1)[4:7]),
        lambda cache: cache[1].view(4, PAGE, 4, DIM).split(2, dim=2),
    ],
    ids=["unbind", "index", "split pages", "slices of pages", "split heads"],
)
@pytest.mark.parametrize("within", ["the call", "a late graph input", "a graph input"])
def test_caches_within_a_larger_tensor(backend: str, halves: Any, within: str) -> None:
    """Wherever the views are made, the bytes written are those that eager code writes.

    Or the call is refused: torch before 2.13 mistakes the beginning of views of a graph's input
    that begins late in its storage.
    """
    key = torch.randn(3, 2, DIM)
    slots = torch.tensor([3, 17, 40])

    def append(cache: torch.Tensor) -> torch.Tensor:
        k_cache, v_cache = halves(cache)[:2]
        fv.append_kv(key, key + 1, k_cache, v_cache, slots)
        return cache.float().sum()

    def append_to(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        fv.append_kv(key, key + 1, k_cache, v_cache, slots)
        return k_cache.float().sum()

    caches = list(torch.zeros(2, 3, 4, 2, PAGE, 2, DIM, dtype=torch.float16))
    append(caches[0])
    assert caches[0].any()
    if within == "a graph input":
        caches[1] = caches[1].clone()
    given = halves(caches[1])[:2] if within == "the call" else (caches[1],)
    function = append_to if within == "the call" else append
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    if within != "a graph input" and torch.__version__ < "2.13":
        with pytest.raises(Exception, match="UnsupportedError: k_cache: a storage offset of"):
            compiled(*given)
        assert not caches[1].any()
        return
    compiled(*given)
    assert torch.equal(*caches)


def test_a_workspace_that_is_gone() -> None:
    handle = fv.Workspace(
        batch=1, rows=1, q_heads=1, kv_heads=1, head_dim=DIM, max_seq_len=1
    ).handle
    cache = torch.zeros(1, 1, 1, DIM, dtype=torch.float16)
    with pytest.raises(fv.InvalidArgumentError, match="no longer exists"):
        torch.ops.flashverify.paged_attention(
            torch.zeros(1, 1, DIM),
            cache,
            cache,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            workspace=handle,
        )


def test_merging_compiles_without_recompiling_for_rows() -> None:
    compiled = torch.compile(fv.merge_states, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 4, 9):
        partials = torch.randn(2, rows, 2, 8), torch.randn(2, rows, 2)
        for ours, theirs in zip(compiled(*partials), fv.merge_states(*partials), strict=True):
            assert torch.equal(ours, theirs)


def test_a_compiled_step_obeys_a_requirement() -> None:
    decoder = Decoder()
    model = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), fv.require_route("grouped_fp32"):
        decode(model, decoder)
    with (
        torch.no_grad(),
        fv.require_route("scalar_fp32"),
        pytest.raises(fv.RouteError, match="grouped_fp32 is planned"),
    ):
        decode(model, decoder)


def test_export() -> None:
    decoder = Decoder()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, HIDDEN, generator=generator)
    given = hidden, torch.tensor([2], dtype=torch.int32), torch.tensor([32, 33])
    with torch.no_grad():
        exported = torch.export.export(decoder, given, strict=False)
        expected = decoder(*given)
    assert "flashverify.paged_attention" in exported.graph_module.code
    assert "flashverify.append_kv" in exported.graph_module.code
    for ours, theirs in zip(exported.module()(*given), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
