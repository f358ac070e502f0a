"""Answers and arguments that nobody expects: an error in words, never a traceback."""

import pytest

from flashverify.abba.outcome import UsageError
from tests.acceptance.fake_server import FakeServer, serve
from tools.acceptance import options, prompts, run
from tools.acceptance.server import Server, ServerError

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
    ],
    ids=str,
)
def test_an_odd_answer_is_the_requests_failure(answer):
    with serve(FakeServer(lambda *_: answer)) as url:
        server = Server(url, timeout_s=5.0)
        with pytest.raises(ServerError, match="the answer has no choice with text and usage"):
            server.complete("m", "a", max_tokens=1)


@pytest.mark.parametrize(
    "flag",
    ["--temperature=nan", "--timeout_s=inf", "--timeout_s=1e300", "--settle_s=nan",
     "--url=http://[::1", "--url=http://127.0.0.1:99999"],
)  # fmt: skip
def test_odd_arguments_are_refused(flag, tmp_path, capsys):
    with pytest.raises(UsageError, match=flag.split("=")[0].strip("-")):
        options.parse(["--url=http://127.0.0.1:1", flag])
    assert run.main(["--url=http://127.0.0.1:1", flag, f"--out={tmp_path / 'out'}"]) == 2
    assert flag.split("=")[0].strip("-") in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ['{"prompt": "a", "model": "b"}', '{"prompt": "a", "stream": true}', "[" * 50_000]
)
def test_odd_prompts_are_refused(line, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UsageError, match="jsonl:1: "):
        prompts.read(file)
