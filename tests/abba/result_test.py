"""abba.json, complete and typed; abba.md, the terminal's table and abba.png of the same run."""

import dataclasses
import io
import math
import re
import statistics

import matplotlib.image
import numpy as np
import pytest

import flashverify
from flashverify.abba import plot, text
from flashverify.abba.options import parse
from flashverify.abba.stats import Ratio
from tests.abba import support

SHA256 = re.compile(r"[0-9a-f]{64}\Z")
NONE = type(None)

# Every field of a measured result; a value is a type, a dict of the same, or a list of one item.
SUMMARY = {"median": float, "mad": float, "p10": float, "p90": float}
ARM = {
    "route": str,
    "latency_us": SUMMARY,
    "relative_l2": float,
    "max_row_relative_l2": float,
    "max_abs": float,
    "nonfinite_elements": int,
    "relative_l2_fp32": float,
    "output_sha256": str,
    "output_repeats": bool,
    "workspace_bytes": int,
}
SCHEMA = {
    "schema": int,
    "status": str,
    "reason": NONE,
    "command": str,
    "precision_revision": int,
    "native": {
        "library_sha256": str,
        "extension_sha256": str,
        "build_id": str,
        "arms_identical": bool,
        "files": [{"name": str, "sha256": str, "size_bytes": int}],
        "differences": [],
    },
    "environment": {
        "device": str,
        "driver": NONE,
        "cuda": NONE,
        "cuda_image": NONE,
        "torch": str,
        "python": str,
        "flashverify": str,
        "git": (str, NONE),
        "cpu_isa": str,
        "threads": int,
        "system": str,
        "time_utc": str,
    },
    "case": {
        "device": str,
        "context": int,
        "q_len": int,
        "q_heads": int,
        "kv_heads": int,
        "head_dim": int,
        "page_size": int,
        "batch": int,
        "kv_dtype": str,
        "arm_a": str,
        "arm_b": str,
        "arm_a_root": NONE,
        "arm_b_root": NONE,
        "warmups": int,
        "blocks": int,
        "seed": int,
        "peers": [str],
        "cuda_image": NONE,
        "schedule": NONE,
        "cache": (str, NONE),
        "out": str,
        "quick": bool,
    },
    "arms": {"A": ARM, "B": ARM},
    "fp16_rounding_floor": float,
    "fp32_pytorch_relative_l2": float,
    "byte_floor_us": float,
    "bandwidth_gb_s": float,
    "bandwidth_median_gb_s": float,
    "bandwidth_method": str,
    "kv_bytes": int,
    "arithmetic_floor_us": float,
    "matmul_gflop_s": float,
    "matmul_median_gflop_s": float,
    "matmul_method": str,
    "flops": int,
    "ratio_b_over_a": {"median": float, "ci95": [float]},
    "blocks": [
        {
            "block": int,
            "slots": [{"arm": str, "latency_us": float}],
            "ratio_b_over_a": float,
        }
    ],
    "timer": str,
    "other_flushes": {},
    "inputs": str,
    "inputs_sha256": {
        "q": str,
        "k_cache": str,
        "v_cache": str,
        "page_table": str,
        "k_dequant_scale": str,
        "v_dequant_scale": str,
    },
    "reference": str,
    "peers": {
        "torch": {
            "description": str,
            "status": str,
            "reason": NONE,
            "latency_us": SUMMARY,
            "relative_l2": float,
        }
    },
}


