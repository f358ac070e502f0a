"""A result in words and tables, for the terminal and for acceptance.md."""

from flashverify.abba.text import markdown_table, plain_table
from tools.acceptance.measure import MEASURED, RequestResult
from tools.acceptance.result import Result
from tools.acceptance.speculation import Speculation

_HEADER = [
    "request", "status", "prompt", "tokens", "drafts", "drafted", "accepted", "rate",
    "mean length", "tokens/s",
]  # fmt: skip


def for_terminal(result: Result) -> str:
    """The result as it is printed."""
    header, rows = _requests(result)
    lines = [*_head(result), "", *plain_table(header, rows), "", *_notes(result)]
    found = result.speculation
    if found is not None and found.rate_by_position is not None:
        lines += ["", *plain_table(*_positions(found))]
    return "\n".join(lines).rstrip()


def for_markdown(result: Result) -> str:
    """The contents of acceptance.md."""
    lines = ["# Acceptance", "", *(f"- {line}" for line in _head(result)), ""]
    lines += [*markdown_table(*_requests(result)), ""]
    lines += [f"- {note}" for note in _notes(result)]
    found = result.speculation
    if found is not None and found.rate_by_position is not None:
        lines += ["", "## By place in the block", "", *markdown_table(*_positions(found)), ""]
        lines += ["![mean length of each request, acceptance by place](acceptance.png)", ""]
    lines += ["## Environment", ""]
    lines += [f"- {name}: {value}" for name, value in result.environment.items()]
    lines += [f"- command: `{result.command}`", ""]
    return "\n".join(lines)


def _head(result: Result) -> list[str]:
    settings = " ".join(f"{name}={value}" for name, value in result.settings.items())
    environment = result.environment
    return [
        f"{environment['url']}, model {environment['model']}, "
        f"server {environment['server_version'] or 'of unknown version'}",
        settings,
    ]


def _requests(result: Result) -> tuple[list[str], list[list[str]]]:
    rows = [_row(request) for request in result.requests]
    done = [request.completion for request in result.measured if request.completion]
    tokens = [
        str(sum(completion.prompt_tokens for completion in done)),
        str(sum(completion.completion_tokens for completion in done)),
    ]
    status = f"{len(result.measured)} of {len(result.requests)} measured"
    total = [*_counts(result.speculation), _number(result.tokens_per_second, ".2f")]
    return _HEADER, [*rows, ["all", status, *tokens, *total]]


def _row(request: RequestResult) -> list[str]:
    found = request.completion
    tokens = ["-", "-"]
    if found is not None:
        tokens = [str(found.prompt_tokens), str(found.completion_tokens)]
    counts = _counts(request.speculation)
    speed = _number(request.tokens_per_second, ".2f")
    return [request.name, request.status, *tokens, *counts, speed]


def _counts(found: Speculation | None) -> list[str]:
    if found is None:
        return ["-"] * 5
    counts = [str(count) for count in (found.drafts, found.draft_tokens, found.accepted)]
    return [*counts, _number(found.rate, ".3f"), _number(found.mean_length, ".3f")]


def _positions(found: Speculation) -> tuple[list[str], list[list[str]]]:
    assert found.accepted_by_position is not None and found.rate_by_position is not None
    pairs = zip(found.accepted_by_position, found.rate_by_position, strict=True)
    return ["place", "of", "accepted", "rate"], [
        [str(place), str(found.drafts), str(count), f"{rate:.3f}"]
        for place, (count, rate) in enumerate(pairs)
    ]


def _notes(result: Result) -> list[str]:
    notes = [] if result.reason is None else [result.reason]
    for request in result.requests:
        if request.status != MEASURED:
            notes.append(f"{request.name}: {request.status}: {request.reason}")
        elif request.speculation is None:
            notes.append(f"{request.name}: the server counts no speculation")
        notes += [f"{request.name}: {note}" for note in request.notes]
    sources = {request.source for request in result.measured if request.source}
    if sources:
        words = {
            "counters": "differences of the server's counters around each request",
            "response": "the metrics in each answer",
        }
        notes.append("counts are " + " and ".join(words[source] for source in sorted(sources)))
    notes.append("mean length: tokens that a block yields, the target's own included")
    notes.append("tokens/s: completion tokens over the time from request to answer")
    return notes


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
