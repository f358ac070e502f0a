"""The program on contexts so short that only its own work shows."""

import contextlib
import io
import json

import pytest

import flashverify as fv
from tools.benchmark_cpu import main
from tools.benchmark_cpu.sections import EAGER, all_sections

SHORT = ("--shrink=8192", "--rounds=2", "--warmups=0")


def call(*arguments):
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main.main(arguments)
    return code, stdout.getvalue(), stderr.getvalue()


def load(folder):
    def refuse(text):
        raise ValueError(f"{text} is not JSON")

    return json.loads((folder / "benchmark_cpu.json").read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all")
    code, stdout, stderr = call(*SHORT, "--quick", f"--out={folder}")
    assert code == 0, stderr
    return folder, stdout, load(folder)


def test_every_section_and_subject_is_measured(everything):
    _, _, found = everything
    expected = all_sections()
    assert list(found["sections"]) == list(expected)
    for name, section in expected.items():
        subjects = found["sections"][name]["subjects"]
        assert list(subjects) == [subject.name for subject in section.subjects]
        for subject in section.subjects:
            one = subjects[subject.name]
            assert one["latency_us"]["median"] > 0
            if subject.kind == EAGER:
                assert one["route"] is None
    subjects = found["sections"]["64k"]["subjects"]
    assert {one["kv_dtype"] for one in subjects.values()} == {"e4m3", "e5m2", "fp16", "bf16"}
    assert subjects["grouped_half"]["route"] == "grouped_half"
    assert found["sections"]["4k"]["subjects"]["scalar_fp32"]["route"] == "scalar_fp32"
    assert {f"grouped_fp32, {isa}" for isa in fv.available_cpu_isas()} <= set(
        found["sections"]["16k"]["subjects"]
    )


def test_the_record_is_complete(everything):
    _, _, found = everything
    info = fv.native_info()
    assert found["schema"] == 1
    assert found["command"].startswith("benchmark_cpu --shrink=8192 --rounds=2")
    # What is given wins over --quick.
    assert found["flags"]["rounds"] == 2 and found["flags"]["quick"] is True
    assert found["native"]["library_sha256"] == info["library_sha256"]
    assert found["native"]["extension_sha256"] == info["extension_sha256"]
    assert found["environment"]["threads"] == found["environment"]["torch_threads"]
    subjects = sum(len(section["subjects"]) for section in found["sections"].values())
    assert len(found["slots"]) == 2 * subjects
    first, second = found["slots"][:subjects], found["slots"][subjects:]
    order = [(slot["section"], slot["subject"]) for slot in first]
    assert [(slot["section"], slot["subject"]) for slot in reversed(second)] == order
    assert len(found["rates"]) == 2 * (len(found["sections"]) - 1)
    assert all(sample["matmul_gflop_s"] > 0 < sample["read_gb_s"] for sample in found["rates"])


def test_targets_are_measured_and_not_judged_on_short_contexts(everything):
    _, stdout, found = everything
    assert {row["met"] for row in found["targets"]} == {None}
    unmeasured = [row["name"] for row in found["targets"] if row["measured"] is None]
    allowed = {"256k: growth of the resident set in a call"}
    if fv.get_num_threads() == 1:
        allowed.add("64k: 1 thread over all threads")
    assert set(unmeasured) <= allowed
    assert "No target was judged." in stdout


def test_the_page_names_every_target_and_the_conditions(everything):
    folder, _, found = everything
    page = (folder / "benchmark_cpu.md").read_text()
    for row in found["targets"]:
        assert f"| {row['name']} |" in page
    for text in (found["environment"]["device"], found["native"]["library_sha256"]):
        assert text in page
    assert f"`{found['command']}`" in page


def test_selected_cases_alone_are_measured_and_judged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, stdout, _ = call("--cases=tiny", "--rounds=1", "--warmups=0")
    assert code == 0
    (folder,) = (tmp_path / "flashverify-results").iterdir()
    assert folder.name.startswith("benchmark_cpu-")
    found = load(folder)
    assert list(found["sections"]) == ["tiny"]
    judged = [row["name"] for row in found["targets"] if row["met"] is not None]
    assert judged == ["tiny: paged_attention from Python", "tiny: append_kv from Python"]
    assert "of 2 targets reached; 15 not measured or not judged." in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--casse=4k"], "Unknown command line flag 'casse'"),
        (["--cases=5k"], "--cases=5k: known are 4k, 16k"),
        (["--cases="], "--cases is empty"),
        (["--rounds=0"], "rounds"),
        (["--shrink=0"], "shrink"),
        (["4k"], "unexpected argument '4k'"),
        (["--out=/proc/results", "--cases=tiny"], "--out: cannot write to /proc/results"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = call(*arguments)
    assert code == 2
    assert stdout == ""
    assert stderr.startswith("benchmark_cpu: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main.experiment, "available_memory_bytes", lambda: 1 << 20)
    code, _, stderr = call()
    assert code == 2
    assert "of memory, and this machine has 1.0 MiB to give" in stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def interrupt(_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.experiment, "run", interrupt)
    code, _, stderr = call("--cases=tiny", f"--out={tmp_path}/a/b")
    assert code == 130
    assert "interrupted" in stderr
    assert list(tmp_path.iterdir()) == []


def test_help_is_no_error():
    code, stdout, _ = call("--help")
    assert code == 0
    assert "--cases" in stdout and "Exit codes" in stdout