def check(found, schema, where="abba.json"):
    if isinstance(schema, dict):
        assert isinstance(found, dict), where
        assert set(found) == set(schema), where
        for name, part in schema.items():
            check(found[name], part, f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(found, list), where
        assert len(found) > 0 or schema == [] or where.endswith("peers"), where
        assert not (found and schema == []), where
        for index, item in enumerate(found):
            check(item, schema[0], f"{where}[{index}]")
    else:
        kinds = schema if isinstance(schema, tuple) else (schema,)
        assert type(found) in kinds, f"{where} is {found!r}"
        if isinstance(found, float):
            assert math.isfinite(found) and found >= 0, where
        if where.endswith(("sha256", "inputs_sha256.q")) and isinstance(found, str):
            assert SHA256.match(found), where


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    done = support.call(*support.SMALL, "--blocks=6", "--peers=torch", f"--out={folder}")
    assert done.code == 0, done.stderr
    return folder, done, support.load(folder)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured")
    file = support.DATA / "smollm2_layer12_e4m3.safetensors"
    done = support.call(f"--cache={file}", "--quick", "--page_size=64", f"--out={folder}")
    assert done.code == 0, done.stderr
    return folder, done, support.load(folder)


def test_every_field_is_there_with_its_type_and_no_other(measured):
    check(measured[2], SCHEMA)


def test_status_case_and_native_agree_with_the_process(measured):
    _, _, result = measured
    assert result["schema"] == 1
    assert result["status"] == "measured"
    assert result["precision_revision"] == flashverify.PRECISION_REVISION
    info = flashverify.native_info()
    for name in ("library_sha256", "extension_sha256", "build_id"):
        assert result["native"][name] == info[name]
    assert result["native"]["arms_identical"] is True
    assert result["case"]["context"] == 200 and result["case"]["blocks"] == 6
    assert result["case"]["peers"] == ["torch"]
    assert result["environment"]["flashverify"] == flashverify.__version__
    assert result["command"].startswith("abba --context=200 ")


def test_raw_times_are_in_order_and_give_the_summaries(measured):
    _, _, result = measured
    blocks = result["blocks"]
    assert [block["block"] for block in blocks] == list(range(6))
    assert all([slot["arm"] for slot in block["slots"]] == list("ABBA") for block in blocks)
    for name, arm in result["arms"].items():
        times = [s["latency_us"] for b in blocks for s in b["slots"] if s["arm"] == name]
        assert len(times) == 12
        assert arm["latency_us"]["median"] == pytest.approx(statistics.median(times))
        assert min(times) <= arm["latency_us"]["p10"] <= arm["latency_us"]["p90"] <= max(times)
    ratios = []
    for block in blocks:
        a1, b1, b2, a2 = (slot["latency_us"] for slot in block["slots"])
        assert block["ratio_b_over_a"] == pytest.approx((b1 + b2) / (a1 + a2))
        ratios.append(block["ratio_b_over_a"])
    ratio = result["ratio_b_over_a"]
    assert ratio["median"] == pytest.approx(statistics.median(ratios))
    assert min(ratios) <= ratio["ci95"][0] <= ratio["median"] <= ratio["ci95"][1] <= max(ratios)


def test_the_fp32_arm_is_at_the_floor_and_the_half_arm_is_not(measured):
    _, _, result = measured
    floor = result["fp16_rounding_floor"]
    assert floor == pytest.approx(2.07e-4, rel=0.1)
    half, full = result["arms"]["A"], result["arms"]["B"]
    assert half["route"] == "grouped_half" and full["route"] == "grouped_fp32"
    assert full["relative_l2"] <= 1.05 * floor < 1.2 * floor < half["relative_l2"]
    for arm in (half, full):
        assert arm["relative_l2_fp32"] == pytest.approx(arm["relative_l2"], rel=0.01)
        assert arm["max_row_relative_l2"] >= arm["relative_l2"]
        assert arm["output_repeats"] is True
    assert half["output_sha256"] != full["output_sha256"]
    assert result["fp32_pytorch_relative_l2"] < 1e-5


def test_floors_follow_from_the_rates(measured):
    _, _, result = measured
    assert result["kv_bytes"] == 2 * 200 * 2 * 64
    assert result["byte_floor_us"] == pytest.approx(
        result["kv_bytes"] / result["bandwidth_gb_s"] * 1e-3
    )
    assert result["flops"] == 4 * 4 * 64 * (198 + 199 + 200)
    assert result["arithmetic_floor_us"] == pytest.approx(
        result["flops"] / result["matmul_gflop_s"] * 1e-3
    )
    assert result["bandwidth_median_gb_s"] <= result["bandwidth_gb_s"]
    assert result["matmul_median_gflop_s"] <= result["matmul_gflop_s"]


def test_the_same_seed_gives_the_same_bits_and_another_route_others(measured, tmp_path):
    _, _, result = measured
    arguments = [*support.SMALL, "--arm_a=grouped_fp32", "--arm_b=scalar_fp32"]
    assert support.call(*arguments, f"--out={tmp_path}").code == 0
    again = support.load(tmp_path)
    assert again["inputs_sha256"] == result["inputs_sha256"]
    assert again["arms"]["A"]["output_sha256"] == result["arms"]["B"]["output_sha256"]
    assert again["arms"]["A"]["route"] == "grouped_fp32"
    assert again["arms"]["B"]["route"] == "scalar_fp32"


def test_one_query_token_meets_the_legacy_decode_kernel(tmp_path):
    arguments = [*support.SMALL, "--q_len=1", "--arm_a=xqa_half", "--blocks=1", "--warmups=0"]
    assert support.call(*arguments, f"--out={tmp_path}").code == 0
    result = support.load(tmp_path)
    assert result["arms"]["A"]["route"] == "xqa_half"
    # One block has no spread to resample.
    assert result["ratio_b_over_a"]["ci95"] is None
    assert "one block gives no interval" in (tmp_path / "abba.md").read_text()


@pytest.mark.parametrize("kv_dtype", ["e5m2", "fp16", "bf16"])
def test_other_caches(tmp_path, kv_dtype):
    arguments = [*support.SMALL, f"--kv_dtype={kv_dtype}", "--batch=2", "--blocks=2"]
    assert support.call(*arguments, f"--out={tmp_path}").code == 0
    result = support.load(tmp_path)
    assert result["case"]["kv_dtype"] == kv_dtype
    floor = result["fp16_rounding_floor"]
    assert result["arms"]["B"]["relative_l2"] <= 1.05 * floor < result["arms"]["A"]["relative_l2"]


def test_real_cache_contents(captured):
    _, done, result = captured
    check(result, {**SCHEMA, "peers": {}})
    assert result["case"]["context"] > 1000
    assert result["case"]["q_heads"] == 9 and result["case"]["kv_heads"] == 3
    assert result["case"]["page_size"] == 64
    assert result["inputs"].startswith("cache file, sha256 ")
    floor = result["fp16_rounding_floor"]
    assert result["arms"]["B"]["relative_l2"] <= 1.05 * floor < result["arms"]["A"]["relative_l2"]
    assert result["arms"]["B"]["output_repeats"] is True
    assert "9 query / 3 KV heads" in done.stdout


def test_the_page_size_changes_no_bit_of_the_fp32_arm(captured, tmp_path):
    _, _, result = captured
    file = support.DATA / "smollm2_layer12_e4m3.safetensors"
    arguments = [f"--cache={file}", "--blocks=1", "--warmups=0", "--page_size=3296", "--seed=5"]
    assert support.call(*arguments, f"--out={tmp_path}").code == 0
    again = support.load(tmp_path)["arms"]["B"]["output_sha256"]
    assert again == result["arms"]["B"]["output_sha256"]


def test_the_terminal_shows_the_numbers(measured):
    _, done, result = measured
    for name, arm in result["arms"].items():
        line = next(row for row in done.stdout.splitlines() if row.startswith(f"{name}  "))
        assert arm["route"] in line
        assert text.microseconds(arm["latency_us"]["median"]) in line
    assert f"{result['arms']['B']['relative_l2']:.4e}" in done.stdout
    assert "FP16 rounding floor" in done.stdout and "byte floor" in done.stdout
    assert "peer" in done.stdout
    *lines, last = done.stdout.splitlines()
    assert max(map(len, lines)) < 200
    assert last.startswith("abba.json, abba.md, abba.png are in /")
    assert done.stderr == ""


def test_the_markdown_has_tables_that_are_tables(measured):
    folder, _, result = measured
    document = (folder / "abba.md").read_text()
    rows = [line for line in document.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    widths = {line.count("|") for line in rows}
    assert widths <= {4, 8, 9}
    for part in (result["command"], "abba.png", "libflashverify.so.4", "## Environment"):
        assert part in document


def test_the_ratio_in_words():
    @dataclasses.dataclass
    class Found:
        ratio: Ratio
        blocks: range = range(25)

    assert "B takes 10.0 % longer" in text.ratio_in_words(Found(Ratio(1.1, (1.05, 1.2))))
    assert "B takes 10.0 % less time" in text.ratio_in_words(Found(Ratio(0.9, (0.85, 0.95))))
    assert "no difference shown" in text.ratio_in_words(Found(Ratio(1.01, (0.99, 1.02))))


def test_the_plot_is_a_picture_with_both_arms_in_it(measured):
    folder, _, _ = measured
    png = (folder / "abba.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n")
    pixels = matplotlib.image.imread(io.BytesIO(png))[..., :3]
    height, width, _ = pixels.shape
    assert height > 600 and width > 1000
    # Text, marks and bars, on a page that is mostly white.
    white = (pixels > 0.99).all(axis=-1).mean()
    assert 0.5 < white < 0.97
    for colour in plot.COLOUR.values():
        target = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        near = (abs(pixels - target) < 0.02).all(axis=-1)
        # In the times above and in the errors below.
        assert near[: height // 2].sum() > 100
        assert near[height // 2 :].sum() > 1000


def test_a_run_that_was_not_measured_has_the_same_fields_with_nothing_in_them(tmp_path):
    done = support.call(*support.SMALL, "--head_dim=72", f"--out={tmp_path}")
    assert done.code == 4
    result = support.load(tmp_path)
    for name in ("schema", "status", "reason", "precision_revision", "native", "environment",
                 "case", "arms", "fp16_rounding_floor", "byte_floor_us", "bandwidth_gb_s",
                 "ratio_b_over_a", "blocks", "reference", "peers"):  # fmt: skip
        assert name in result
    assert result["reason"]
    assert result["case"] == {**parse([*support.SMALL, "--head_dim=72"]).flag_values(),
                              "out": str(tmp_path)}  # fmt: skip
