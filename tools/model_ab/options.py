"""The command line."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from flashverify.abba.options import ROUTES
from flashverify.abba.outcome import UsageError

REFERENCES = ("float32", "bfloat16")

DESCRIPTION = """\
model_ab: two arms of a served model on the same prompts: two servers by address, or vLLM
started twice with two routes of flashverify. Compares native digests, acceptance, outputs,
latency in A B B A order, and the distance of log-probabilities from a run with a wider cache.

Writes model_ab.json, model_ab.md and model_ab.png. Exit codes: 0 every check was measured,
1 the result could not be written, 2 bad arguments, 3 the arms' native files differ, 4 an arm
did not start, or a check failed or was not run (the result says which and why).

flags:
"""


class HelpRequested(Exception):  # noqa: N818 - no error
    """--help was given; the text is the only argument."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, checked, with paths made absolute."""

    arm_a: str
    arm_b: str
    urls: dict[str, str | None]
    pids: dict[str, int | None]
    references: tuple[str, ...]
    vllm_python: Path
    model: Path | None
    kv_cache_dtype: str
    speculative_tokens: int
    row_invariant_linears: bool
    server_args: tuple[str, ...]
    texts: tuple[str, ...]
    context: int
    max_tokens: int
    blocks: int
    seed: int
    start_timeout_s: float
    timeout_s: float
    settle_s: float
    out: Path | None
    caller_folder: Path
    command: str

    @property
    def starts_servers(self) -> bool:
        """Whether any server is not given by address."""
        return bool(self.references) or None in self.urls.values()


def parse(arguments: Sequence[str]) -> Options:
    """Options of the arguments after the program's name.

    Raises UsageError with one message for whatever cannot be meant, HelpRequested for
    ``--help``.
    """
    values = _define()
    try:
        positional = values(["model_ab", *arguments])[1:]
    except flags.Error as error:
        raise UsageError(str(error).replace("\n", " ")) from error

    def value(name: str) -> Any:
        return values[name].value

    if value("help"):
        raise HelpRequested(DESCRIPTION + values.get_help())
    if positional:
        raise UsageError(f"unexpected argument {positional[0]!r}: all arguments are --flag=value")
    # `bazel run` starts the program in its runfiles and says where the caller stood.
    caller_folder = Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())

    def path(name: str) -> Path | None:
        text = value(name)
        return Path(os.path.normpath(caller_folder / Path(text).expanduser())) if text else None

    references = tuple(name for name in value("references").split(",") if name)
    for name in references:
        if name not in REFERENCES:
            raise UsageError(f"--references={name}: known are {', '.join(REFERENCES)}")
    context, max_tokens = value("context"), value("max_tokens")
    if max_tokens >= context:
        raise UsageError(f"--max_tokens={max_tokens}: accepted are 1 to {context - 1}")
    options = Options(
        arm_a=value("arm_a"),
        arm_b=value("arm_b"),
        urls={name: value(f"arm_{name.lower()}_url") or None for name in "AB"},
        pids={name: value(f"arm_{name.lower()}_pid") or None for name in "AB"},
        references=references,
        vllm_python=path("vllm_python") or Path(),
        model=path("model"),
        kv_cache_dtype=value("kv_cache_dtype"),
        speculative_tokens=value("speculative_tokens"),
        row_invariant_linears=value("row_invariant_linears"),
        server_args=tuple(shlex.split(value("server_args"))),
        texts=tuple(value("texts")),
        context=context,
        max_tokens=max_tokens,
        blocks=value("blocks"),
        seed=value("seed"),
        start_timeout_s=value("start_timeout_s"),
        timeout_s=value("timeout_s"),
        settle_s=value("settle_s"),
        out=path("out"),
        caller_folder=caller_folder,
        command=shlex.join(["model_ab", *arguments]),
    )
    if options.starts_servers and not value("vllm_python"):
        raise UsageError(
            "--vllm_python: missing; the Python of an environment with vLLM and flashverify's "
            "wheel, or --arm_a_url, --arm_b_url and --references= for servers that run already"
        )
    return options


def _define() -> flags.FlagValues:
    values: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]

    def string(name: str, default: str, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    def integer(name: str, default: int, low: int, text: str) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=low, flag_values=values)

    def number(name: str, default: float, text: str) -> None:
        flags.DEFINE_float(name, default, text, lower_bound=0.0, flag_values=values)

    for name, route in (("arm_a", "grouped_half"), ("arm_b", "grouped_fp32")):
        words = f"Route of {name}, of a server that is started: {', '.join(ROUTES)}."
        flags.DEFINE_enum(name, route, ROUTES, words, flag_values=values)
        string(f"{name}_url", "", f"Address of a server that is {name}; empty: one is started.")
        integer(f"{name}_pid", 0, 0, f"First process of --{name}_url's server, if on this machine.")
    string(
        "references",
        "float32",
        "Comma-separated runs to measure log-probabilities against: float32 (model and cache "
        "in float32, vLLM's own attention), bfloat16 (the arms' model with a bfloat16 cache, "
        "grouped_fp32).",
    )
    string("vllm_python", "", "Python of an environment with vLLM and flashverify's wheel.")
    string("model", "", "Model folder; empty: SmolLM2-135M-Instruct, written anew.")
    string("kv_cache_dtype", "fp8", "Cache of both arms, as vLLM names it.")
    integer("speculative_tokens", 7, 0, "Drafts of a block, by n-gram lookup; 0: none.")
    flags.DEFINE_boolean(
        "row_invariant_linears", True, "The plugin's option, for both arms.", flag_values=values
    )
    string("server_args", "", "Further arguments of every server that is started.")
    flags.DEFINE_multi_string(
        "texts",
        ["repetitive"],
        "name=file or name=file,file: a text of files; repetitive: one that repeats itself. "
        "May be given several times.",
        flag_values=values,
    )
    integer("context", 8192, 2, "Tokens of each text, and of the servers' context.")
    integer("max_tokens", 64, 1, "Tokens of those that are generated, not given.")
    integer("blocks", 5, 1, "A B B A blocks for each text.")
    integer("seed", 0, 0, "Seed of the servers, the requests and the bootstrap.")
    number("start_timeout_s", 900.0, "Seconds that a server may take to start.")
    number("timeout_s", 1800.0, "Seconds that an answer may take.")
    number("settle_s", 10.0, "Seconds for a server to become idle and its counters to settle.")
    string("out", "", "Folder of the result; empty: a new one under flashverify-results/.")
    flags.DEFINE_boolean("help", False, "Shows this text.", flag_values=values)
    return values
