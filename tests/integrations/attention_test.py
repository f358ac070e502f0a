"""A model's logits against transformers' own attention over a cache quantised by definition."""

import re

import pytest
import torch
import transformers

import flashverify as fv
from flashverify.integrations.transformers import ATTENTION_NAME, PagedLayer, enable
from tests.integrations import models

# Queries, probabilities and values go through FP16 (2^-11 = 4.9e-4 each at most); a layer's
# output is a tenth of the residual stream or more, and the norm and the head pass it on.
TOLERANCE = 2e-3
# What quantising the cache itself changes: the bound would show that it was left out.
QUANTISATION = 1e-2
# What kv_scales accepts for a model of two layers, in the words of its refusal.
SCALES = "None, or a sequence of 2 elements, one for each layer: KVScales or None"


def relative_l2(found, expected):
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
@pytest.mark.parametrize("kind", models.CLASSES)
@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_logits_are_those_of_a_quantised_cache(kind, page_size):
    # One layer, so that keys come from the embeddings alone, the same bits on both sides.
    model = models.make(kind, layers=1, dtype=torch.float32)
    model.set_attn_implementation("eager")
    tokens = models.prompt(150)
    expected = model(tokens, past_key_values=models.quantised_cache(model)).logits
    unquantised = model(tokens).logits
    with enable(model, page_size=page_size) as integration:
        found = model(tokens).logits
        cache = integration.new_cache()
        # The prompt in passes of several lengths gives the same as in one.
        parts = [
            model(part, past_key_values=cache).logits
            for part in tokens.split([70, 1, 8, 1, 65, 5], dim=1)
        ]
    assert relative_l2(found, expected) < TOLERANCE
    assert relative_l2(torch.cat(parts, dim=1), expected) < TOLERANCE
    assert relative_l2(unquantised, expected) > QUANTISATION


@torch.inference_mode()
def test_left_padding_is_not_seen():
    model = models.make(layers=1, dtype=torch.float32)
    model.set_attn_implementation("eager")
    rows, lengths = [models.prompt(n, seed=n)[0] for n in (90, 7, 64)], (90, 7, 64)
    padded = torch.stack([torch.cat([row.new_zeros(90 - len(row)), row]) for row in rows])
    mask = (torch.arange(90) >= 90 - torch.tensor(lengths)[:, None]).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    more = torch.ones(3, 1, dtype=torch.int64)
    with enable(model) as integration:
        cache = integration.new_cache()
        arguments = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
        first = model(padded, **arguments).logits
        mask = torch.cat([mask, more], dim=1)
        arguments = {"attention_mask": mask, "past_key_values": cache}
        second = model(5 * more, position_ids=places[:, -1:] + 1, **arguments).logits
        with pytest.raises(fv.InvalidArgumentError, match=r"\[0, 83, 26\] in the passes before"):
            model(5 * more, past_key_values=cache)
    for index, row in enumerate(rows):
        alone = torch.cat([row, row.new_tensor([5])])[None]
        expected = model(alone, past_key_values=models.quantised_cache(model)).logits[0]
        found = torch.cat([first[index, 90 - len(row) :], second[index]])
        assert relative_l2(found, expected) < TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("float16", torch.float16),
        ("auto", torch.bfloat16),
    ],
)
def test_the_cache_has_the_dtype_asked_for(name, dtype):
    model = models.make(layers=1)
    exact = model(models.prompt(40)).logits.float()
    with enable(model, kv_cache_dtype=name) as integration:
        cache = integration.new_cache()
        found = model(models.prompt(40), past_key_values=cache).logits.float()
    assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == dtype
    assert relative_l2(found, exact) < {torch.float8_e5m2: 0.2}.get(dtype, 0.1)


