import dataclasses

import pytest

from flashverify.abba.case import Case
from flashverify.abba.command_line import HelpRequested
from flashverify.abba.options import parse
from flashverify.abba.outcome import UsageError


def test_defaults_are_the_contracts():
    options = parse([])
    assert options.case == Case()
    assert options.flag_values() == {
        "device": "auto",
        "context": 262144,
        "q_len": 8,
        "q_heads": 6,
        "kv_heads": 1,
        "head_dim": 256,
        "page_size": 3296,
        "batch": 1,
        "kv_dtype": "e4m3",
        "arm_a": "grouped_half",
        "arm_b": "grouped_fp32",
        "arm_a_root": None,
        "arm_b_root": None,
        "warmups": 20,
        "blocks": 25,
        "seed": 0,
        "peers": [],
        "cuda_image": None,
        "schedule": None,
        "cache": None,
        "out": None,
        "quick": False,
    }


def test_quick_is_smaller_and_gives_way_to_what_is_given():
    quick = parse(["--quick"])
    assert (quick.case.context, quick.warmups, quick.blocks) == (16384, 3, 5)
    assert quick.quick
    mixed = parse(["--quick", "--context=262144", "--blocks=7"])
    assert (mixed.case.context, mixed.warmups, mixed.blocks) == (262144, 3, 7)


def test_flags_may_be_given_with_a_space_and_the_command_is_kept():
    options = parse(["--context", "512", "--out", "a folder"])
    assert options.case.context == 512
    assert options.command == "abba --context 512 --out 'a folder'"


def test_paths_are_the_callers(monkeypatch, tmp_path):
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert parse(["--out=x/../y"]).out == tmp_path / "y"
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", "/somewhere/else")
    options = parse(["--out=results", "--cache=/abs/file"])
    assert str(options.out) == "/somewhere/else/results"
    assert str(options.cache) == "/abs/file"
    assert str(options.caller_folder) == "/somewhere/else"


def test_peers_are_a_list_without_repeats():
    assert parse(["--peers=torch,torch,"]).peers == ("torch",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contxt=5"], "Unknown command line flag 'contxt'"),
        (["--context=many"], "--context=many"),
        (["--context=1e6"], "--context=1e6"),
        (["--context=1.5"], "--context=1.5"),
        (["--context="], "--context="),
        (["--context"], "context"),
        (["--context=-1"], "--context=-1: accepted are 1 to 2147483647"),
        (["--q_len=9999"], "--q_len=9999: accepted are 1 to 64"),
        (["--q_heads=5", "--kv_heads=2"], "--q_heads=5 is not a multiple of --kv_heads=2"),
        (["--device=tpu"], "--device=tpu: known are auto, cpu, cuda"),
        (["--arm_a=fast"], "--arm_a=fast: known are grouped_fp32, scalar_fp32"),
        (["--arm_b="], "--arm_b=: known are"),
        (["--kv_dtype=fp8"], "--kv_dtype=fp8: known are e4m3, e5m2, fp16, bf16"),
        (["--arm_a=xqa_half"], "--arm_a=xqa_half decodes one query token per request"),
        (["--arm_b=xqa_half", "--q_len=2"], "--arm_b=xqa_half"),
        (["--warmups=-1"], "--warmups=-1: accepted are 0 to"),
        (["--blocks=0"], "--blocks=0: accepted are 1 to"),
        (["--seed=-5"], "--seed=-5: accepted are 0 to"),
        (["--peers=flash"], "--peers=flash: known are torch"),
        (["--quick=perhaps"], "quick"),
        (["run"], "unexpected argument 'run'"),
        (["--", "--context=5"], "unexpected argument '--context=5'"),
    ],
)
def test_what_cannot_be_meant_is_one_message(arguments, message):
    with pytest.raises(UsageError) as refusal:
        parse(arguments)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_xqa_takes_one_query_token():
    options = parse(["--arm_a=xqa_half", "--q_len=1"])
    assert options.arm_a == "xqa_half"


def test_help_names_every_flag():
    with pytest.raises(HelpRequested) as shown:
        parse(["--help"])
    for name in parse([]).flag_values():
        assert f"--{name}" in str(shown.value) or f"--[no]{name}" in str(shown.value)


def test_a_cache_file_decides_the_case_and_given_flags_must_agree():
    in_file = Case(context=50, q_len=2, q_heads=9, kv_heads=3, head_dim=64, page_size=16, batch=1)
    options = parse(["--cache=f", "--page_size=16", "--kv_heads=3"])
    assert options.with_file_case(in_file).case == in_file
    with pytest.raises(UsageError, match=r"--kv_heads=3 contradicts .*f, which has 1"):
        options.with_file_case(dataclasses.replace(in_file, kv_heads=1))
    with pytest.raises(UsageError, match=r"--batch=2 contradicts"):
        parse(["--cache=f", "--batch=2"]).with_file_case(in_file)
    with pytest.raises(UsageError, match=r"--kv_dtype=e5m2 contradicts"):
        parse(["--cache=f", "--kv_dtype=e5m2"]).with_file_case(in_file)
    with pytest.raises(UsageError, match=r"--arm_a=xqa_half decodes one"):
        parse(["--cache=f", "--arm_a=xqa_half"]).with_file_case(in_file)


@pytest.mark.parametrize(
    "flag", ["--schedule=n3", "--schedule=n0", "--schedule=16", "--cuda_image=bogus"]
)
def test_names_that_are_none_are_bad_arguments(flag):
    with pytest.raises(UsageError, match="known are"):
        parse([flag])
    assert parse(["--schedule=n16", "--cuda_image=sm_90a"]).schedule == "n16"
