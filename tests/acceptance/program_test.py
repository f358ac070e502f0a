"""The program against a small server: files, table, exit codes."""

import json
import os
import signal
import time

import pytest

from flashverify.abba.output import own_files
from tests.acceptance.fake_server import FakeServer, serve
from tools.acceptance import run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "result"


def call(fake, out, *arguments):
    with serve(fake) as url:
        return run.main([f"--url={url}", f"--out={out}", "--settle_s=0.3", *arguments])


def test_a_whole_run(out, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = ['"one two"', "[1, 2, 3]", '{"name": "third", "prompt": "x", "max_tokens": 4}']
    prompts.write_text("\n".join(lines) + "\n\n")
    arguments = [f"--prompts={prompts}", "--max_tokens=6", "--repeat=2", "--ignore_eos"]
    assert call(FakeServer(), out, *arguments) == 0
    assert sorted(path.name for path in out.iterdir()) == list(own_files("acceptance"))
    result = json.loads((out / "acceptance.json").read_text())
    assert (result["schema"], result["status"], result["reason"]) == (1, "measured", None)
    assert result["environment"]["model"] == "m"
    assert result["environment"]["server_version"] == "9.9"
    assert result["settings"] == {
        "max_tokens": 6, "temperature": 0.0, "seed": 0, "ignore_eos": True,
    }  # fmt: skip
    names = [request["name"] for request in result["requests"]]
    assert names == ["line 1, 1", "line 2, 1", "third, 1", "line 1, 2", "line 2, 2", "third, 2"]
    assert [request["completion_tokens"] for request in result["requests"]] == [6, 6, 4] * 2
    assert result["requests"][1]["prompt_tokens"] == 3
    total = result["total"]
    assert (total["requests_measured"], total["completion_tokens"]) == (6, 32)
    assert total["tokens_per_second"] == pytest.approx(32 / total["elapsed_s"])
    assert total["speculation"] == {
        "drafts": 12, "draft_tokens": 36, "accepted": 18, "accepted_by_position": [12, 6, 0],
        "rate": 0.5, "mean_length": 2.5, "rate_by_position": [1.0, 0.5, 0.0],
    }  # fmt: skip
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "6 of 6 measured" in printed and "differences of the server's counters" in printed
    assert "| all | 6 of 6 measured |" in (out / "acceptance.md").read_text()


def test_a_request_that_is_not_attributed_shows(out, capsys):
    calls = []

    def on_complete(server, body):
        calls.append(1)
        server.count(body)
        if len(calls) == 2:
            server.count(body)
        return {}

    assert call(FakeServer(on_complete), out) == 4
    result = json.loads((out / "acceptance.json").read_text())
    assert result["status"] == "not run"
    assert result["reason"] == "list: not attributed: 2 requests finished meanwhile"
    statuses = [request["status"] for request in result["requests"]]
    assert statuses == ["measured", "not attributed", "measured", "measured"]
    assert result["total"]["speculation"]["drafts"] == 6
    assert "3 of 4 measured" in capsys.readouterr().out


def test_a_server_that_counts_no_speculation(out):
    fake = FakeServer()
    fake.left_out = ("spec_decode_num_accepted_tokens_total",)
    assert call(fake, out) == 4
    result = json.loads((out / "acceptance.json").read_text())
    assert result["reason"] == "free: the server counts no speculation"
    assert result["total"]["speculation"] is None
    assert result["total"]["tokens_per_second"] > 0
    assert not (out / "acceptance.png").exists()


def test_a_server_that_is_not_there(out):
    with serve(FakeServer()) as url:
        pass
    assert run.main([f"--url={url}", f"--out={out}"]) == 4
    result = json.loads((out / "acceptance.json").read_text())
    assert (result["status"], result["requests"]) == ("not run", [])
    assert "refused" in result["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--url: missing"),
        (["--url=http://h", "extra"], "unexpected argument 'extra'"),
        (["--url=host:8000"], "--url: 'host:8000' is no address of a server"),
        (["--url=http://h/?key=1"], "is no address of a server: expected http(s)://host:port"),
        (["--url=http://a..b"], "is no address of a server"),
        (["--url=http://h", "--max_tokens=0"], "--max_tokens=0: accepted are 1 to 2147483647"),
        (["--url=http://h", "--timeout_s=0"], "--timeout_s=0.0: accepted are 0.001 to 1000000"),
        (["--url=http://h", "--out=~nobody.of.this.name/x"], "home directory"),
        (["--url=http://h", "--nonsense"], "nonsense"),
        (["--url=http://h", "--prompts=absent.txt"], "cannot read"),
        (["--url=http://h", "--prompts=empty.txt"], "holds no prompt"),
        (["--url=http://h", "--prompts=bad.jsonl"], "bad.jsonl:2: expected a prompt"),
        (["--url=http://h", "--prompts=nan.jsonl"], "nan.jsonl:1: not JSON: NaN"),
        (["--url=http://h", "--prompts=."], "cannot read"),
        (["--url=http://h", "--out=empty.txt/x"], "--out: cannot write"),
        (["--url=http://h", "--out=/proc/results"], "--out: cannot write to /proc/results"),
    ],
)
def test_bad_arguments(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "nan.jsonl").write_text('{"prompt": "a", "temperature": NaN}\n')
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"max_tokens": 3}\n')
    assert run.main(arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith("acceptance: error: ") and words in told.err
    assert told.err.count("\n") == 1 and told.out == ""
    assert not (tmp_path / "flashverify-results").exists()


def test_help_names_every_flag(capsys):
    assert run.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for flag in ("--url", "--prompts", "--max_tokens", "--repeat", "--prefix", "--settle_s"):
        assert flag in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_nothing(out, number, capsys):
    before = signal.getsignal(number)

    def on_complete(_server, _body):
        os.kill(os.getpid(), number)
        # The answer would come: the program does not wait for it.
        time.sleep(0.5)
        return {}

    assert call(FakeServer(on_complete), out) == 130
    told = capsys.readouterr()
    assert told.err == "acceptance: interrupted: nothing was written\n" and told.out == ""
    assert not out.exists() and signal.getsignal(number) == before


def test_a_result_that_cannot_be_written(out, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    assert call(FakeServer(), out) == 1
    told = capsys.readouterr().err
    assert told == f"acceptance: error: cannot write to {out}: No space left on device\n"
    assert not out.exists()


def test_names_of_any_letters_reach_every_file(out, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    names = ["$x", "$\\frac{$", "\ud800", "two\nlines", "日本", "x" * 500]
    lines = [json.dumps({"prompt": "a", "name": name}) for name in names]
    # A line of Unicode's own within a text is no line of the file.
    lines.append('"one\u2028two"')
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert call(FakeServer(), out, f"--prompts={prompts}", "--max_tokens=1") == 0
    result = json.loads((out / "acceptance.json").read_text())
    assert [request["name"] for request in result["requests"]] == [*names, "line 7"]
    assert sorted(path.name for path in out.iterdir()) == list(own_files("acceptance"))
