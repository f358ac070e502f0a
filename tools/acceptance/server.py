"""The few requests that a vLLM-compatible server is sent, over HTTP."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tools.acceptance import counters
from tools.acceptance.exchange import Address, Answer, ServerError, exchange, words

Prompt = str | list[int]


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
        """Only checks the address; raises ServerError.

        ``timeout_s`` is how long a request may take, to the end of its answer.
        """
        self._address = Address.of(url)
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._prefix = prefix

    def is_healthy(self) -> bool:
        """Whether the server says that it serves."""
        try:
            self._ask("/health")
        except ServerError:
            return False
        return True

    def snapshot(self) -> counters.Snapshot:
        """The server's counters now; raises ServerError."""
        try:
            return counters.parse(self._ask("/metrics").data.decode("utf-8"), self._prefix)
        except (counters.MetricsError, UnicodeDecodeError) as error:
            raise ServerError(f"{self.url}/metrics: {error}") from error

    def model(self) -> str:
        """Name of the first model served; raises ServerError."""
        answer = self._json("/v1/models")
        try:
            name = answer["data"][0]["id"]
        except _ODD_ANSWERS as error:
            raise ServerError(f"{self.url}/v1/models names no model") from error
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ServerError(f"{self.url}/v1/models names no model: {words(repr(name))}")
        return name

    def version(self) -> str | None:
        """What the server calls its version; None where it has no word for it."""
        try:
            return words(str(self._json("/version")["version"]))
        except (ServerError, KeyError, TypeError):
            return None

    def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of a text; raises ServerError."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = self._json("/tokenize", body)
        try:
            return [int(token) for token in answer["tokens"]]
        except _ODD_ANSWERS as error:
            raise ServerError(f"{self.url}/tokenize: no tokens: {words(str(error))}") from error

    def complete(self, model: str, prompt: Prompt, **parameters: Any) -> Completion:
        """One completion, not streamed; ``parameters`` go into the request as they are.

        Raises ServerError.
        """
        path = "/v1/completions"
        body = {"model": model, "prompt": prompt, "stream": False, **parameters}
        answer = self._ask(path, body)
        try:
            return _completion(self._parsed(path, answer), answer.elapsed_s)
        except _ODD_ANSWERS as error:
            raise ServerError(
                f"{self.url}{path}: the answer has no choice with text and usage: "
                f"{words(str(error))}"
            ) from error

    def _json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._parsed(path, self._ask(path, body))

    def _parsed(self, path: str, answer: Answer) -> Any:
        try:
            return json.loads(answer.data)
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"{self.url}{path}: not JSON: {words(str(error))}: {words(answer.data)[:80]!r}"
            ) from error

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = exchange(self._address, path, body=data, timeout_s=self.timeout_s)
        except ServerError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        if not 200 <= answer.status < 300:
            told = words(answer.data)
            if answer.location is not None:
                told = f"moved to {words(answer.location)}"
            raise ServerError(f"{self.url}{path}: HTTP {answer.status}: {told}")
        return answer


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
    ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    metrics = answer.get("metrics")
    # They are told as they are: what JSON cannot say, such as NaN, must not come that far.
    json.dumps(metrics, allow_nan=False)
    return Completion(
        text=str(choice["text"]),
        finish_reason=None if reason is None else words(str(reason)),
        prompt_tokens=counters.whole(usage["prompt_tokens"]),
        completion_tokens=counters.whole(usage["completion_tokens"]),
        elapsed_s=elapsed_s,
        token_ids=None if ids is None else tuple(map(int, ids)),
        logprobs=None if logprobs is None else _floats(logprobs),
        metrics=metrics if isinstance(metrics, Mapping) else None,
        prompt_logprobs=choice.get("prompt_logprobs"),
    )


def _floats(values: Sequence[float | None]) -> tuple[float, ...] | None:
    if None in values:
        return None
    found = tuple(float(value) for value in values if value is not None)
    if not all(map(math.isfinite, found)):
        raise ValueError("log-probabilities that are not finite")
    return found
