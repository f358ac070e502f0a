"""Requests end by their deadline and in words, whatever the server does."""

import re
import socket
import threading
import time

import pytest

from tests.acceptance.fake_server import FakeServer, serve
from tests.acceptance.raw_server import HEAD, RawServer, once, then_forever
from tools.acceptance import exchange
from tools.acceptance.exchange import Address, ServerError
from tools.acceptance.measure import measure
from tools.acceptance.prompts import PromptCase
from tools.acceptance.server import Server


def told(raw, ask=Server.snapshot, timeout_s=20.0):
    """The words that a request to ``raw`` ends in."""
    with pytest.raises(ServerError) as refusal:
        ask(Server(raw.url, timeout_s=timeout_s))
    return str(refusal.value).removeprefix(raw.url)


@pytest.mark.parametrize(
    "chunks",
    [
        then_forever(b"", b"H"),
        then_forever(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        then_forever(b"HTTP/1.1 200 OK\r\n", b"X"),
        then_forever(HEAD + b"\r\n", b"x"),
        then_forever(HEAD + b"Content-Length: 1000000\r\n\r\n", b"x"),
        then_forever(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        then_forever(b"HTTP/1.1 500 Bad\r\nContent-Length: 1000000\r\n\r\n", b"x"),
        then_forever(b"", b""),
    ],
    ids=["status", "continue", "headers", "endless", "length", "chunked", "error", "silence"],
)
def test_a_server_that_drips_is_left_at_the_deadline(chunks):
    with RawServer(chunks, pause_s=0.02) as raw:
        start = time.monotonic()
        assert told(raw, timeout_s=0.4) == "/metrics: no whole answer in 0.4 s"
        # Between the bytes 20 ms pass: a limit of each read would never be reached.
        assert 0.4 <= time.monotonic() - start < 10
        # And the server is told, so that it can give up too.
        assert raw.hung_up.wait(10)


def test_a_completion_that_drips_is_a_failed_request():
    def chunks(request):
        yield HEAD + b"\r\n"
        if request.startswith(b"GET /metrics "):
            return
        while True:
            yield b" "

    with RawServer(chunks, pause_s=0.02) as raw:
        server = Server(raw.url, timeout_s=0.4)
        found = measure(server, "m", PromptCase("case", "a"), {"max_tokens": 1}, settle_s=0)
    assert found.status == "failed"
    assert found.reason == f"{raw.url}/v1/completions: no whole answer in 0.4 s"


def test_a_name_that_is_looked_up_for_long_is_left_too(monkeypatch):
    found, look_up = threading.Event(), socket.getaddrinfo

    def slow(*arguments, **more):
        found.wait(60)
        return look_up(*arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with RawServer(then_forever(b"", b"x"), pause_s=0.02) as raw:
        assert told(raw, timeout_s=0.2) == "/metrics: no whole answer in 0.2 s"
        found.set()
        # What comes of it late is closed, and the server is asked nothing.
        assert raw.hung_up.wait(10)
        assert raw.received == b""


def test_an_answer_just_in_time_is_whole():
    """Slow is not late."""
    chunks = once(HEAD + b"Content-Length: 4\r\n\r\n", b"a", b"b", b"c", b"d")
    with RawServer(chunks, pause_s=0.1) as raw:
        found = exchange.exchange(Address.of(raw.url), "/", timeout_s=20)
    assert (found.status, found.data) == (200, b"abcd")
    assert 0.3 < found.elapsed_s < 20


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "Remote end closed connection without response"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0"),
        (b"\x00\xff" * 40 + b"\r\n", "."),
        (HEAD + b"Content-Length: 50\r\n\r\nvllm:x 1\n", "9 bytes read, 41 more expected"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", "IncompleteRead"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n", "IncompleteRead"),
        (HEAD + b"\r\n\xff\xfe", "can't decode"),
        (HEAD + b"\r\n<html>\n<body>Sign in</body>", "not in the Prometheus text format"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://h/a\r\n\r\n", "HTTP 302: moved to http://h/a"),
        (b"HTTP/1.1 503 No\r\n\r\n<b>\n  \x1b[2Jbusy</b>", "HTTP 503: <b> \ufffd.2Jbusy</b>"),
    ],
    ids=[
        "none", "ssh", "binary", "truncated", "chunk", "chunks", "bytes", "html", "moved", "busy",
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_told_in_words(answer, message):
    with RawServer(once(answer)) as raw:
        words = told(raw)
    assert words.startswith("/metrics: ") and re.search(message, words)


@pytest.mark.parametrize("data", [b"<html>", b'{"data": [{"id": "m"', b"[" * 100_000, b"\xff", b""])
def test_json_that_is_none_is_told_in_words(data):
    length = f"Content-Length: {len(data)}\r\n\r\n".encode()
    with RawServer(once(HEAD + length + data)) as raw:
        words = told(raw, Server.model)
    assert words.startswith("/v1/models: not JSON: ")
    assert "\n" not in words and len(words) < 1000


@pytest.mark.parametrize(
    "data", ["{}", "[]", "5", '{"data": []}', '{"data": [{"id": null}]}',
             '{"data": [{"id": ""}]}', '{"data": [{"id": "a\\u001b[2J"}]}']
)  # fmt: skip
def test_a_server_that_names_no_model(data):
    with RawServer(once(HEAD + b"\r\n" + data.encode())) as raw:
        assert told(raw, Server.model).startswith("/v1/models names no model")


def test_more_than_memory_should_hold_is_refused(monkeypatch):
    monkeypatch.setattr(exchange, "MOST_BYTES", 5000)
    with RawServer(then_forever(HEAD + b"\r\n", b"x" * 1000)) as raw:
        assert told(raw) == "/metrics: more than 5000 bytes of answer"


def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with serve(FakeServer()) as url:
        assert Server(url, timeout_s=20).model() == "m"


def test_a_path_before_the_interface_is_kept():
    assert Address.of("http://h:80/base/") == Address("http", "h", 80, "/base")
    assert Address.of("https://[::1]") == Address("https", "::1", None, "")


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:8000", "host", "ftp://host", "http://", "http:///path", "http://[::1",
        "http://h:99999", "http://h:port", "http://a..b", f"http://{'a' * 64}.b",
        "http://name:word@host", "http://h/?x=1", "http://h/#x", "http://h/é", "http://h/a b",
    ],
)  # fmt: skip
def test_what_is_no_address(url):
    with pytest.raises(ServerError, match="is no address of a server"):
        Server(url)


def test_a_name_that_nobody_has(monkeypatch):
    def unknown(*_arguments, **_more):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ServerError, match=r"name\.invalid/metrics: .*not known"):
        Server("http://name.invalid", timeout_s=20).snapshot()
