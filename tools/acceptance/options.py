"""The command line."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashverify.abba.command_line import MOST_SEED, Arguments, Flags
from flashverify.abba.outcome import UsageError
from tools.acceptance import counters, exchange, prompts
from tools.acceptance.prompts import PromptCase

PROGRAM = "acceptance"

# No server answers sooner; 0 would be no time at all.
SHORTEST_S = 0.001

_DESCRIPTION = """\
acceptance: what speculation did for each of a few requests to a vLLM-compatible server,
from the difference of the server's counters around each, or from the metrics in the answer.
Requests are sent one at a time to an idle server.

Writes acceptance.json, acceptance.md and acceptance.png. Exit codes: 0 every request was
measured, 1 the result could not be written, 2 bad arguments, 4 something was not measured
(the result says what and why), 130 interrupted.

flags:
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, checked, with paths made absolute."""

    url: str
    model: str
    cases: tuple[PromptCase, ...]
    parameters: dict[str, Any]
    repeat: int
    timeout_s: float
    settle_s: float
    prefix: str
    out: Path | None
    caller_folder: Path
    command: str


def parse(arguments: Sequence[str]) -> Options:
    """Options of the arguments after the program's name.

    Raises UsageError with one message for whatever cannot be meant, HelpRequested for
    ``--help``.
    """
    found = _flags().parse(arguments)
    url = server_url(found, "url")
    if url is None:
        raise UsageError("--url: missing; the address of a server, such as http://127.0.0.1:8000")
    file = found.path("prompts")
    return Options(
        url=url,
        model=found.value("model"),
        cases=prompts.read(file) if file else prompts.DEFAULT,
        parameters={
            "max_tokens": found.value("max_tokens"),
            "temperature": found.value("temperature"),
            "seed": found.value("seed"),
            **({"ignore_eos": True} if found.value("ignore_eos") else {}),
        },
        repeat=found.value("repeat"),
        timeout_s=found.value("timeout_s"),
        settle_s=found.value("settle_s"),
        prefix=found.value("prefix"),
        out=found.path("out"),
        caller_folder=found.caller_folder,
        command=found.command,
    )


def server_url(found: Arguments, name: str) -> str | None:
    """The address that a flag gives, None where it is empty; raises UsageError for what is none."""
    text: str = found.value(name)
    if text:
        try:
            exchange.Address.of(text)
        except exchange.ServerError as error:
            raise UsageError(f"--{name}: {error}") from error
    return text or None


def _flags() -> Flags:
    flags = Flags(PROGRAM, _DESCRIPTION)
    flags.string("url", "", "Address of the server, without /v1.")
    flags.string("model", "", "Model to ask for; empty: the first that the server names.")
    flags.string(
        "prompts", "", "File with a prompt a line, or .jsonl; empty: a few of several kinds."
    )
    flags.integer("max_tokens", 128, "Tokens of a completion at most.", low=1)
    flags.number("temperature", 0.0, "Sampling temperature; 0 is greedy.")
    flags.integer("seed", 0, "Seed of the sampling.", high=MOST_SEED)
    flags.boolean("ignore_eos", False, "Go on after the model ends its text.")
    flags.integer("repeat", 1, "Times that each prompt is sent.", low=1)
    flags.number(
        "timeout_s", 600.0, "Seconds from a request to the end of its answer.", low=SHORTEST_S
    )
    flags.number(
        "settle_s", 5.0, "Seconds for the server to become idle and its counters to settle."
    )
    flags.string("prefix", counters.PREFIX, "What the names of the engine's metrics begin with.")
    return flags
