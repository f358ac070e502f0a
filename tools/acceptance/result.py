"""A run's result, and its form in acceptance.json (schema 1; docs/engines.md)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tools.acceptance import speculation
from tools.acceptance.measure import MEASURED, NOT_RUN, RequestResult
from tools.acceptance.speculation import Speculation

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """All requests of a run; ``reason`` says why nothing was measured."""

    command: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    requests: tuple[RequestResult, ...]
    reason: str | None = None

    @property
    def measured(self) -> tuple[RequestResult, ...]:
        """The requests that were measured."""
        return tuple(request for request in self.requests if request.status == MEASURED)

    @property
    def is_whole(self) -> bool:
        """Whether every request was measured, its speculation included."""
        return bool(self.requests) and all(
            request.status == MEASURED and request.speculation is not None
            for request in self.requests
        )

    @property
    def speculation(self) -> Speculation | None:
        """Speculation of the measured requests together."""
        parts = [request.speculation for request in self.measured]
        return speculation.total(part for part in parts if part is not None)

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens of the measured requests over the time they took."""
        done = [request.completion for request in self.measured if request.completion]
        elapsed_s = sum(completion.elapsed_s for completion in done)
        tokens = sum(completion.completion_tokens for completion in done)
        return tokens / elapsed_s if elapsed_s else None

    def to_json(self) -> dict[str, Any]:
        """The contents of acceptance.json; what was not measured is null."""
        total = self.speculation
        done = [request.completion for request in self.measured if request.completion]
        return {
            "schema": SCHEMA,
            "status": MEASURED if self.is_whole else NOT_RUN,
            "reason": self.reason or self._first_reason(),
            "command": self.command,
            "environment": dict(self.environment),
            "settings": dict(self.settings),
            "requests": [request.to_json() for request in self.requests],
            "total": {
                "requests_measured": len(self.measured),
                "requests": len(self.requests),
                "completion_tokens": sum(completion.completion_tokens for completion in done),
                "elapsed_s": sum(completion.elapsed_s for completion in done),
                "tokens_per_second": self.tokens_per_second,
                "speculation": total.to_json() if total else None,
            },
        }

    def _first_reason(self) -> str | None:
        for request in self.requests:
            if request.status != MEASURED:
                return f"{request.name}: {request.status}: {request.reason}"
            if request.speculation is None:
                return f"{request.name}: the server counts no speculation"
        return None
