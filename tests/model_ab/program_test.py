"""The program with servers that stand for vLLM: every way that a check can end."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from flashverify.abba import probe
from flashverify.abba.output import own_files
from tests.acceptance.fake_server import FakeServer, serve
from tests.acceptance.raw_server import HEAD, RawServer, once
from tests.model_ab import fake_vllm
from tools.model_ab import checks, processes, run

WORDS = "the quick brown fox jumps over the lazy dog and runs away from it all day long " * 60


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Two native files of one name with different contents, and their digests."""
    source = next(
        Path(file["path"]) for file in probe.mapped_native_files() if "libc.so" in file["name"]
    )
    paths = []
    for folder in ("first", "second"):
        path = tmp_path_factory.mktemp(folder) / "libother.so"
        # Bytes after the end of an ELF file are no part of what is loaded.
        path.write_bytes(source.read_bytes() + folder.encode())
        paths.append(str(path))
    return paths


@pytest.fixture
def program(tmp_path, monkeypatch, libraries):
    """Runs the program over a fake environment; returns exit code and result."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    # What stands for the environment's own packages; this process's are not lent to it.
    packages = ":".join(path for path in sys.path if path)
    monkeypatch.setenv("PYTHONPATH", "of-this-process-alone")
    (tmp_path / "text.txt").write_text(WORDS)

    def call(*arguments, **by_route):
        digest = hashlib.sha256(Path(libraries[0]).read_bytes()).hexdigest()
        info = {"version": "4", "library_sha256": digest, "extension_sha256": digest}
        settings = {route: {"load": [libraries[0]], **own} for route, own in by_route.items()}
        for route in ("grouped_half", "grouped_fp32", "none"):
            settings.setdefault(route, {"load": [libraries[0]]})
        settings["info"] = by_route.get("info", info)
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        python = tmp_path / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        python.write_text(
            '#!/bin/sh\n[ -z "$PYTHONPATH" ] || { echo "Error: lent packages"; exit 1; }\n'
            f'export PYTHONPATH="{packages}"\nexec "{sys.executable}" "{fake_vllm.__file__}" '
            f'"{tmp_path / "settings.json"}" "$@"\n'
        )
        python.chmod(0o755)
        (tmp_path / "folder").mkdir(exist_ok=True)
        out = tmp_path / "out"
        code = run.main(
            [
                f"--vllm_python={python}", "--model=folder", f"--out={out}", "--context=600",
                "--max_tokens=8", "--blocks=2", "--start_timeout_s=60", "--settle_s=1",
                *arguments,
            ]
        )  # fmt: skip
        written = out / "model_ab.json"
        return code, json.loads(written.read_text()) if written.exists() else None

    call.out = tmp_path / "out"
    return call


def statuses(result):
    return {name: check["status"] for name, check in result["checks"].items()}


def test_everything_measured(program, capsys):
    half, fp32 = {"noise": 0.02}, {"noise": 0.01}
    code, result = program(
        "--texts=text=text.txt", "--texts=repetitive", "--references=float32",
        grouped_half=half, grouped_fp32=fp32,
    )  # fmt: skip
    assert (code, result["status"]) == (0, "measured"), result["checks"]
    assert statuses(result) == dict.fromkeys(checks.NAMES, "measured")
    found = {name: check["found"] for name, check in result["checks"].items()}
    assert found["routes"] == {"A": ["grouped_half"], "B": ["grouped_fp32"]}
    native = found["native_digests"]
    assert native["identical"] and "libother.so" in {file["name"] for file in native["files"]}
    assert not any("/" in file["name"] for file in native["files"])
    assert found["outputs"]["text"] == {
        "same_tokens": True, "tokens": 8, "first_difference": None,
        "max_logprob_gap_before_it": pytest.approx(0.01), "repeats": {"A": True, "B": True},
    }  # fmt: skip
    accepted = found["acceptance"]["text"]["A"]
    assert accepted == {
        "drafts": 8, "draft_tokens": 24, "accepted": 12, "accepted_by_position": [8, 4, 0],
        "rate": 0.5, "mean_length": 2.5, "rate_by_position": [1.0, 0.5, 0.0],
        "source": ["counters"], "same_in_every_request": True,
    }  # fmt: skip
    order = [(r["arm"], r["block"]) for r in result["requests"] if r["text"] == "text"]
    assert order == [("A", None), ("B", None)] + [(arm, b) for b in (0, 1) for arm in "ABBA"]
    distances = found["logprob_distance"]["text"]
    assert distances["tokens"] == 598
    reference = distances["references"]["float32"]
    assert reference["a"]["rms"] == pytest.approx(0.02 / 2**0.5, rel=0.02)
    assert reference["a"]["max_abs"] == pytest.approx(0.02, rel=0.01)
    assert reference["b"]["rms"] == pytest.approx(reference["a"]["rms"] / 2, rel=1e-9)
    assert distances["between_arms"]["rms"] == pytest.approx(reference["b"]["rms"], rel=1e-9)
    assert reference["ratio_b_over_a"]["median"] == pytest.approx(0.5)
    assert len(reference["rms_by_block"]["A"]) == 2
    assert sorted(path.name for path in program.out.iterdir()) == list(own_files("model_ab"))
    printed = capsys.readouterr().out
    assert "the same tokens in 2 of 2 texts" in printed
    assert "text: B / A = 0.5000, 95 % interval [0.5000, 0.5000] from float32" in printed
    assert "![latency, distance" in (program.out / "model_ab.md").read_text()


def test_arms_without_any_difference(program):
    """Zero is a result, and no ratio is made of it."""
    code, result = program("--texts=repetitive")
    assert code == 0
    distances = result["checks"]["logprob_distance"]["found"]["repetitive"]
    assert distances["between_arms"] == {
        "mean_abs": 0.0, "rms": 0.0, "max_abs": 0.0, "identical_share": 1.0,
    }  # fmt: skip
    assert distances["references"]["float32"]["ratio_b_over_a"] is None


def test_outputs_that_part(program):
    _, result = program("--texts=repetitive", "--references=", grouped_half={"token": 9})
    outputs = result["checks"]["outputs"]["found"]["repetitive"]
    assert (outputs["same_tokens"], outputs["first_difference"]) == (False, 0)
    assert outputs["repeats"] == {"A": True, "B": True}
    distance = result["checks"]["logprob_distance"]
    assert (distance["status"], distance["reason"]) == ("not run", "no reference was asked for")
    assert distance["found"]["repetitive"]["between_arms"]["rms"] == 0


def test_an_arm_that_does_not_start_is_no_result_of_a_model(program, capsys):
    code, result = program("--texts=repetitive", grouped_fp32={"exit": 3})
    assert (code, result["status"]) == (4, "failed")
    reason = result["checks"]["start_up"]["reason"]
    assert reason == "B did not start: exit status 3: ValueError: no memory for the cache"
    others = {name: check for name, check in result["checks"].items() if name != "start_up"}
    for check in others.values():
        assert check == {"status": "not run", "reason": f"start_up failed: {reason}", "found": None}
    assert result["requests"] == [] and "no memory for the cache" in capsys.readouterr().out


def test_a_reference_that_does_not_start(program):
    code, result = program("--texts=repetitive", none={"exit": 1})
    assert (code, result["status"]) == (4, "not run")
    distance = result["checks"]["logprob_distance"]
    assert distance["status"] == "not run"
    assert "reference float32: float32 did not start" in distance["reason"]
    assert set(statuses(result).values()) == {"measured", "not run"}
    assert distance["found"]["repetitive"]["references"] == {}


def test_native_files_that_differ_end_the_run(program, libraries):
    code, result = program("--texts=repetitive", grouped_half={"load": libraries})
    assert code == 3
    native = result["checks"]["native_digests"]
    assert (native["status"], native["reason"]) == (
        "failed", "the arms' native files differ: libother.so",
    )  # fmt: skip
    assert native["found"]["identical"] is False
    assert statuses(result)["latency"] == "not run" and result["requests"] == []


def test_a_server_that_runs_another_library_than_its_python(program):
    told = {"library_sha256": "0" * 64, "extension_sha256": "0" * 64}
    code, result = program("--texts=repetitive", info=told)
    assert code == 4
    native = result["checks"]["native_digests"]
    assert native["status"] == "failed" and "which its server has not mapped" in native["reason"]


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        ("grouped_fp32", "grouped_half was asked for, ['grouped_fp32'] runs"),
        ("none", "no line of its log says that flashverify is in control"),
    ],
)
def test_a_route_that_is_not_the_arms(program, claimed, reason):
    code, result = program("--texts=repetitive", grouped_half={"logs": claimed})
    assert code == 4
    routes = result["checks"]["routes"]
    assert (routes["status"], routes["reason"]) == ("failed", f"arm A: {reason}")
    assert statuses(result)["outputs"] == "not run"


def test_a_route_that_did_not_run(program):
    code, result = program("--texts=repetitive", grouped_fp32={"ran": "scalar_fp32"})
    assert code == 4
    routes = result["checks"]["routes"]
    assert routes["status"] == "failed"
    assert routes["reason"] == (
        "arm B: grouped_fp32 was asked for, ['grouped_fp32', 'scalar_fp32'] runs"
    )


def test_a_terminated_run_ends_its_servers_and_writes_nothing(program, monkeypatch, capsys):
    servers = []

    def terminate(server, *_arguments):
        servers.append(server.pid)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(processes.StartedServer, "wait", terminate)
    code, result = program("--texts=repetitive")
    assert (code, result) == (130, None)
    assert "interrupted: nothing was written" in capsys.readouterr().err
    (pid,) = servers
    assert not Path(f"/proc/{pid}").exists() and not program.out.exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_signal_does_not_keep_the_servers_alive(program, monkeypatch, capsys):
    """Somebody presses Ctrl-C again while the servers are being ended."""
    servers, stop = [], processes.StartedServer.stop

    def interrupt(server, *_arguments):
        servers.append(server.pid)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted_stop(server):
        os.kill(os.getpid(), signal.SIGINT)
        stop(server)

    monkeypatch.setattr(processes.StartedServer, "wait", interrupt)
    monkeypatch.setattr(processes.StartedServer, "stop", interrupted_stop)
    assert program("--texts=repetitive") == (130, None)
    assert capsys.readouterr().err.endswith("model_ab: interrupted: nothing was written\n")
    (pid,) = servers
    assert not Path(f"/proc/{pid}").exists() and not program.out.exists()


def by_address(program, a, b, *arguments):
    """The program over two servers, with one text and no reference."""
    return program(
        f"--arm_a_url={a}", f"--arm_b_url={b}", "--references=", "--texts=repetitive", *arguments
    )


@pytest.mark.filterwarnings("error")
def test_servers_whose_every_completion_fails(program, capsys):
    """The figure then has nothing to show, and is drawn all the same."""
    fakes = [FakeServer(lambda *_: {"status": 500, "words": "out of pages"}) for _ in "AB"]
    with serve(fakes[0]) as a, serve(fakes[1]) as b:
        code, result = by_address(program, a, b, "--blocks=1")
    assert (code, result["status"]) == (4, "failed")
    assert statuses(result)["latency"] == "failed" and statuses(result)["outputs"] == "not run"
    assert {request["status"] for request in result["requests"]} == {"failed"}
    assert "HTTP 500" in result["requests"][0]["reason"]
    assert (program.out / "model_ab.png").exists()
    told = capsys.readouterr().err
    assert told.startswith("model_ab: latency failed: arm A, text repetitive: failed: http://")
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HEAD + b"\r\n<html>Sign in</html>", "/v1/models: not JSON: "),
        (b"HTTP/1.1 500 No\r\n\r\nout of memory", "/v1/models: HTTP 500: out of memory"),
        (HEAD + b'Content-Length: 99\r\n\r\n{"data"', "/v1/models: IncompleteRead"),
    ],
    ids=["html", "error", "truncated"],
)
def test_an_address_that_is_no_vllm(program, answer, reason):
    with serve(FakeServer()) as a, RawServer(once(answer)) as raw:
        code, result = by_address(program, a, raw.url)
    assert (code, result["status"]) == (4, "failed")
    start_up = result["checks"]["start_up"]
    assert start_up["status"] == "failed" and start_up["reason"].startswith(raw.url + reason)


@pytest.mark.parametrize("logprobs", [5, "x", {"a": 1}, [None] * 3, [10**400] * 599])
def test_log_probabilities_of_another_shape(program, logprobs):
    def odd(server, body):
        server.count(body)
        text = {"text": "", "token_ids": [1] * body["max_tokens"]}
        return {"choices": [{**text, "prompt_logprobs": logprobs}]}

    with serve(FakeServer(odd)) as a, serve(FakeServer(odd)) as b:
        code, result = by_address(program, a, b, "--blocks=1")
    assert code == 4
    distance = result["checks"]["logprob_distance"]
    assert distance["status"] == "failed" and "prompt_logprobs" in distance["reason"]


def test_more_texts_than_kinds_of_line_are_drawn(program):
    texts = [f"--texts=$t{number}=text.txt" for number in range(5)]
    code, _ = program("--blocks=1", "--context=40", "--max_tokens=2", *texts)
    assert code == 0 and (program.out / "model_ab.png").exists()


def test_servers_by_address(program):
    def tokens(server, body):
        server.count(body)
        entries = [{str(token): {"logprob": -1.0}} for token in body["prompt"]]
        text = {"text": "", "finish_reason": "length", "token_ids": [1] * body["max_tokens"]}
        return {"choices": [{**text, "prompt_logprobs": [None, *entries[1:]]}]}

    with serve(FakeServer(tokens)) as a, serve(FakeServer(tokens)) as b:
        code, result = by_address(program, a, b)
    assert code == 4
    found = statuses(result)
    for name in ("routes", "native_digests", "logprob_distance"):
        assert found.pop(name) == "not run"
    assert set(found.values()) == {"measured"}
    assert "--arm_a_pid" in result["checks"]["native_digests"]["reason"]


def test_a_request_that_fails_is_no_latency(program):
    def broken(server, body):
        server.count(body)
        return {"status": 500} if len(server.bodies) > 3 else {}

    with serve(FakeServer(broken)) as a, serve(FakeServer()) as b:
        code, result = by_address(program, a, b)
    assert code == 4
    found = statuses(result)
    assert found["latency"] == "failed" and found["acceptance"] == "not run"
    assert "arm A, text repetitive: failed" in result["checks"]["latency"]["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vllm_python="], "--vllm_python: missing"),
        (["--vllm_python=absent/python"], "absent/python: no such file"),
        (["--vllm_python=."], ": no such file; expected a Python with vLLM"),
        (["--vllm_python=text.txt"], "text.txt: not executable"),
        (["--model=absent"], "absent: no such folder"),
        (["--model=text.txt"], "text.txt: no such folder"),
        (["--server_args='--a"], "--server_args='--a: No closing quotation"),
        (["--arm_a_pid=5"], "--arm_a_pid=5: goes with --arm_a_url, which is missing"),
        (["--arm_b_url=host:8000"], "--arm_b_url: 'host:8000' is no address"),
        (["--timeout_s=nan"], "--timeout_s=nan: accepted are 0.001 to 1000000"),
        (["--start_timeout_s=0"], "--start_timeout_s=0.0: accepted are"),
        (["--out=/proc/results"], "--out: cannot write to /proc/results"),
        (["--texts=other"], "--texts=other: expected name=file"),
        (["--texts=x=absent.txt"], "--texts=x=absent.txt:"),
        (["--texts=repetitive", "--texts=repetitive"], "'repetitive' twice"),
        (["--references=float64"], "--references=float64: known are float32, bfloat16"),
        (["--arm_a=fast"], "--arm_a=fast: known are grouped_fp32"),
        (["--context=8"], "--max_tokens=8: accepted are 1 to 7"),
        (["more"], "unexpected argument 'more'"),
    ],
)
def test_bad_arguments(program, arguments, words, monkeypatch, capsys):
    def start(*_arguments):
        raise AssertionError("something was started")

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    code, result = program(*arguments)
    assert (code, result) == (2, None)
    told = capsys.readouterr()
    assert told.err.startswith("model_ab: error: ") and words in told.err
    assert told.err.count("\n") == 1 and told.out == ""
    assert not program.out.exists()


def test_a_text_that_is_too_short(program, capsys):
    code, _ = program("--texts=text=text.txt", "--context=5000")
    assert code == 2
    assert "text has 1020 tokens; --context=5000 needs more" in capsys.readouterr().err
