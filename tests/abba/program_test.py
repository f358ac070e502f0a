"""A program from arguments to exit code: every way to end, with a run that measures nothing."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashverify.abba import program
from flashverify.abba.command_line import Flags
from flashverify.abba.outcome import ExitCode, NotRunError, UsageError
from tests.abba import support

ENDING = program.Ending(found={"schema": 1}, page="# Trial\n", summary="it went well")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@dataclasses.dataclass(frozen=True)
class Options:
    out: Path | None
    caller_folder: Path


def parse(arguments):
    found = Flags("trial", "trial: measures nothing.\n").parse(arguments)
    return Options(found.path("out"), found.caller_folder)


def call(carry_out, *arguments):
    return program.main("trial", arguments, parse, carry_out)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "some" / "result"


def test_a_run_that_is_done(out, capsys):
    assert call(lambda _options: ENDING, f"--out={out}") == 0
    told = capsys.readouterr()
    assert told.out == f"it went well\n\ntrial.json, trial.md are in {out}\n" and told.err == ""
    assert (out / "trial.json").read_text() == '{\n "schema": 1\n}\n'
    assert (out / "trial.md").read_text() == "# Trial\n"
    picture = dataclasses.replace(ENDING, picture=b"png", code=ExitCode.ARM_NOT_RUN, complaint="no")
    assert call(lambda _options: picture, f"--out={out}") == 4
    told = capsys.readouterr()
    assert "trial.json, trial.md, trial.png are in" in told.out and told.err == "trial: no\n"
    assert (out / "trial.png").read_bytes() == b"png"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("--x: no"), 2, "trial: error: --x: no\n"),
        (NotRunError("no device"), 4, "trial: not run: no device\n"),
        (KeyboardInterrupt(), 130, "trial: interrupted: nothing was written\n"),
    ],
)
def test_a_run_that_ends_early_leaves_nothing(out, capsys, error, code, words):
    def fail(_options):
        assert out.is_dir()
        raise error

    assert call(fail, f"--out={out}") == code
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", words)
    assert not out.parent.exists()


def test_a_fault_of_the_program_is_not_hidden(out):
    def fail(_options):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(fail, f"--out={out}")
    assert not out.parent.exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_once(out, capsys, number):
    """What cleans up is not interrupted by a second one, and the handlers come back."""
    before = signal.getsignal(number)
    cleaned = []

    def carry_out(_options):
        try:
            os.kill(os.getpid(), number)
            raise AssertionError("nothing happened")
        finally:
            for again in SIGNALS:
                os.kill(os.getpid(), again)
            cleaned.append(True)

    assert call(carry_out, f"--out={out}") == 130
    assert capsys.readouterr().err == "trial: interrupted: nothing was written\n"
    assert cleaned and not out.parent.exists() and signal.getsignal(number) == before


def test_a_run_under_nohup_outlives_its_terminal(out):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = call(lambda _options: os.kill(os.getpid(), signal.SIGHUP) or ENDING, f"--out={out}")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0 and (out / "trial.json").exists()


def test_a_signal_does_not_halve_a_result(out, monkeypatch):
    replace = Path.replace

    def interrupted(path, target):
        os.kill(os.getpid(), signal.SIGINT)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    assert call(lambda _options: ENDING, f"--out={out}") == 0
    assert sorted(path.name for path in out.iterdir()) == ["trial.json", "trial.md"]


def shell(out, stdout, **variables):
    """The program in a process of its own, with what no encoding has in its words."""
    script = (
        "import dataclasses, sys; from tests.abba import program_test as test; "
        "odd = dataclasses.replace(test.ENDING, page='\\udcff', summary='\\udcff \\u00e9'); "
        "sys.exit(test.call(lambda options: odd, *sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", script, f"--out={out}"],
        env={**support.environment(), **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


def test_a_reader_that_went_away_is_no_error(out):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = shell(out, writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(path.name for path in out.iterdir()) == ["trial.json", "trial.md"]


def test_letters_that_the_terminal_lacks_are_told_by_number(out):
    done = shell(out, subprocess.PIPE, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"\\udcff \\xe9\n")
    assert (out / "trial.md").read_bytes() == b"\\udcff"
