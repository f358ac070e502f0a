import dataclasses

import pytest
import torch

import flashverify as fv
from flashverify.integrations.vllm import policy
from flashverify.integrations.vllm.options import Options
from flashverify.integrations.vllm.policy import Layer, Speculation

LAYER = Layer(
    device_type="cpu",
    capability=None,
    q_heads=6,
    kv_heads=1,
    head_dim=256,
    page_size=3296,
    q_dtype=torch.bfloat16,
    kv_cache_dtype="fp8_e4m3",
)
NGRAM = Speculation("ngram", 7, {})
DRAFTER = {"architectures": ["DFlash2DraftModel"], "block_size": 8, "dtype": "bfloat16"}
DFLASH2 = Speculation("dflash", 7, DRAFTER)
HALF = Options(route=fv.Route.grouped_half)


def plan(speculation=None, options=Options(), **changes):  # noqa: B008 - it is frozen
    return policy.plan_layer(dataclasses.replace(LAYER, **changes), speculation, options)


@pytest.mark.parametrize("speculation", [None, NGRAM, DFLASH2])
def test_fp32_state_is_the_default(speculation):
    found = plan(speculation)
    assert found.route_plan.route is fv.Route.grouped_fp32
    assert found.max_rows == 64
    assert found.route_plan.reasons


def test_a_dflash2_target_says_that_it_is_one():
    assert "DFlash2 target" in str(plan(DFLASH2).route_plan)
    assert "DFlash2 draft" in str(plan(DFLASH2, is_draft=True).route_plan)
    assert "DFlash2" not in str(plan(NGRAM).route_plan)


def test_a_named_route_runs_outside_dflash2():
    assert plan(NGRAM, HALF).route_plan.route is fv.Route.grouped_half


def test_a_half_route_contradicts_dflash2():
    with pytest.raises(fv.UnsupportedError, match="contradicts the DFlash2 configuration"):
        plan(DFLASH2, HALF)


def test_the_decode_kernel_takes_rows_one_by_one():
    assert plan(options=Options(route=fv.Route.xqa_half)).max_rows == 1


def test_odd_heads_take_the_scalar_route_and_say_so():
    assert plan(head_dim=72).route_plan.route is fv.Route.scalar_fp32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 640}, r"head_dim: 640.*nearest supported value: 512"),
        ({"page_size": 70000}, r"page_size: 70000.*nearest supported value: 65536"),
        ({"q_heads": 5, "kv_heads": 2}, r"num_heads: 5; accepted: multiples of 2"),
        ({"device_type": "cuda", "capability": (6, 1)}, r"capability"),
    ],
)
def test_what_nothing_computes_is_refused_by_name(changes, message):
    with pytest.raises(fv.UnsupportedError, match=message):
        plan(**changes)


def test_a_block_that_no_call_takes_is_refused():
    assert plan(Speculation("ngram", 63, {})).max_rows == 64
    with pytest.raises(fv.UnsupportedError, match=r"num_speculative_tokens: 64; accepted: 1\.\.63"):
        plan(Speculation("ngram", 64, {}))


@pytest.mark.parametrize(
    ("name", "resolved"),
    [
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("auto", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ],
)
def test_cache_dtypes_keep_their_meaning(name, resolved):
    assert policy.cache_dtype(name, torch.bfloat16) == resolved


@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4", "fp8_per_token_head", "fp8_inc"])
def test_other_cache_dtypes_are_refused(name):
    with pytest.raises(fv.UnsupportedError, match=name):
        policy.cache_dtype(name, torch.bfloat16)


def test_dflash2_targets_get_their_defaults():
    config = policy.dflash2_config(DFLASH2, "fp8_e4m3", Options())
    assert config.kv_cache_dtype == "fp8_e4m3"
    assert config.fp32_logits is True
    assert config.q_len == 8
    assert config.mtp is False
    assert policy.fp32_logits(DFLASH2, "fp8_e4m3", Options()) is True
    assert policy.fp32_logits(NGRAM, "fp8_e4m3", Options()) is False
    assert policy.fp32_logits(None, "fp8_e4m3", Options()) is False


@pytest.mark.parametrize("speculation", [None, NGRAM, DFLASH2])
@pytest.mark.parametrize("chosen", [True, False])
def test_the_user_decides_on_fp32_logits(speculation, chosen):
    options = Options(fp32_logits=chosen)
    assert policy.fp32_logits(speculation, "fp8_e4m3", options) is chosen


def test_a_drafter_of_another_block_size_is_refused():
    with pytest.raises(fv.UnsupportedError, match="num_speculative_tokens: 5; accepted: 7"):
        policy.dflash2_config(Speculation("dflash", 5, DRAFTER), "fp8_e4m3", Options())


@pytest.mark.parametrize(
    ("requests", "name"), [(1, "n128"), (2, "n64"), (3, "n32"), (8, "n16"), (256, "n16")]
)
def test_the_schedule_follows_the_capacity(requests, name):
    assert policy.schedule(requests, Options()) == name
    assert policy.schedule(requests, Options(schedule="n4")) == "n4"