@torch.inference_mode()
def test_scales_are_of_their_layer():
    """Values of a thousandth are lost in E4M3 unless a scale brings them into its range."""
    model = models.make(layers=2, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data *= 1e-3
        layer.self_attn.o_proj.weight.data *= 1e3
    exact = model(models.prompt(40)).logits
    scales = [fv.dtypes.KVScales(torch.ones(1), torch.full((2,), 1e-3), ()) for _ in range(2)]
    errors = []
    for given in (None, [None, scales[1]], scales):
        with enable(model, kv_scales=given):
            errors.append(relative_l2(model(models.prompt(40)).logits, exact))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.5 * errors[0]


@torch.inference_mode()
def test_the_named_route_runs_and_no_other():
    model = models.make()
    with enable(model, route="grouped_half"), fv.require_route("grouped_half"):
        model(models.prompt(70))
    with enable(model), fv.require_route("grouped_fp32"):
        model(models.prompt(70))


@torch.inference_mode()
def test_disable_gives_the_model_back():
    model = models.make(dtype=torch.bfloat16)
    before = model(models.prompt(40)).logits
    integration = enable(model, row_invariant_linears=True)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert not torch.equal(model(models.prompt(40)).logits, before)
    with pytest.raises(fv.InvalidArgumentError, match="its generate was replaced already"):
        enable(model)
    integration.disable()
    integration.disable()
    assert torch.equal(model(models.prompt(40)).logits, before)
    assert isinstance(model(models.prompt(4)).past_key_values, transformers.DynamicCache)
    assert "generate" not in vars(model)


@torch.inference_mode()
def test_a_cache_comes_back_where_it_is_wanted():
    model, tokens = models.make(), models.prompt(4)
    with enable(model):
        assert isinstance(model(tokens).past_key_values.layers[1], PagedLayer)
        assert model(tokens, use_cache=False).past_key_values is None
        assert [type(x) for x in model(tokens, use_cache=False, return_dict=False)] == [
            torch.Tensor
        ]
        assert len(model(tokens, return_dict=False)) == 2


@torch.inference_mode()
def test_a_vision_tower_keeps_its_own_attention():
    text = models.make().config
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision = transformers.CLIPVisionConfig(
        **tower, num_attention_heads=2, image_size=16, patch_size=8
    )
    image = models.VOCABULARY - 1
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=image
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16).eval()
    # Four patches of the image stand between the words.
    tokens = torch.tensor([[1, 2, *[image] * 4, 3, 4]])
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 16, 16).to(torch.bfloat16)}
    before = model(**inputs).logits
    with enable(model, kv_cache_dtype="auto"):
        assert model.config.text_config._attn_implementation == ATTENTION_NAME
        assert model.config.vision_config._attn_implementation == "sdpa"
        found = model(**inputs).logits
    assert 0 < relative_l2(found.float(), before.float()) < 0.05
    assert model.config.text_config._attn_implementation == "sdpa"
    assert torch.equal(model(**inputs).logits, before)


@torch.inference_mode()
def test_a_model_that_does_not_let_its_attention_be_set(monkeypatch):
    model = models.make()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(fv.UnsupportedError, match="does not let its attention be set"):
        enable(model, row_invariant_linears=True)
    assert not any("forward" in vars(module) for module in model.modules())


@torch.inference_mode()
def test_another_cache_is_refused():
    model = models.make()
    with enable(model):
        cache = transformers.DynamicCache(config=model.config)
        with pytest.raises(fv.UnsupportedError, match="do not come from a paged cache"):
            model(models.prompt(4), past_key_values=cache)


