"""The command line."""

import dataclasses
import math
import os
import shlex
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from flashverify.abba.outcome import UsageError
from tools.acceptance import counters, prompts
from tools.acceptance.prompts import PromptCase

DESCRIPTION = """\
acceptance: what speculation did for each of a few requests to a vLLM-compatible server,
from the difference of the server's counters around each, or from the metrics in the answer.
Requests are sent one at a time to an idle server.

Writes acceptance.json, acceptance.md and acceptance.png. Exit codes: 0 every request was
measured, 1 the result could not be written, 2 bad arguments, 4 something was not measured
(the result says what and why).

flags:
"""


class HelpRequested(Exception):  # noqa: N818 - no error
    """--help was given; the text is the only argument."""


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
    values = _define()
    try:
        positional = values(["acceptance", *arguments])[1:]
    except flags.Error as error:
        raise UsageError(str(error).replace("\n", " ")) from error

    def value(name: str) -> Any:
        return values[name].value

    if value("help"):
        raise HelpRequested(DESCRIPTION + values.get_help())
    if positional:
        raise UsageError(f"unexpected argument {positional[0]!r}: all arguments are --flag=value")
    if not value("url"):
        raise UsageError("--url: missing; the address of a server, such as http://127.0.0.1:8000")
    for name in ("temperature", "timeout_s", "settle_s"):
        if math.isnan(value(name)):
            raise UsageError(f"--{name}=nan: accepted are 0 to 1000000")
    try:
        urllib.parse.urlsplit(value("url")).port  # noqa: B018 - raises for what is no port
    except ValueError as error:
        raise UsageError(f"--url={value('url')}: {error}") from error
    # `bazel run` starts the program in its runfiles and says where the caller stood.
    caller_folder = Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())

    def path(name: str) -> Path | None:
        text = value(name)
        return Path(os.path.normpath(caller_folder / Path(text).expanduser())) if text else None

    file = path("prompts")
    return Options(
        url=value("url"),
        model=value("model"),
        cases=prompts.read(file) if file else prompts.DEFAULT,
        parameters={
            "max_tokens": value("max_tokens"),
            "temperature": value("temperature"),
            "seed": value("seed"),
            **({"ignore_eos": True} if value("ignore_eos") else {}),
        },
        repeat=value("repeat"),
        timeout_s=value("timeout_s"),
        settle_s=value("settle_s"),
        prefix=value("prefix"),
        out=path("out"),
        caller_folder=caller_folder,
        command=shlex.join(["acceptance", *arguments]),
    )


def _define() -> flags.FlagValues:
    values: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]

    def string(name: str, default: str, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    def integer(name: str, default: int, low: int, text: str) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=low, flag_values=values)

    def number(name: str, default: float, text: str) -> None:
        flags.DEFINE_float(
            name, default, text, lower_bound=0.0, upper_bound=1e6, flag_values=values
        )

    string("url", "", "Address of the server, without /v1.")
    string("model", "", "Model to ask for; empty: the first that the server names.")
    string("prompts", "", "File with a prompt a line, or .jsonl; empty: a few of several kinds.")
    integer("max_tokens", 128, 1, "Tokens of a completion at most.")
    number("temperature", 0.0, "Sampling temperature; 0 is greedy.")
    integer("seed", 0, 0, "Seed of the sampling.")
    flags.DEFINE_boolean(
        "ignore_eos", False, "Go on after the model ends its text.", flag_values=values
    )
    integer("repeat", 1, 1, "Times that each prompt is sent.")
    number("timeout_s", 600.0, "Seconds that an answer may take.")
    number("settle_s", 5.0, "Seconds for the server to become idle and its counters to settle.")
    string("prefix", counters.PREFIX, "What the names of the engine's metrics begin with.")
    string("out", "", "Folder of the result; empty: a new one under flashverify-results/.")
    flags.DEFINE_boolean("help", False, "Shows this text.", flag_values=values)
    return values
