"""What stops an engine at its start, and what it then says."""

import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest

import flashverify
from tests.engines.support import MODEL, run

STALE_LIBRARY = Path(os.environ["STALE_LIBRARY"]).absolute()

START = """
import sys
from vllm import LLM
LLM(model=sys.argv[1], enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_model_len=256,
    **eval(sys.argv[2]))
"""


def start(tmp_path, arguments, **variables):
    return run(tmp_path, "-c", START, MODEL, repr(arguments), **variables)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"additional_config": {"flashverify": {"rout": "grouped_half"}}},
            "'rout' is no option; accepted: route, row_invariant_linears, fp32_logits",
        ),
        (
            {"dtype": "float32"},
            "model_dtype: 'float32', and kv_cache_dtype 'auto' follows it; accepted: float16",
        ),
        (
            {
                "dtype": "float32",
                "kv_cache_dtype": "fp8",
                "additional_config": {"flashverify": {"row_invariant_linears": True}},
            },
            "row_invariant_linears: true with a model of torch.float32; accepted: torch.bfloat16",
        ),
    ],
    ids=["option", "cache_dtype", "linears"],
)
def test_an_engine_that_cannot_be_served_does_not_start(tmp_path, arguments, reason):
    status, log = start(tmp_path, arguments)
    assert status != 0
    assert reason in log


LAYERS = """
import sys
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from flashverify.integrations.vllm.backend import Impl

config = EngineArgs(model=sys.argv[1], max_model_len=256).create_engine_config()
plain = {"num_heads": 9, "head_size": 64, "scale": 0.125, "num_kv_heads": 3}
for change in (
    {},
    {"alibi_slopes": [0.5] * 9},
    {"attn_type": "encoder_only"},
    {"head_size": 640},
    {"num_heads": 10},
    {"kv_cache_dtype": "int8_per_token_head"},
    {"chunk_lookback": 2},
):
    with set_current_vllm_config(config):
        torch.set_default_dtype(torch.bfloat16)
        try:
            print("made:", Impl(**plain | change).plan.route_plan.route)
        except Exception as error:
            print(f"refused: {type(error).__name__}: {error}")
        torch.set_default_dtype(torch.float32)
"""


def test_a_layer_that_nothing_computes_is_refused_by_name(tmp_path):
    status, log = run(tmp_path, "-c", LAYERS, MODEL)
    assert status == 0, log
    assert log.count("made: ") == 1 and "made: grouped_fp32" in log, log
    assert log.count("refused: UnsupportedError: ") == 6, log
    for reason in (
        "alibi_slopes: given; accepted: None; flashverify never leaves a layer",
        "attn_type: 'encoder_only'; accepted: 'decoder'",
        "head_dim: 640",
        "num_heads: 10; accepted: multiples of 3",
        "kv_cache_dtype: 'int8_per_token_head'",
        "chunk_lookback: 2",
    ):
        assert f"refused: UnsupportedError: {reason}" in log, log


def installed_copy(tmp_path):
    """The installed wheel's files, copied into a folder that comes first on the path."""
    copy = tmp_path / "copy"
    package = Path(flashverify.__file__).parent
    shutil.copytree(package, copy / "flashverify")
    shutil.copy(package.parent / "flashverify_vllm_plugin.py", copy)
    return copy


def test_a_stale_library_stops_the_engine(tmp_path):
    copy = installed_copy(tmp_path)
    (copy / "flashverify/libflashverify.so.4").unlink()
    shutil.copy(STALE_LIBRARY, copy / "flashverify/libflashverify.so.4")
    status, log = start(tmp_path, {}, PYTHONPATH=str(copy))
    assert status != 0
    assert "StaleNativeLibraryError" in log
    assert "Precision revision found: 3; this package needs revision 4" in log
    assert "controls the attention" not in log


def test_an_unknown_version_is_answered_in_words(tmp_path):
    code = "import vllm; vllm.__version__ = '0.33.1'; import vllm.plugins as p"
    status, log = run(tmp_path, "-c", f"{code}; p.load_general_plugins()")
    assert status != 0
    assert "vllm: version 0.33.1; accepted: 0.32.*" in log


def test_vllm_plugins_filters_the_plugin(tmp_path):
    code = (
        "import vllm.plugins as p; p.load_general_plugins(); "
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as names; "
        "print('backend:', names.CPU_ATTN.get_path())"
    )
    ours = "backend: flashverify.integrations.vllm.backend.CpuBackend"
    status, log = run(tmp_path, "-c", code)
    assert status == 0 and ours in log, log
    status, log = run(tmp_path, "-c", code, VLLM_PLUGINS="another")
    assert status == 0 and "backend: vllm.v1" in log, log


def test_the_wheel_brings_the_entry_point():
    (point,) = [
        point
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.name == "flashverify"
    ]
    assert point.value == "flashverify_vllm_plugin:register"
