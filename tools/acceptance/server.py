"""The few requests that a vLLM-compatible server is sent, over HTTP."""

import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from tools.acceptance import counters

Prompt = str | list[int]


class ServerError(Exception):
    """The server cannot be reached, or its answer is not what the interface says."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A server's answer to one prompt.

    ``token_ids`` and ``logprobs`` (natural logarithms) are those of the completion, where
    they were asked for and the server gives them; ``metrics`` is the answer's own field
    of that name. ``prompt_logprobs`` has an entry for each prompt token, by token id, None
    for the first.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    metrics: Mapping[str, Any] | None
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None = None


class Server:
    """A vLLM-compatible server at an address such as ``http://127.0.0.1:8000``."""

    def __init__(self, url: str, *, timeout_s: float = 600, prefix: str = counters.PREFIX) -> None:
        """Only checks the address; raises ServerError."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ServerError(f"{url!r} is no address of a server: expected http(s) and a host")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._prefix = prefix

    def snapshot(self) -> counters.Snapshot:
        """The server's counters now; raises ServerError."""
        try:
            return counters.parse(self._get("/metrics").decode("utf-8"), self._prefix)
        except (counters.MetricsError, UnicodeDecodeError) as error:
            raise ServerError(f"{self.url}/metrics: {error}") from error

    def model(self) -> str:
        """Name of the first model served; raises ServerError."""
        answer = self._json("/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except _ODD_ANSWERS as error:
            raise ServerError(f"{self.url}/v1/models names no model") from error

    def version(self) -> str | None:
        """What the server calls its version; None where it has no word for it."""
        try:
            return str(self._json("/version")["version"])
        except (ServerError, KeyError, TypeError):
            return None

    def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of a text; raises ServerError."""
        body = json.dumps({"model": model, "prompt": text, "add_special_tokens": False})
        try:
            return [int(token) for token in json.loads(self._post("/tokenize", body))["tokens"]]
        except _ODD_ANSWERS as error:
            raise ServerError(f"{self.url}/tokenize: no tokens: {error}") from error

    def complete(self, model: str, prompt: Prompt, **parameters: Any) -> Completion:
        """One completion, not streamed; ``parameters`` go into the request as they are.

        Raises ServerError.
        """
        body = json.dumps({"model": model, "prompt": prompt, "stream": False, **parameters})
        start = time.perf_counter()
        data = self._post("/v1/completions", body)
        elapsed_s = time.perf_counter() - start
        try:
            return _completion(json.loads(data), elapsed_s)
        except _ODD_ANSWERS as error:
            raise ServerError(
                f"{self.url}/v1/completions: the answer has no choice with text and usage: {error}"
            ) from error

    def _json(self, path: str) -> Any:
        try:
            return json.loads(self._get(path))
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}{path}: not JSON: {error}") from error

    def _post(self, path: str, body: str) -> bytes:
        headers = {"Content-Type": "application/json"}
        return self._open(
            urllib.request.Request(self.url + path, data=body.encode(), headers=headers)
        )

    def _get(self, path: str) -> bytes:
        return self._open(urllib.request.Request(self.url + path))

    def _open(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            words = error.read(500).decode("utf-8", "replace")
            raise ServerError(f"{request.full_url}: HTTP {error.code}: {words}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerError(f"{request.full_url}: {reason}") from error


# What reading an answer of another shape than expected may raise.
_ODD_ANSWERS = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def _completion(answer: Mapping[str, Any], elapsed_s: float) -> Completion:
    choice, usage = answer["choices"][0], answer["usage"]
    ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    metrics = answer.get("metrics")
    return Completion(
        text=str(choice["text"]),
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=_count(usage["prompt_tokens"]),
        completion_tokens=_count(usage["completion_tokens"]),
        elapsed_s=elapsed_s,
        token_ids=None if ids is None else tuple(map(int, ids)),
        logprobs=None if logprobs is None else _floats(logprobs),
        metrics=metrics if isinstance(metrics, Mapping) else None,
        prompt_logprobs=choice.get("prompt_logprobs"),
    )


def _count(value: Any) -> int:
    count = int(value)
    if not 0 <= count <= 2**53:
        raise ValueError(f"{str(value)[:40]} tokens")
    return count


def _floats(values: Sequence[float | None]) -> tuple[float, ...] | None:
    return None if None in values else tuple(float(value) for value in values if value is not None)
