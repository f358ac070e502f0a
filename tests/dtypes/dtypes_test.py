"""Cache dtypes and scales: every name has one meaning, and every refusal says why."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flashverify.dtypes import (
    KV_CACHE_DTYPES,
    KVCacheDtype,
    NativeDtype,
    kv_scales_from_checkpoint,
    native_dtype,
    resolve_kv_cache_dtype,
    storage_kv_dtype,
    torch_dtype,
)
from flashverify.errors import InvalidArgumentError, UnsupportedError

HEADER = Path(__file__).parents[2] / "native/include/flashverify/flashverify.h"


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:7", torch.device("cuda", 1)])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"),
        (torch.float16, "float16"),
        (torch.half, "float16"),
        (torch.bfloat16, "bfloat16"),
    ],
)
def test_one_meaning_everywhere(written: Any, meant: str, device: Any) -> None:
    for model_dtype in (None, "float16", torch.bfloat16, "float32"):
        found = resolve_kv_cache_dtype(written, device=device, model_dtype=model_dtype)
        assert found == meant
        assert type(found) is str


def test_resolution_is_idempotent_and_inverse_to_torch() -> None:
    for name in KV_CACHE_DTYPES:
        assert resolve_kv_cache_dtype(name) == name
        assert resolve_kv_cache_dtype(torch_dtype(name)) == name
        assert storage_kv_dtype(torch_dtype(name)) == name


@pytest.mark.parametrize("model_dtype", ["float16", "bfloat16", torch.float16, torch.bfloat16])
def test_auto_follows_the_model(model_dtype: Any) -> None:
    expected = str(model_dtype).removeprefix("torch.")
    assert resolve_kv_cache_dtype("auto", model_dtype=model_dtype) == expected


def test_auto_without_a_model_to_follow() -> None:
    with pytest.raises(InvalidArgumentError, match="model_dtype: None"):
        resolve_kv_cache_dtype("auto", device="cuda")
    with pytest.raises(UnsupportedError, match="model_dtype: 'float32'"):
        resolve_kv_cache_dtype("auto", model_dtype=torch.float32)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("fp16", "the name here is float16"),
        ("half", "the name here is float16"),
        ("bf16", "the name here is bfloat16"),
        ("FP8_INC", "scales are static here"),
        ("float8_e4m3fn", "the name here is fp8_e4m3"),
        (torch.float8_e4m3fnuz, "exponent bias and its NaN differ"),
        (torch.float8_e5m2fnuz, "exponent bias and its NaN differ"),
        (torch.uint8, "bytes have no format of their own"),
        (torch.float32, "no kernel reads a 32-bit cache"),
        (torch.int8, "integer caches"),
        ("nvfp4", "4-bit caches"),
        ("fp8_ds_mla", "latent"),
        ("float64", "float64"),
        ("", "kv_cache_dtype: ''"),
    ],
)
def test_refusals_say_why_and_what_is_accepted(written: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolve_kv_cache_dtype(written)
    assert reason in str(caught.value)
    assert "accepted: fp8 (= fp8_e4m3), fp8_e4m3, fp8_e5m2" in str(caught.value)


def test_no_dtype_and_no_device_of_ours() -> None:
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype: None is neither"):
        resolve_kv_cache_dtype(None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="device: mps; accepted: cpu, cuda"):
        resolve_kv_cache_dtype("fp8", device="mps")
    with pytest.raises(UnsupportedError, match="device: meta"):
        resolve_kv_cache_dtype("fp8", device=torch.device("meta"))


def test_uint8_storage_needs_a_format() -> None:
    assert storage_kv_dtype(torch.uint8, "fp8") == "fp8_e4m3"
    assert storage_kv_dtype(torch.uint8, "fp8_e4m3") == "fp8_e4m3"
    assert storage_kv_dtype(torch.uint8, "fp8_e5m2") == "fp8_e5m2"
    with pytest.raises(InvalidArgumentError, match="kv_dtype: None, and v_cache is uint8"):
        storage_kv_dtype(torch.uint8, argument="v_cache")
    with pytest.raises(InvalidArgumentError, match="accepted: fp8_e4m3, fp8_e5m2"):
        storage_kv_dtype(torch.uint8, "float16")


def test_a_format_may_repeat_the_tensor_but_not_contradict_it() -> None:
    assert storage_kv_dtype(torch.float8_e5m2, "fp8_e5m2") == "fp8_e5m2"
    # "fp8" is E4M3 here too: it never bends to the tensor that it is given with.
    with pytest.raises(
        InvalidArgumentError, match="and k_cache is float8_e5m2; accepted: fp8_e5m2"
    ):
        storage_kv_dtype(torch.float8_e5m2, "fp8")
    with pytest.raises(UnsupportedError, match=r"k_cache\.dtype: 'float32'"):
        storage_kv_dtype(torch.float32)


def test_native_codes_are_the_headers() -> None:
    text = HEADER.read_text()
    codes = {name: int(code) for name, code in re.findall(r"FV_DTYPE_(\w+) = (\d+)", text)}
    assert {code.name: code.value for code in NativeDtype} == codes


def test_native_codes_of_dtypes() -> None:
    assert native_dtype("fp8_e4m3") is NativeDtype.FLOAT8_E4M3
    assert native_dtype("fp8_e5m2") is NativeDtype.FLOAT8_E5M2
    assert native_dtype(torch.float16) == native_dtype("float16") == 2
    assert native_dtype(torch.int64) is NativeDtype.INT64
    with pytest.raises(UnsupportedError, match="dtype: 'uint8'"):
        native_dtype(torch.uint8)


PREFIX = "model.layers.3.self_attn"


def scales(
    tensors: dict[str, torch.Tensor], kv_cache_dtype: KVCacheDtype = "fp8_e4m3", **kwargs: Any
) -> Any:
    return kv_scales_from_checkpoint(
        tensors, PREFIX, kv_cache_dtype=kv_cache_dtype, kv_heads=4, **kwargs
    )


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("kv_scale", "kv_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_checkpoints_scales(k_name: str, v_name: str, dtype: torch.dtype) -> None:
    tensors = {
        f"{PREFIX}.{k_name}": torch.tensor(0.0625, dtype=dtype),
        f"{PREFIX}.{v_name}": torch.tensor([0.0625], dtype=dtype),
        "model.layers.4.self_attn.k_scale": torch.tensor(7.0),
    }
    found = scales(tensors)
    for scale in (found.k, found.v):
        assert scale.dtype == torch.float32
        assert scale.tolist() == [0.0625]
    assert k_name in found.reasons[0]
    assert v_name in found.reasons[0]


def test_per_head_scales_and_a_ranks_share() -> None:
    tensors = {
        f"{PREFIX}.k_scale": torch.tensor([0.5, 1.0, 2.0, 4.0]),
        f"{PREFIX}.v_scale": torch.tensor(0.25),
    }
    assert scales(tensors).k.tolist() == [0.5, 1.0, 2.0, 4.0]
    share = scales(tensors, heads=range(2, 4))
    assert share.k.tolist() == [2.0, 4.0]
    assert share.v.tolist() == [0.25]
    for heads in (range(2, 5), range(-1, 2), range(2, 2), range(0, 4, 2)):
        with pytest.raises(
            InvalidArgumentError, match=r"heads: .* accepted: a range within 0\.\.4"
        ):
            scales(tensors, heads=heads)


def test_the_scales_do_not_alias_the_checkpoint() -> None:
    tensors = {f"{PREFIX}.k_scale": torch.ones(4), f"{PREFIX}.v_scale": torch.ones(1)}
    found = scales(tensors)
    tensors[f"{PREFIX}.k_scale"].fill_(9.0)
    assert found.k.tolist() == [1.0] * 4


def test_absent_scales_are_one() -> None:
    found = scales({"model.layers.4.self_attn.k_scale": torch.tensor(7.0)})
    assert found.k.tolist() == found.v.tolist() == [1.0]
    assert found.k.data_ptr() != found.v.data_ptr()
    assert "no scales below" in found.reasons[0]


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "bfloat16"])
def test_a_16_bit_cache_is_unscaled(kv_cache_dtype: KVCacheDtype) -> None:
    tensors = {f"{PREFIX}.k_scale": torch.tensor(0.5), f"{PREFIX}.v_scale": torch.tensor(0.5)}
    found = scales(tensors, kv_cache_dtype)
    assert found.k.tolist() == found.v.tolist() == [1.0]
    assert f"{PREFIX}.k_scale is for an FP8 cache, and unused" in found.reasons[0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": torch.ones(1)}, "v_scale: missing beside"),
        ({"v_scale": torch.ones(1)}, "k_scale: missing beside"),
        (
            {"k_scale": torch.ones(1), "v_scale": torch.ones(1), "kv_scale": torch.ones(1)},
            r"k_scale: in the checkpoint beside .*kv_scale",
        ),
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(1)}, "k_scale: 2 elements; "),
        ({"k_scale": torch.ones(0), "v_scale": torch.ones(1)}, "k_scale: 0 elements; "),
        ({"k_scale": torch.ones(1), "v_scale": torch.ones(8)}, r"1 \(per tensor\) or 4 \(per KV"),
        ({"kv_scale": torch.tensor(0.0)}, r"kv_scale: 0\.0 at 0; accepted: finite and greater"),
        ({"kv_scale": torch.tensor(-1.0)}, r"kv_scale: -1\.0 at 0"),
        ({"kv_scale": torch.tensor(float("nan"))}, "kv_scale: nan at 0"),
        ({"kv_scale": torch.tensor([1.0, 1.0, float("inf"), 1.0])}, "kv_scale: inf at 2"),
        ({"kv_scale": torch.tensor(1)}, "kv_scale: dtype int64; accepted: a floating"),
        # 1e-60 is a double, and not a float32 scale: it would divide by zero.
        ({"kv_scale": torch.tensor(1e-60, dtype=torch.float64)}, r"kv_scale: 0\.0 at 0"),
    ],
)
def test_refused_scales(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        scales({f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()})
