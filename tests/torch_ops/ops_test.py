"""The registered torch ops: schemas, fake kernels, modes, transforms and autograd."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flashverify as fv
from tests.support import backends, cases

OPS = torch.ops.flashverify
TENSORS = ("q", "k_cache", "v_cache", "page_table", "seq_lens")


def arguments(kv_dtype: str = "float16", **options: Any) -> dict[str, Any]:
    requests = [
        cases.random_request(
            seed, q_len=2, seq_len=seq_len, q_heads=4, kv_heads=2, kv_dtype=kv_dtype
        )
        for seed, seq_len in enumerate((9, 40))
    ]
    named = backends.arguments(cases.paged(requests, layout="paired", **options))
    for cache in ("k_cache", "v_cache"):
        if kv_dtype.startswith("fp8"):  # opcheck cannot compare tensors of float8 types
            named[cache] = named[cache].view(torch.uint8)
            named["kv_dtype"] = kv_dtype
    return named


def positional(named: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    rest = {name: value for name, value in named.items() if name not in TENSORS}
    return tuple(named[name] for name in TENSORS), rest


def append_arguments() -> tuple[torch.Tensor, ...]:
    key = torch.randn(3, 2, 64, dtype=torch.float16)
    caches = torch.zeros(3, 2, 16, 2, 64, dtype=torch.float16)
    return key, key + 1, caches[:, 0].clone(), caches[:, 1].clone(), torch.tensor([3, -1, 40])


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "scale": 0.3,
            "causal": False,
            "window": 5,
            "softcap": 2.0,
            "sinks": torch.zeros(4),
            "k_dequant_scale": torch.tensor(2.0),
            "v_dequant_scale": torch.tensor([1.0, 2.0]),
            "route": "scalar_fp32",
        },
    ],
    ids=["plain", "all options"],
)
def test_opcheck_of_attention(kv_dtype: str, return_lse: bool, options: dict[str, Any]) -> None:
    tensors, rest = positional(arguments(kv_dtype))
    rest |= options
    torch.library.opcheck(OPS.paged_attention.default, tensors, rest | {"return_lse": return_lse})
    rest["out_dtype"] = torch.float32
    torch.library.opcheck(OPS.paged_attention.default, tensors, rest)


@pytest.mark.parametrize("scale", [None, torch.tensor([0.5, 2.0])])
def test_opcheck_of_append(scale: torch.Tensor | None) -> None:
    options = {"k_dequant_scale": scale, "v_dequant_scale": scale}
    torch.library.opcheck(OPS.append_kv.default, append_arguments(), options)


def test_opcheck_of_merge() -> None:
    torch.library.opcheck(OPS.merge_states.default, (torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)))


def test_the_ops_are_the_functions() -> None:
    named = arguments()
    tensors, rest = positional(named)
    expected = fv.paged_attention(**named, return_lse=True)
    for actual in (
        OPS.paged_attention(*tensors, **rest, return_lse=True),
        OPS.paged_attention(**named, return_lse=True),
    ):
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    out, lse = OPS.paged_attention(*tensors, **rest)
    assert torch.equal(out, expected[0]) and lse.numel() == 0
    out, _ = OPS.paged_attention(*tensors, **rest, out_dtype=torch.float32)
    assert torch.equal(out, fv.paged_attention(**named, out=torch.empty(4, 4, 64)))

    written = [append_arguments(), append_arguments()]
    key = torch.randn(3, 2, 64)
    for append, (_, _, k_cache, v_cache, slots) in zip(
        (fv.append_kv, OPS.append_kv), written, strict=True
    ):
        assert append(key, key, k_cache, v_cache, slots) is None
    assert torch.equal(written[0][2], written[1][2]) and torch.equal(written[0][3], written[1][3])

    partials = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    for ours, theirs in zip(OPS.merge_states(*partials), fv.merge_states(*partials), strict=True):
        assert torch.equal(ours, theirs)


def test_the_ops_raise_the_same_errors() -> None:
    tensors, rest = positional(arguments())
    for bad, error, words in (
        ({"window": 0}, fv.OutOfRangeError, "window: 0"),
        ({"route": "fast"}, fv.InvalidArgumentError, "route: 'fast'"),
        ({"kv_dtype": "fp9"}, fv.InvalidArgumentError, "kv_dtype: 'fp9'"),
        ({"workspace": 2**40}, fv.InvalidArgumentError, "workspace: handle 1099511627776"),
        ({"k_dequant_scale": torch.zeros(1)}, fv.InvalidArgumentError, "k_dequant_scale"),
    ):
        with pytest.raises(error, match=words):
            OPS.paged_attention(*tensors, **(rest | bad))
    with fv.require_route("scalar_fp32"), pytest.raises(fv.RouteError):
        OPS.paged_attention(*tensors, **rest)


def test_fake_tensors() -> None:
    mode = FakeTensorMode()
    fake = {
        name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    appended = [mode.from_tensor(tensor) for tensor in append_arguments()]
    with mode:
        out, lse = fv.paged_attention(**fake, k_dequant_scale=0.5, return_lse=True)
        assert (out.shape, out.dtype, out.stride()) == ((4, 4, 64), torch.float16, (256, 64, 1))
        assert (lse.shape, lse.dtype) == ((4, 4), torch.float32)
        given = torch.empty(4, 4, 64)
        assert fv.paged_attention(**fake, out=given) is given
        fv.append_kv(*appended)
        merged = fv.merge_states(torch.empty(3, 2, 4, 8), torch.empty(3, 2, 4))
        assert [tensor.shape for tensor in merged] == [(2, 4, 8), (2, 4)]
    # Outside of the mode, too, they go where fakes go.
    assert fv.paged_attention(**fake).shape == (4, 4, 64)


def test_meta_tensors() -> None:
    tensors, rest = positional(arguments())
    del rest["query_start_loc"]
    out, _ = OPS.paged_attention(*(tensor.to("meta") for tensor in tensors), **rest)
    assert out.device.type == "meta" and out.shape == (4, 4, 64)


def test_a_fake_among_real_tensors_is_refused() -> None:
    named = arguments()
    named["seq_lens"] = FakeTensorMode().from_tensor(named["seq_lens"])
    with pytest.raises(fv.InvalidArgumentError, match="seq_lens: a FakeTensor; accepted: a tensor"):
        fv.paged_attention(**named)


def test_dispatch_modes_see_the_calls() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "flashverify":
                seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        fv.paged_attention(**arguments())
        fv.paged_attention(**arguments(), out=torch.empty(4, 4, 64))
        fv.append_kv(*append_arguments())
        fv.merge_states(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4))
    assert seen == [
        "paged_attention.default",
        "paged_attention.default",
        "append_kv.default",
        "merge_states.default",
    ]


def test_tracing_records_the_op() -> None:
    named = arguments()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return fv.paged_attention(**(named | {"q": q})) + 1

    traced = make_fx(attend)(named["q"])
    assert "flashverify.paged_attention" in traced.code
    other = torch.randn_like(named["q"])
    assert torch.equal(traced(other), attend(other))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_tracing_records_the_op() -> None:
    """A call that the tracer did not see would be baked in as a constant."""
    named = arguments()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return fv.paged_attention(**(named | {"q": q}))

    traced = torch.jit.trace(attend, (named["q"],), check_trace=False)
    other = torch.randn_like(named["q"])
    assert torch.equal(traced(other), attend(other))


def test_what_torch_cannot_functionalise_is_refused() -> None:
    """torch.func.functionalize has no rule for any op that writes; torch.compile has one."""
    key, value, k_cache, v_cache, slots = append_arguments()

    def append(k_cache: torch.Tensor) -> torch.Tensor:
        fv.append_kv(key, value, k_cache, v_cache, slots)
        return k_cache + 1

    with pytest.raises(RuntimeError, match="flashverify::append_kv"):
        torch.func.functionalize(append)(k_cache)
    assert not k_cache.any()


def test_vmap_is_a_loop() -> None:
    named = arguments()
    queries = torch.randn(3, *named["q"].shape).half()
    outs = torch.vmap(lambda q: fv.paged_attention(**(named | {"q": q})))(queries)
    for out, q in zip(outs, queries, strict=True):
        assert torch.equal(out, fv.paged_attention(**(named | {"q": q})))


@pytest.mark.parametrize("through", ["function", "op"])
@pytest.mark.parametrize("name", ["q", "k_cache", "sinks", "k_dequant_scale"])
def test_autograd_is_refused(through: str, name: str) -> None:
    named = arguments(sinks=torch.zeros(4), k_dequant_scale=torch.ones(1))
    named[name] = named[name].clone().requires_grad_()
    attend = fv.paged_attention if through == "function" else OPS.paged_attention
    with pytest.raises(fv.UnsupportedError, match=f"{name}: requires grad; accepted: .*no_grad"):
        attend(**named)
    with torch.no_grad():
        attend(**named)
    with torch.inference_mode():
        attend(**named)


@pytest.mark.parametrize("through", ["function", "op"])
def test_autograd_is_refused_by_append_and_merge(through: str) -> None:
    append, merge = (
        (fv.append_kv, fv.merge_states)
        if through == "function"
        else (OPS.append_kv, OPS.merge_states)
    )
    key, *rest = append_arguments()
    with pytest.raises(fv.UnsupportedError, match="key: requires grad"):
        append(key.requires_grad_(), *rest)
    with pytest.raises(fv.UnsupportedError, match="lses: requires grad"):
        merge(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, requires_grad=True))


@pytest.mark.parametrize("differentiate", [torch.func.jacfwd, torch.func.grad, torch.func.jacrev])
@pytest.mark.parametrize("through", ["function", "op"])
def test_function_transforms_are_refused(through: str, differentiate: Any) -> None:
    named = arguments()

    def attend(q: torch.Tensor) -> torch.Tensor:
        if through == "function":
            return fv.paged_attention(**(named | {"q": q})).sum()
        return OPS.paged_attention(**(named | {"q": q}))[0].sum()

    with pytest.raises(fv.UnsupportedError, match="q: requires grad"):
        differentiate(attend)(named["q"])


@pytest.mark.parametrize("through", ["function", "op"])
def test_forward_mode_is_refused(through: str) -> None:
    """A tangent would be lost, and the derivative be 0 without a word."""
    named = arguments()
    attend = fv.paged_attention if through == "function" else OPS.paged_attention
    with torch.autograd.forward_ad.dual_level():
        attend(**named)
        dual = torch.autograd.forward_ad.make_dual(named["q"], torch.ones_like(named["q"]))
        with pytest.raises(fv.UnsupportedError, match="q: requires grad"):
            attend(**(named | {"q": dual}))


def test_a_given_output_that_requires_grad_is_refused() -> None:
    with pytest.raises(fv.UnsupportedError, match="out: requires grad"):
        fv.paged_attention(**arguments(), out=torch.empty(4, 4, 64, requires_grad=True))


def test_autograd_notices_what_was_written() -> None:
    """A tensor saved for a backward pass and then written to is an error, as in torch."""
    weight = torch.ones((), requires_grad=True)
    out = torch.ones(4, 4, 64)
    loss = (weight * out).sum()
    fv.paged_attention(**arguments(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for append in (fv.append_kv, OPS.append_kv):
        key, value, k_cache, v_cache, slots = append_arguments()
        append(key, value, k_cache, v_cache, slots)
        assert k_cache._version == 1 and v_cache._version == 1


def test_inference_tensors() -> None:
    with torch.inference_mode():
        named = arguments()
        out = torch.empty(4, 4, 64)
        fv.paged_attention(**named, out=out)
        fv.append_kv(*append_arguments())
        fv.merge_states(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4))
    assert torch.equal(fv.paged_attention(**named, out=torch.empty(4, 4, 64)), out)


def test_a_default_device_does_not_matter() -> None:
    named = arguments()
    expected = fv.paged_attention(**named, return_lse=True)
    with torch.device("meta"):
        actual = fv.paged_attention(**named, return_lse=True)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
