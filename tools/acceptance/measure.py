"""One request at a time, and whether what the server counted meanwhile was its doing."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from tools.acceptance import counters, speculation
from tools.acceptance.exchange import ServerError
from tools.acceptance.prompts import PromptCase
from tools.acceptance.server import Completion, Server
from tools.acceptance.speculation import Speculation

MEASURED = "measured"
NOT_ATTRIBUTED = "not attributed"
NOT_RUN = "not run"
FAILED = "failed"

# A counter is often written just after the answer is sent.
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """What one request showed.

    ``status`` is "measured"; "not attributed" where the request was answered, and what
    the server counted cannot be said to be its doing; "not run" where it was not sent;
    "failed" where the server did not answer. ``speculation`` comes from ``source``:
    "counters" of the server, or the "response" itself.
    """

    name: str
    status: str
    reason: str | None = None
    completion: Completion | None = None
    speculation: Speculation | None = None
    source: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens over the time from request to answer."""
        found = self.completion
        return found.completion_tokens / found.elapsed_s if found and found.elapsed_s else None

    def to_json(self) -> dict[str, Any]:
        """The request's part of acceptance.json."""
        found = self.completion
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "prompt_tokens": found.prompt_tokens if found else None,
            "completion_tokens": found.completion_tokens if found else None,
            "finish_reason": found.finish_reason if found else None,
            "elapsed_s": found.elapsed_s if found else None,
            "tokens_per_second": self.tokens_per_second,
            "source": self.source,
            "speculation": self.speculation.to_json() if self.speculation else None,
            "server_metrics": found.metrics if found else None,
            "notes": list(self.notes),
        }


def measure(
    server: Server,
    model: str,
    case: PromptCase,
    parameters: Mapping[str, Any],
    *,
    settle_s: float = 5.0,
    sleep: Callable[[float], None] = time.sleep,
) -> RequestResult:
    """Sends one prompt to an idle server and attributes the change of its counters.

    ``settle_s`` is how long the server may take to become idle, and its counters to show
    the request. ``parameters`` go into the request as they are. Raises nothing of the
    server's making: that is a result.
    """
    try:
        before = _poll(server, lambda now: not now.in_flight, settle_s, sleep)
    except ServerError as error:
        return RequestResult(case.name, NOT_RUN, str(error))
    if before.in_flight:
        return RequestResult(case.name, NOT_RUN, f"{before.in_flight} other requests are in flight")
    try:
        completion = server.complete(model, case.prompt, **{**parameters, **case.parameters})
    except ServerError as error:
        return RequestResult(case.name, FAILED, str(error))
    own = speculation.from_response(completion.metrics)
    counted, reason = _attribute(server, before, completion, settle_s, sleep)
    notes = []
    if own is not None:
        if counted is not None and own != counted:
            notes.append(f"the server's counters say otherwise: {counted.to_json()}")
        return RequestResult(case.name, MEASURED, None, completion, own, "response", tuple(notes))
    if reason is not None:
        return RequestResult(case.name, NOT_ATTRIBUTED, reason, completion)
    return RequestResult(
        case.name, MEASURED, None, completion, counted, "counters" if counted else None
    )


def _attribute(
    server: Server,
    before: counters.Snapshot,
    completion: Completion,
    settle_s: float,
    sleep: Callable[[float], None],
) -> tuple[Speculation | None, str | None]:
    """The request's counts; or why what was counted is not known to be its doing."""

    def settled(now: counters.Snapshot) -> bool:
        try:
            delta = counters.difference(before, now)
        except counters.RestartError:
            return True
        seen = delta.finished is None or delta.finished >= 1
        whole = delta.generated is None or delta.generated >= completion.completion_tokens
        return seen and whole and not now.in_flight

    try:
        after = _poll(server, settled, settle_s, sleep)
        delta = counters.difference(before, after)
    except (ServerError, counters.MetricsError) as error:
        return None, str(error)
    except counters.RestartError as error:
        return None, f"the server was started anew: {error}"
    if after.in_flight:
        return None, f"{after.in_flight} other requests are in flight"
    if delta.finished is None and after.in_flight is None:
        return None, (
            f"the server shows neither {counters.FINISHED} nor {counters.RUNNING}: other requests "
            "would not be seen"
        )
    if delta.finished not in (None, 1):
        return None, f"{delta.finished} requests finished meanwhile"
    if delta.generated not in (None, completion.completion_tokens):
        return None, (
            f"{delta.generated} tokens were generated meanwhile, "
            f"{completion.completion_tokens} of them for this request"
        )
    return speculation.from_counters(delta), None


def _poll(
    server: Server,
    done: Callable[[counters.Snapshot], bool],
    settle_s: float,
    sleep: Callable[[float], None],
) -> counters.Snapshot:
    deadline = time.monotonic() + settle_s
    while not done(now := server.snapshot()) and time.monotonic() < deadline:
        sleep(_POLL_S)
    return now
