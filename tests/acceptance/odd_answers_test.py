"""Answers and arguments that nobody expects: an error in words, never a traceback."""

import json

import pytest

from flashverify.abba.outcome import UsageError
from tests.acceptance.fake_server import FakeServer, serve
from tests.acceptance.raw_server import HEAD, RawServer, once
from tools.acceptance import options, prompts, run
from tools.acceptance.exchange import ServerError
from tools.acceptance.measure import measure
from tools.acceptance.prompts import PromptCase
from tools.acceptance.server import Server

USAGE = {"prompt_tokens": 1, "completion_tokens": 1}


@pytest.mark.parametrize(
    "answer",
    [
        {"usage": {**USAGE, "completion_tokens": float("inf")}},
        {"usage": {**USAGE, "completion_tokens": 10**400}},
        {"usage": {**USAGE, "completion_tokens": -1}},
        {"usage": 5},
        {"choices": ["x"]},
        {"choices": [{"text": "x", "logprobs": "x"}]},
        {"choices": []},
        {"metrics": {"time_to_first_token_ms": float("nan")}},
        {"choices": [{"text": "x", "logprobs": {"token_logprobs": [float("nan")]}}]},
        {"choices": [{"text": "x", "token_ids": [float("inf")]}]},
    ],
    ids=lambda answer: str(answer)[:60],
)
def test_an_odd_answer_is_the_requests_failure(answer):
    with serve(FakeServer(lambda *_: answer)) as url:
        server = Server(url, timeout_s=5.0)
        with pytest.raises(ServerError, match="the answer has no choice with text and usage"):
            server.complete("m", "a", max_tokens=1)


@pytest.mark.parametrize(
    "flag",
    ["--temperature=nan", "--timeout_s=inf", "--timeout_s=1e300", "--settle_s=nan",
     "--url=http://[::1", "--url=http://127.0.0.1:99999", "--timeout_s=0"],
)  # fmt: skip
def test_odd_arguments_are_refused(flag, tmp_path, capsys):
    with pytest.raises(UsageError, match=flag.split("=")[0].strip("-")):
        options.parse(["--url=http://127.0.0.1:1", flag])
    assert run.main(["--url=http://127.0.0.1:1", flag, f"--out={tmp_path / 'out'}"]) == 2
    assert flag.split("=")[0].strip("-") in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "model": "b"}',
        '{"prompt": "a", "stream": true}',
        '{"prompt": "a", "temperature": Infinity}',
        '{"prompt": [1, true]}',
        '{"prompt": ""}',
        "[" * 50_000,
    ],
)
def test_odd_prompts_are_refused(line, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UsageError, match="jsonl:1: "):
        prompts.read(file)


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ('generation_tokens_total{engine="0"} 1e308', "not run", "where a count belongs"),
        ('num_requests_running{engine="1"} 1e300', "not run", "where a count belongs"),
        (
            'spec_decode_num_accepted_tokens_per_pos_total{position="1000000000"} 1',
            "not attributed",
            "no label position with a place",
        ),
        (
            'spec_decode_num_accepted_tokens_per_pos_total{position="-1"} 1',
            "not attributed",
            "no label position with a place",
        ),
    ],
)
def test_counters_that_no_engine_has(line, status, reason):
    fake = FakeServer()
    fake.left_out = ("generation_tokens_total",)
    fake.extra_lines = [f"vllm:{line}"]
    with serve(fake) as url:
        found = measure(Server(url), "m", PromptCase("case", "a"), {"max_tokens": 1}, settle_s=0.2)
    assert found.status == status and reason in found.reason


@pytest.mark.parametrize(
    "metrics",
    [
        {"acceptance_histogram": [1], "num_spec_steps": 10**400},
        {"acceptance_histogram": [-1], "num_spec_steps": 1},
        {"acceptance_histogram": 5, "num_spec_steps": 1},
        {"acceptance_histogram": [1], "num_spec_steps": "many"},
    ],
    ids=["huge", "negative", "none", "word"],
)
def test_an_answers_own_counts_that_are_none_are_left(metrics):
    whole = {"num_draft_tokens": 1, "num_accepted_draft_tokens": 1, **metrics}
    answer = {"metrics": {"speculative_decoding": whole}}
    with serve(FakeServer(lambda server, body: {**server.count(body), **answer})) as url:
        found = measure(Server(url), "m", PromptCase("case", "a"), {"max_tokens": 1}, settle_s=0.2)
    assert (found.status, found.source) == ("measured", "counters")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HEAD + b"\r\n<html>\n<body>Sign in</body></html>\n", "/v1/models: not JSON: "),
        (b"HTTP/1.1 500 No\r\n\r\nout of memory\n", "/v1/models: HTTP 500: out of memory"),
        (HEAD + b'Content-Length: 90\r\n\r\n{"data": [', "/v1/models: IncompleteRead"),
        (HEAD + b"\r\n{}", "/v1/models names no model"),
    ],
    ids=["html", "error", "truncated", "other"],
)
def test_a_server_of_another_kind_is_a_result_in_words(answer, reason, tmp_path, capsys):
    out = tmp_path / "out"
    with RawServer(once(answer)) as raw:
        assert run.main([f"--url={raw.url}", f"--out={out}"]) == 4
    result = json.loads((out / "acceptance.json").read_text())
    assert result["status"] == "not run" and result["reason"].startswith(raw.url + reason)
    told = capsys.readouterr()
    assert told.err == f"acceptance: not run: {result['reason']}\n"
    assert "Traceback" not in told.out and not (out / "acceptance.png").exists()


def test_a_server_whose_every_completion_fails(tmp_path):
    out = tmp_path / "out"
    with serve(FakeServer(lambda *_: {"status": 500, "words": "out of pages"})) as url:
        assert run.main([f"--url={url}", f"--out={out}", "--settle_s=0.1"]) == 4
    result = json.loads((out / "acceptance.json").read_text())
    assert {request["status"] for request in result["requests"]} == {"failed"}
    assert "HTTP 500" in result["reason"] and "\n" not in result["reason"]
