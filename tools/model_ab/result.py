"""What a run found, and its form in model_ab.json (schema 1; docs/engines.md)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tools.model_ab.checks import FAILED, MEASURED, NOT_RUN, Check
from tools.model_ab.options import Options
from tools.model_ab.texts import Text
from tools.model_ab.trials import Request

SCHEMA = 1

_SETTINGS = (
    "arm_a", "arm_b", "references", "kv_cache_dtype", "speculative_tokens",
    "row_invariant_linears", "server_args", "context", "max_tokens", "blocks", "seed",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """A run, check by check."""

    options: Options
    environment: Mapping[str, Any]
    servers: Mapping[str, Any]
    texts: tuple[Text, ...]
    checks: Mapping[str, Check]
    requests: tuple[Request, ...]

    @property
    def status(self) -> str:
        """Whether every check was "measured"; else "failed" or "not run"."""
        statuses = {check.status for check in self.checks.values()}
        if statuses == {MEASURED}:
            return MEASURED
        return FAILED if FAILED in statuses else NOT_RUN

    @property
    def complaint(self) -> str | None:
        """The first check that was not measured, a failed one before all others; else None."""
        for status in (FAILED, NOT_RUN):
            for name, check in self.checks.items():
                if check.status == status:
                    return f"{name} {status}: {check.reason}"
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """The flags that make the experiment."""
        return {name: getattr(self.options, name) for name in _SETTINGS}

    def to_json(self) -> dict[str, Any]:
        """The contents of model_ab.json; what was not measured is null."""
        return {
            "schema": SCHEMA,
            "status": self.status,
            "command": self.options.command,
            "environment": dict(self.environment),
            "settings": self.settings,
            "servers": dict(self.servers),
            "texts": [
                {
                    "name": text.name,
                    "tokens": len(text.ids),
                    "prompt_tokens": text.prompt_tokens,
                    "token_ids_sha256": text.sha256(),
                }
                for text in self.texts
            ],
            "checks": {name: check.to_json() for name, check in self.checks.items()},
            "requests": [
                {
                    "text": request.text,
                    "arm": request.arm,
                    "block": request.block,
                    "slot": request.slot,
                    **request.result.to_json(),
                }
                for request in self.requests
            ],
        }
