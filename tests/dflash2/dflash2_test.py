"""The DFlash2 defaults: read, overridden, explained, and refused where they contradict."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flashverify.dflash2 import DFlash2Config
from flashverify.errors import InvalidArgumentError, UnsupportedError
from flashverify.routing import Route, SpeculativeMethod, plan_route

# As an engine's --speculative-config is written.
SPECULATIVE = {"method": "dflash", "model": "Qwen3.8-27B-DFlash2", "num_speculative_tokens": 7}

# The fields of a drafter's config.json that matter here, among some that do not.
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "is_causal": False,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 2048,
    "layer_types": ["sliding_attention"] * 5,
    "dflash_config": {"block_size": 8, "target_layer_ids": [1, 16], "mask_token_id": 5},
}

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "dtype": "bfloat16",
    "sliding_window": 4096,  # the target's own, and none of the drafter's business
    "text_config": {"mtp_num_hidden_layers": 1, "hidden_size": 5120},
    "speculative_config": SPECULATIVE,
}


def test_the_defaults() -> None:
    config = DFlash2Config()
    assert config.kv_cache_dtype == "fp8_e4m3"
    assert config.fp32_logits is True
    assert config.num_speculative_tokens == 7
    assert config.q_len == 8
    assert config.target_causal is True
    assert config.draft_causal is False
    assert config.draft_window_tokens == 2048
    assert config.draft_kv_cache_dtype == "float16"
    assert config.mtp is False
    assert config.precision_revision == 4


def test_every_field_has_a_reason_and_is_printed() -> None:
    config = DFlash2Config()
    fields = {f.name for f in dataclasses.fields(config)} - {"sources"}
    assert set(config.reasons) == fields
    assert all(reason.startswith("default: ") for reason in config.reasons.values())
    lines = str(config).splitlines()
    assert len(lines) == len(fields)
    for line, name in zip(lines, config.reasons, strict=True):
        assert line.split()[0] == name
        assert line.split()[1] == str(getattr(config, name))


def test_it_is_one_frozen_hashable_value() -> None:
    config = DFlash2Config()
    assert hash(config) == hash(DFlash2Config())
    assert config == DFlash2Config.from_config(SPECULATIVE)
    assert config != dataclasses.replace(config, fp32_logits=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mtp = True  # type: ignore[misc]


def test_an_engines_speculative_configuration() -> None:
    config = DFlash2Config.from_config(SPECULATIVE)
    assert config.q_len == 8
    assert "num_speculative_tokens of the configuration" in str(config)
    assert DFlash2Config.from_config({**SPECULATIVE, "num_speculative_tokens": 15}).q_len == 16
    assert DFlash2Config.from_config({"method": "dflash2"}) == DFlash2Config()


def test_a_targets_config() -> None:
    config = DFlash2Config.from_config(TARGET)
    assert config == DFlash2Config()
    assert "mtp_num_hidden_layers" in config.reasons["mtp"]
    assert "not enabled" in config.reasons["mtp"]


def test_a_drafters_config() -> None:
    config = DFlash2Config.from_config(DRAFTER)
    assert config.num_speculative_tokens == 7
    assert config.draft_kv_cache_dtype == "bfloat16"
    assert config.kv_cache_dtype == "fp8_e4m3"
    assert config.reasons["draft_window_tokens"] == "the drafter's sliding_window"
    assert config.reasons["num_speculative_tokens"] == "the drafter's block_size of 8, less one"


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": None}, 2048),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 2048),
        ({"layer_types": ["full_attention"]}, None),
        ({"use_sliding_window": False}, None),
        ({"use_sliding_window": True, "layer_types": None}, 2048),
    ],
)
def test_a_drafters_window(changes: dict[str, Any], window: int | None) -> None:
    assert DFlash2Config.from_config(DRAFTER | changes).draft_window_tokens == window


def test_a_block_size_outside_dflash_config() -> None:
    drafter = {**DRAFTER, "dflash_config": {"mask_token_id": 5}, "block_size": 16}
    assert DFlash2Config.from_config(drafter).q_len == 16


def test_a_drafter_and_the_engines_choice_together() -> None:
    config = DFlash2Config.from_config({**DRAFTER, "speculative_config": SPECULATIVE})
    assert config.q_len == 8
    fewer = {**SPECULATIVE, "num_speculative_tokens": 3}
    with pytest.raises(UnsupportedError, match="num_speculative_tokens: 3; accepted: 7, one less"):
        DFlash2Config.from_config({**DRAFTER, "speculative_config": fewer})


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("kv_cache_dtype", "fp8_e5m2", "fp8_e5m2"),
        ("kv_cache_dtype", "fp8", "fp8_e4m3"),
        ("kv_cache_dtype", "auto", "bfloat16"),
        ("fp32_logits", False, False),
        ("num_speculative_tokens", 3, 3),
        ("draft_window_tokens", None, None),
        ("draft_window_tokens", 512, 512),
        ("draft_kv_cache_dtype", "float16", "float16"),
        ("target_causal", True, True),
        ("draft_causal", False, False),
        ("mtp", False, False),
        ("precision_revision", 4, 4),
    ],
)
def test_one_override_changes_one_field(name: str, value: Any, kept: Any) -> None:
    plain = DFlash2Config.from_config(DRAFTER)
    config = DFlash2Config.from_config(DRAFTER, **{name: value})
    assert getattr(config, name) == kept
    assert config.reasons[name] == "set by the caller"
    assert dataclasses.replace(plain, **{name: kept}) == config
    others = {key: reason for key, reason in config.reasons.items() if key != name}
    assert others.items() <= plain.reasons.items()


def test_a_field_set_at_construction_says_so() -> None:
    assert DFlash2Config(num_speculative_tokens=3).reasons["num_speculative_tokens"] == (
        "set by the caller"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "method: None; accepted: dflash, dflash2, or the config.json of a DFlash2DraftModel"),
        ({"method": "eagle3"}, "method: 'eagle3'"),
        ({"method": 5}, "method: 5"),
        ({"method": "qwen3_5_mtp"}, "method: 'qwen3_5_mtp'; .*one drafter at a time"),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 2048}, "method: None"),
        ({**DRAFTER, "is_causal": True}, "draft_causal: True; accepted: False"),
        ({**DRAFTER, "dflash_config": {"causal": True}}, "draft_causal: True; accepted: False"),
        ({**DRAFTER, "sliding_window": 4}, "draft_window_tokens: 4; accepted: 8 and more"),
        ({**SPECULATIVE, "num_speculative_tokens": 0}, r"num_speculative_tokens: 0; .* 1\.\.31"),
        ({**SPECULATIVE, "num_speculative_tokens": 32}, r"accepted: 1\.\.31"),
        ({**SPECULATIVE, "speculative_config": {"method": "ngram"}}, "method: 'ngram'"),
    ],
)
def test_what_contradicts_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        DFlash2Config.from_config(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mtp": True}, "mtp: True; accepted: False .*one drafter at a time"),
        ({"target_causal": False}, "target_causal: False; accepted: True .*must not see"),
        ({"draft_causal": True}, "draft_causal: True; accepted: False .*bidirectional"),
        ({"precision_revision": 3}, "precision_revision: 3; accepted: 4"),
        ({"kv_cache_dtype": "int8"}, "integer caches"),
        ({"num_speculative_tokens": 15, "draft_window_tokens": 15}, "accepted: 16 and more"),
    ],
)
def test_overrides_that_contradict_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        DFlash2Config.from_config(SPECULATIVE, **overrides)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (SPECULATIVE, {"fp32_logit": True}, "fp32_logit: no field of .*accepted: kv_cache_dtype"),
        (SPECULATIVE, {"sources": ()}, "sources: no field"),
        (SPECULATIVE, {"fp32_logits": 1}, "fp32_logits: 1; accepted: bool"),
        (SPECULATIVE, {"num_speculative_tokens": True}, "num_speculative_tokens: True"),
        (SPECULATIVE, {"draft_window_tokens": 2048.0}, r"draft_window_tokens: 2048\.0; .*None"),
        (SPECULATIVE, {"kv_cache_dtype": "auto"}, "model_dtype: None"),
        ({**SPECULATIVE, "num_speculative_tokens": "7"}, {}, "num_speculative_tokens: '7'"),
        ({**TARGET, "speculative_config": "dflash"}, {}, "speculative_config: 'dflash'"),
        ({**DRAFTER, "dflash_config": []}, {}, r"dflash_config: \[\]; accepted: an object"),
        ({**DRAFTER, "dflash_config": {"block_size": "8"}}, {}, "block_size: '8'"),
        ({**DRAFTER, "layer_types": 5}, {}, "layer_types: 5; accepted: a list"),
        (
            {**DRAFTER, "architectures": "DFlash2DraftModel"},
            {},
            r"architectures: .*accepted: a list",
        ),
        ({**DRAFTER, "sliding_window": "2048"}, {}, "draft_window_tokens: '2048'"),
        ({**DRAFTER, "is_causal": "no"}, {}, "draft_causal: 'no'; accepted: bool"),
    ],
)
def test_wrong_types(config: dict[str, Any], overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        DFlash2Config.from_config(config, **overrides)


def test_an_unresolved_dtype_at_construction() -> None:
    with pytest.raises(UnsupportedError, match="kv_cache_dtype: 'fp8'; accepted, once resolved"):
        DFlash2Config(kv_cache_dtype="fp8")  # type: ignore[arg-type]


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(InvalidArgumentError, match=r"path: .*config\.json; accepted: a readable"):
        DFlash2Config.from_file(tmp_path)
    file.write_text(json.dumps(DRAFTER))
    assert DFlash2Config.from_file(file) == DFlash2Config.from_config(DRAFTER)
    assert DFlash2Config.from_file(str(tmp_path), mtp=False) == DFlash2Config.from_config(DRAFTER)
    for text in ("{", "[" * 2000, "\x00", ""):
        file.write_text(text)
        with pytest.raises(InvalidArgumentError, match="accepted: a readable"):
            DFlash2Config.from_file(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InvalidArgumentError, match="accepted: a readable"):
        DFlash2Config.from_file(file)
    file.write_text("[]")
    with pytest.raises(InvalidArgumentError, match="accepted: a JSON object"):
        DFlash2Config.from_file(file)


@pytest.mark.parametrize(
    ("device_type", "capability"), [("cpu", None), ("cuda", (7, 0)), ("cuda", (9, 0))]
)
@pytest.mark.parametrize("tokens", [1, 7, 31])
def test_its_requests_keep_fp32_state(
    device_type: str, capability: tuple[int, int] | None, tokens: int
) -> None:
    config = DFlash2Config(num_speculative_tokens=tokens)
    device: Any = {"device_type": device_type, "capability": capability}
    target = config.target_request(head_dim=256, group=6, page_size=3296, **device)
    assert target.speculative_method is SpeculativeMethod.dflash2_target
    assert (target.q_len, target.causal, target.kv_cache_dtype) == (tokens + 1, True, "fp8_e4m3")
    assert plan_route(target).route is Route.grouped_fp32
    decode = config.target_request(head_dim=256, group=6, page_size=3296, q_len=1, **device)
    assert plan_route(decode).route is Route.grouped_fp32
    draft = config.draft_request(head_dim=128, group=4, page_size=16, **device)
    assert (draft.q_len, draft.causal, draft.kv_cache_dtype) == (tokens + 1, False, "float16")
    assert plan_route(draft).route is Route.grouped_fp32
