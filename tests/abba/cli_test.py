"""The program as a person meets it."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

import pytest

from flashverify.abba import experiment, native_files, output
from tests.abba import support


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contxt=5"], "Unknown command line flag 'contxt'"),
        (["--context=-3"], "--context=-3: accepted are 1 to 2147483647"),
        (["--kv_heads=4"], "--q_heads=6 is not a multiple of --kv_heads=4"),
        (["--arm_a=flash"], "--arm_a=flash: known are"),
        (["--arm_a=xqa_half"], "--arm_a=xqa_half decodes one query token"),
        (["--peers=vllm"], "--peers=vllm: known are torch"),
        (["--context=2147483647", "--batch=65536"], "of memory (KV cache 64 PiB"),
        (["--context=2000000000"], "and this machine has"),
        (["--cache=absent.safetensors"], "absent.safetensors: No such file"),
        (["--cache=FILE", "--context=512"], "--context=512 contradicts"),
        (["--cache=FILE", "--head_dim=128"], "which has 64"),
        (["--cache=FILE", "--arm_b=xqa_half"], "q_len is 8"),
        (["--out=/proc/results", "--context=16"], "--out: cannot write to /proc/results"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    captured = str(support.DATA / "smollm2_layer12_e4m3.safetensors")
    done = support.call(*(argument.replace("FILE", captured) for argument in arguments))
    assert done.code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("abba: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_arms_from_a_folder_without_the_package_are_bad_arguments(tmp_path):
    done = support.call(*support.SMALL, f"--arm_b_root={tmp_path}", f"--out={tmp_path}/out")
    assert done.code == 2
    assert f"--arm_b_root={tmp_path}: no flashverify package there" in done.stderr
    assert not (tmp_path / "out").exists()


def test_help_is_no_error():
    done = support.call("--help")
    assert done.code == 0
    assert "--arm_a" in done.stdout and "Exit codes" in done.stdout


def test_the_default_folder_is_the_callers(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    done = support.call(*support.SMALL, "--device=cuda")
    (folder,) = (tmp_path / "flashverify-results").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["abba.json", "abba.md"]
    assert str(folder) in done.stdout


@pytest.mark.skipif(experiment.torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_not_run_and_says_why(tmp_path):
    done = support.call(*support.SMALL, "--device=cuda", f"--out={tmp_path}")
    assert done.code == 4
    assert "no CUDA device" in done.stderr
    result = support.load(tmp_path)
    assert result["status"] == "not run"
    assert result["reason"].startswith("no CUDA device: torch ")
    assert result["arms"] is None and result["blocks"] == []
    assert "**Not run**: no CUDA device" in (tmp_path / "abba.md").read_text()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--cuda_image=compute_70", "--cuda_image=compute_70: the arms run on the cpu"),
        ("--schedule=n16", "schedule: 'n16'; accepted: None, c1024 on cpu"),
    ],
)
def test_what_belongs_to_cuda_is_not_run_on_the_cpu(flag, reason, tmp_path):
    done = support.call(*support.SMALL, "--device=cpu", flag, f"--out={tmp_path}")
    assert done.code == 4
    assert reason in done.stderr
    assert support.load(tmp_path)["status"] == "not run"


def test_an_arm_that_the_library_refuses_is_not_run(tmp_path):
    done = support.call(*support.SMALL, "--head_dim=72", f"--out={tmp_path}")
    assert done.code == 4
    assert "arm A (grouped_half) cannot run: " in done.stderr
    assert "head_dim" in done.stderr
    assert support.load(tmp_path)["status"] == "not run"


def test_quick_end_to_end_from_the_shell(tmp_path):
    process = support.start("--quick", "--context=2048", "--out=out", cwd=tmp_path)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    # No terminal, no progress bar.
    assert stderr == ""
    assert "grouped_half" in stdout and "grouped_fp32" in stdout and "B / A = " in stdout
    assert str(tmp_path / "out") in stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "abba.json",
        "abba.md",
        "abba.png",
    ]
    result = support.load(tmp_path / "out")
    assert result["status"] == "measured"
    assert result["case"]["context"] == 2048 and result["case"]["quick"] is True
    assert len(result["blocks"]) == 5


def run_on_a_terminal(tmp_path, until, number):
    """Starts a long run with stderr on a terminal, and sends a signal once it says ``until``.

    Returns exit code, stdout and what the terminal showed.
    """
    master, slave = pty.openpty()
    # On a terminal without a width the progress bar shows nothing.
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = support.start(
        *support.SMALL, "--blocks=1000000", "--out=out", cwd=tmp_path, stderr=slave
    )
    os.close(slave)
    seen, sent = b"", False
    deadline = time.monotonic() + 200
    try:
        # Read to the end, or the program blocks on a full terminal.
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 1)[0]:
                continue
            try:
                seen += os.read(master, 4096)
            except OSError:  # the program closed its side
                break
            if until in seen and not sent:
                process.send_signal(number)
                sent = True
    finally:
        process.kill()
        stdout, _ = process.communicate()
        os.close(master)
    return process.returncode, stdout, seen.decode()


@pytest.mark.parametrize(
    ("until", "number"),
    [
        (b"comparing native files", signal.SIGTERM),
        (b"ABBA blocks", signal.SIGINT),
        (b"ABBA blocks", signal.SIGTERM),
    ],
)
def test_an_interrupted_run_exits_130_and_leaves_nothing(tmp_path, until, number):
    code, stdout, seen = run_on_a_terminal(tmp_path, until, number)
    assert code == 130
    assert stdout == ""
    assert "abba: interrupted: nothing was written" in seen
    assert "Traceback" not in seen
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_the_earlier_result(tmp_path):
    (tmp_path / "out").mkdir()
    own_files = output.own_files("abba")
    for name in own_files:
        (tmp_path / "out" / name).write_text("earlier")
    code, _, _ = run_on_a_terminal(tmp_path, b"ABBA blocks", signal.SIGINT)
    assert code == 130
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(own_files)
    assert {p.read_text() for p in (tmp_path / "out").iterdir()} == {"earlier"}


def test_a_result_that_cannot_be_written_exits_1(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.Path, "replace", fail)
    done = support.call(*support.SMALL, "--device=cuda", f"--out={tmp_path}/out")
    assert done.code == 1
    assert done.stderr == f"abba: error: cannot write to {tmp_path}/out: No space left on device\n"
    assert not (tmp_path / "out").exists()


def test_signal_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    support.call("--help")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_arm_whose_process_never_answers_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(native_files, "_PROBE_TIMEOUT_SECONDS", 0.01)
    done = support.call(*support.SMALL, f"--out={tmp_path}")
    assert done.code == 4
    assert "arm A: no answer in 0.01 s" in done.stderr
