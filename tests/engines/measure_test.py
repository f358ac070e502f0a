"""The programs that measure beside vLLM, on small cases."""

import json

import torch

from tests.engines.support import run
from tools.vllm_attention import cache_write
from tools.vllm_attention.engine_op import EngineCodes


def truncated(x):
    """The E4M3 codes of bfloat16 numbers, rounded towards zero."""
    codes = x.to(torch.float8_e4m3fn)
    away = codes.float().abs() > x.float().abs()
    return codes.view(torch.uint8) - away.to(torch.uint8)


def test_vllm_truncates_what_flashverify_rounds_to_nearest():
    torch.manual_seed(0)
    key, value = torch.randn(2, 300, 3, 64).to(torch.bfloat16)
    codes = EngineCodes(page_size=128, kv_heads=3, head_dim=64)
    for written, rounded, exact in zip(
        codes(key, value), cache_write.nearest_even(key, value), (key, value), strict=True
    ):
        assert torch.equal(written, truncated(exact))
        assert torch.equal(rounded, exact.to(torch.float8_e4m3fn).view(torch.uint8))
        assert not torch.equal(written, rounded)


def test_vllm_hides_a_nan_that_flashverify_keeps():
    key = torch.full((2, 3, 64), float("nan"), dtype=torch.bfloat16)
    written, _ = EngineCodes(page_size=128, kv_heads=3, head_dim=64)(key, key)
    kept, _ = cache_write.nearest_even(key, key)
    assert written.view(torch.float8_e4m3fn).float().eq(448).all()
    assert kept.view(torch.float8_e4m3fn).float().isnan().all()


def test_side_by_side_compares_the_same_attention(tmp_path):
    flags = ["--contexts=700", "--q_lens=8,1", "--warmups=1", "--blocks=2", "--out=out"]
    module = "tools.vllm_attention.side_by_side"
    status, log = run(tmp_path, "-m", module, *flags, VLLM_PLUGINS="")
    assert status == 0, log
    data = json.loads((tmp_path / "out/side_by_side.json").read_text())
    assert [(one["context"], one["q_len"]) for one in data["results"]] == [(700, 8), (700, 1)]
    for one in data["results"]:
        theirs, ours = one["arms"]["A"], one["arms"]["B"]
        assert ours["same_with_one_thread"] and ours["same_row_by_row"]
        assert ours["row_by_row_max_abs"] == 0
        assert ours["relative_l2"] <= 1.05 * one["rounding_floor"]
        # Other inputs would be off by their whole size.
        assert theirs["relative_l2"] < 5 * one["rounding_floor"]
        assert len(one["blocks"]) == 2 and one["ours_over_theirs"]["median"] > 0
    page = (tmp_path / "out/side_by_side.md").read_text()
    assert "| 700 | 8 |" in page and data["about"]["vllm"] in page
