import dataclasses
import os

import pytest
import safetensors.torch
import torch

from flashverify.abba import cache_file
from flashverify.abba.case import Case
from flashverify.abba.outcome import UsageError
from tests.abba import support

METADATA = {"format": "flashverify-cache", "version": "1", "softmax_scale": "0.125"}


def tensors(dtype=torch.float8_e4m3fn):
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 4, 64, generator=generator).to(torch.float16),
        "k": torch.randn(9, 2, 64, generator=generator).to(dtype),
        "v": torch.randn(9, 2, 64, generator=generator).to(dtype),
        "k_dequant_scale": torch.tensor([0.5]),
        "v_dequant_scale": torch.tensor([0.25, 0.75]),
    }


def contents(**changes):
    return cache_file.CacheFile(**{**tensors(), "softmax_scale": 0.125, **changes})


@pytest.mark.parametrize("name", cache_file.KV_DTYPES)
def test_what_is_written_is_read(tmp_path, name):
    path = tmp_path / "kv.safetensors"
    given = contents(**tensors(cache_file.KV_DTYPES[name]), metadata={"model": "m"})
    cache_file.write(path, given)
    found = cache_file.read(path)
    for key, tensor in given.tensors().items():
        assert found.tensors()[key].dtype == tensor.dtype
        assert torch.equal(found.tensors()[key].float(), tensor.float())
    assert found.softmax_scale == 0.125
    assert found.metadata["model"] == "m"
    assert found.case(page_size=16) == Case(
        context=9, q_len=2, q_heads=4, kv_heads=2, head_dim=64, page_size=16, kv_dtype=name
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["kv.safetensors"]


def test_the_digest_is_the_files(tmp_path):
    import hashlib

    path = tmp_path / "kv.safetensors"
    cache_file.write(path, contents())
    assert cache_file.read(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def changed(name, change):
    made = tensors()
    made[name] = change(made[name])
    return made


def with_nan(tensor):
    wide = tensor.float()
    wide[1] = torch.nan
    return wide.to(tensor.dtype)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({k: t for k, t in tensors().items() if k != "v"}, "tensor 'v' is missing"),
        ({**tensors(), "w": torch.ones(1)}, "unknown tensor 'w'"),
        (changed("q", lambda t: t.float()), "q is torch.float32, expected torch.float16"),
        (changed("q", lambda t: t[0]), r"q has shape \[4, 64\], expected three"),
        (changed("q", lambda t: t[:0]), r"q has shape \[0, 4, 64\]"),
        (changed("q", lambda t: t[..., :32]), "q has head_dim 32, k has 64"),
        (changed("q", with_nan), "q holds 256 NaN"),
        (changed("q", lambda t: t.repeat(5, 1, 1)), "q has 10 tokens, k only 9"),
        (changed("q", lambda t: t[:, :3]), "q_heads=3 is not a multiple of kv_heads=2"),
        (changed("k", lambda t: t.float()), "k is torch.float32, expected one of"),
        (changed("k", with_nan), "k holds 128 NaN"),
        (changed("v", lambda t: t.float().to(torch.float8_e5m2)), "v is torch.float8_e5m2"),
        (changed("v", lambda t: t[:8]), r"v has shape \[8, 2, 64\], expected \[9, 2, 64\]"),
        (changed("v", with_nan), "v holds 128 NaN"),
        (changed("k_dequant_scale", lambda t: t.double()), "k_dequant_scale is torch.float64"),
        (changed("k_dequant_scale", lambda t: t.repeat(3)), r"has shape \[3\], expected \[1\]"),
        (changed("k_dequant_scale", lambda t: t.reshape(())), r"has shape \[\]"),
        (changed("k_dequant_scale", lambda t: t * torch.nan), r"k_dequant_scale is \[nan\]"),
        (changed("v_dequant_scale", lambda t: t * torch.inf), r"v_dequant_scale is \[inf, inf\]"),
        (changed("v_dequant_scale", lambda t: -t), r"v_dequant_scale is \[-0.25, -0.75\]"),
        (changed("v_dequant_scale", lambda t: 0 * t), r"v_dequant_scale is \[0.0, 0.0\]"),
    ],
)
def test_every_fault_of_a_file_is_named(tmp_path, made, message):
    path = tmp_path / "kv.safetensors"
    made = {name: tensor.contiguous() for name, tensor in made.items()}
    safetensors.torch.save_file(made, path, metadata=METADATA)
    with pytest.raises(UsageError, match=message) as refusal:
        cache_file.read(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "pt"}, "'format' is 'pt', expected 'flashverify-cache'"),
        ({"version": "2"}, "'version' is '2', expected '1'"),
        ({"softmax_scale": "wide"}, "'softmax_scale' is 'wide', expected a positive number"),
        ({"softmax_scale": "nan"}, "'softmax_scale' is 'nan'"),
        ({"softmax_scale": "-1"}, "'softmax_scale' is '-1'"),
    ],
)
def test_every_fault_of_the_metadata_is_named(tmp_path, metadata, message):
    path = tmp_path / "kv.safetensors"
    safetensors.torch.save_file(tensors(), path, metadata={**METADATA, **metadata})
    with pytest.raises(UsageError, match=message):
        cache_file.read(path)


def test_metadata_may_not_be_absent(tmp_path):
    path = tmp_path / "kv.safetensors"
    safetensors.torch.save_file(tensors(), path)
    with pytest.raises(UsageError, match="'format' is None"):
        cache_file.read(path)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_foreign_and_truncated_files_are_refused(tmp_path, keep):
    path = tmp_path / "kv.safetensors"
    cache_file.write(path, contents())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match="is not a safetensors file"):
        cache_file.read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*absent: No such file"):
        cache_file.read(tmp_path / "absent")
    # Reading a pipe would wait for somebody to write.
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match=r"--cache: .* is no regular file"):
            cache_file.read(path)


def test_a_file_beyond_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "large"
    path.write_bytes(bytes(2**20))
    monkeypatch.setattr(cache_file, "available_memory_bytes", lambda: 4 * 2**20)
    with pytest.raises(UsageError, match=r"large \(1.0 MiB\) does not fit memory"):
        cache_file.read(path)


def test_nothing_is_written_of_contents_that_could_not_be_read(tmp_path):
    path = tmp_path / "kv.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(UsageError, match="k_dequant_scale"):
        cache_file.write(path, contents(k_dequant_scale=torch.tensor([torch.nan])))
    assert path.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_captured_file_in_the_repository_is_sound():
    found = cache_file.read(support.DATA / "smollm2_layer12_e4m3.safetensors")
    case = found.case(page_size=16)
    assert (case.q_len, case.q_heads, case.kv_heads, case.head_dim) == (8, 9, 3, 64)
    assert case.kv_dtype == "e4m3"
    assert case.context > 1000
    # A real layer is no normal noise: its keys have outliers, and the largest fills the range.
    k = found.k.float()
    assert k.abs().max() == 448
    assert k.abs().max() > 8 * k.std()
    assert dataclasses.asdict(found)["metadata"]["layer"] == "12"