@torch.inference_mode()
def test_a_paged_cache_with_another_attention_is_found_out():
    model = models.make()
    cache = transformers.Cache(layers=[PagedLayer() for _ in range(2)])
    model(models.prompt(4), past_key_values=cache)
    with pytest.raises(fv.InvalidArgumentError, match="attention of the pass before"):
        model(models.prompt(4), past_key_values=cache)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kv_cache_dtype": "int4"}, fv.UnsupportedError, "int4"),
        ({"page_size": 0}, fv.InvalidArgumentError, "page_size: 0; accepted: 1 to 65536"),
        ({"route": "fast"}, fv.InvalidArgumentError, "route: 'fast'"),
        ({"page_size": 65537}, fv.InvalidArgumentError, "page_size: 65537; accepted: 1 to 65536"),
        ({"page_size": 64.0}, fv.InvalidArgumentError, "page_size: 64.0; accepted: 1 to 65536"),
        ({"page_size": True}, fv.InvalidArgumentError, "page_size: True; accepted: 1 to 65536"),
        ({"page_size": "64"}, fv.InvalidArgumentError, "page_size: '64'; accepted: 1 to 65536"),
        ({"row_invariant_linears": "no"}, fv.InvalidArgumentError, "row_invariant_linears: 'no'"),
        ({"kv_cache_dtype": 5}, fv.InvalidArgumentError, "kv_cache_dtype: 5"),
        ({"kv_cache_dtype": None}, fv.InvalidArgumentError, "kv_cache_dtype: None"),
        ({"route": 5}, fv.InvalidArgumentError, "route: 5"),
        ({"kv_scales": 5}, fv.InvalidArgumentError, f"kv_scales: 5; accepted: {SCALES}"),
        ({"kv_scales": 0.5}, fv.InvalidArgumentError, f"kv_scales: 0.5; accepted: {SCALES}"),
        ({"kv_scales": "ab"}, fv.InvalidArgumentError, f"kv_scales: 'ab'; accepted: {SCALES}"),
        ({"kv_scales": {0: None, 1: None}}, fv.InvalidArgumentError, "kv_scales: {0: None, 1:"),
        ({"kv_scales": torch.ones(2)}, fv.InvalidArgumentError, "kv_scales: tensor"),
        ({"kv_scales": []}, fv.InvalidArgumentError, f"kv_scales: 0 elements; accepted: {SCALES}"),
        ({"kv_scales": [None]}, fv.InvalidArgumentError, "kv_scales: 1 elements; accepted: None"),
        (
            {"kv_scales": [None, 0.5]},
            fv.InvalidArgumentError,
            "kv_scales[1]: 0.5; accepted: KVScales or None",
        ),
    ],
)
def test_arguments_are_refused_and_the_model_stays(arguments, error, message):
    model = models.make()
    with pytest.raises(error, match=re.escape(message)):
        enable(model, **arguments)
    assert model.config._attn_implementation == "sdpa" and "generate" not in vars(model)


def test_gradients_and_row_invariant_fp32_are_refused():
    model = models.make(dtype=torch.float32)
    with enable(model), pytest.raises(fv.UnsupportedError, match="requires grad"):
        model(models.prompt(4))
    with pytest.raises(fv.UnsupportedError, match="accepted: bfloat16"):
        enable(model, row_invariant_linears=True)


@torch.inference_mode()
def test_masks_and_outputs_that_need_probabilities_are_refused():
    model = models.make()
    with enable(model):
        with pytest.raises(fv.UnsupportedError, match="attention_mask: Tensor"):
            model(models.prompt(4), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
        with pytest.raises(fv.UnsupportedError, match="row 0 hides a token"):
            model(models.prompt(4), attention_mask=torch.tensor([[1, 1, 1, 0]]))


def test_models_that_are_none_are_refused():
    with pytest.raises(fv.InvalidArgumentError, match="model: Linear; accepted"):
        enable(torch.nn.Linear(1, 1))
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    bart = transformers.BartConfig(
        **sizes, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
        decoder_ffn_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    with pytest.raises(fv.UnsupportedError, match="has an encoder"):
        enable(transformers.BartForConditionalGeneration(bart))


def test_another_release_is_refused(monkeypatch):
    from flashverify.integrations.transformers import versions

    versions.check("5.19.7")
    for version in ("5.190.0", "5.18.2", "6.0.0", "4.57"):
        with pytest.raises(fv.UnsupportedError, match=rf"version {version}; accepted: 5\.19\.\*"):
            versions.check(version)
    model = models.make()
    monkeypatch.setattr(versions, "SUPPORTED", ((6, 0),))
    with pytest.raises(fv.UnsupportedError, match=r"accepted: 6\.0\.\*"):
        enable(model)
