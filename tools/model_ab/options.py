"""The command line."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from flashverify.abba.command_line import MOST_SEED, Flags
from flashverify.abba.options import ROUTES
from flashverify.abba.outcome import UsageError
from tools.acceptance.options import SHORTEST_S, server_url

PROGRAM = "model_ab"

REFERENCES = ("float32", "bfloat16")

_DESCRIPTION = """\
model_ab: two arms of a served model on the same prompts: two servers by address, or vLLM
started twice with two routes of flashverify. Compares native digests, acceptance, outputs,
latency in A B B A order, and the distance of log-probabilities from a run with a wider cache.

Writes model_ab.json, model_ab.md and model_ab.png. Exit codes: 0 every check was measured,
1 the result could not be written, 2 bad arguments, 3 the arms' native files differ, 4 an arm
did not start, or a check failed or was not run (the result says which and why), 130 interrupted.

flags:
"""


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
    found = _flags().parse(arguments)
    context, max_tokens = found.value("context"), found.value("max_tokens")
    if max_tokens >= context:
        raise UsageError(f"--max_tokens={max_tokens}: accepted are 1 to {context - 1}")
    urls = {name: server_url(found, f"arm_{name.lower()}_url") for name in "AB"}
    pids = {name: found.value(f"arm_{name.lower()}_pid") or None for name in "AB"}
    for name in "AB":
        if pids[name] is not None and urls[name] is None:
            flag = f"--arm_{name.lower()}"
            raise UsageError(f"{flag}_pid={pids[name]}: goes with {flag}_url, which is missing")
    try:
        server_args = shlex.split(found.value("server_args"))
    except ValueError as error:
        raise UsageError(f"--server_args={found.value('server_args')}: {error}") from error
    options = Options(
        arm_a=found.value("arm_a"),
        arm_b=found.value("arm_b"),
        urls=urls,
        pids=pids,
        references=found.value("references"),
        vllm_python=found.path("vllm_python") or Path(),
        model=found.path("model"),
        kv_cache_dtype=found.value("kv_cache_dtype"),
        speculative_tokens=found.value("speculative_tokens"),
        row_invariant_linears=found.value("row_invariant_linears"),
        server_args=tuple(server_args),
        texts=tuple(found.value("texts")),
        context=context,
        max_tokens=max_tokens,
        blocks=found.value("blocks"),
        seed=found.value("seed"),
        start_timeout_s=found.value("start_timeout_s"),
        timeout_s=found.value("timeout_s"),
        settle_s=found.value("settle_s"),
        out=found.path("out"),
        caller_folder=found.caller_folder,
        command=found.command,
    )
    if options.starts_servers:
        _check_what_is_started(options)
    return options


def _check_what_is_started(options: Options) -> None:
    """Tells a slip in a path at once, and not as a server that did not start."""
    python = options.vllm_python
    if python == Path():
        raise UsageError(
            "--vllm_python: missing; the Python of an environment with vLLM and flashverify's "
            "wheel, or --arm_a_url, --arm_b_url and --references= for servers that run already"
        )
    if not python.is_file():
        raise UsageError(f"--vllm_python={python}: no such file; expected a Python with vLLM")
    if not os.access(python, os.X_OK):
        raise UsageError(f"--vllm_python={python}: not executable; expected a Python with vLLM")
    if options.model is not None and not options.model.is_dir():
        raise UsageError(f"--model={options.model}: no such folder; expected that of a model")


def _flags() -> Flags:
    flags = Flags(PROGRAM, _DESCRIPTION)
    for name, route in (("arm_a", "grouped_half"), ("arm_b", "grouped_fp32")):
        flags.choice(name, route, ROUTES, f"Route of {name}, of a server that is started.")
        flags.string(
            f"{name}_url", "", f"Address of a server that is {name}; empty: one is started."
        )
        flags.integer(
            f"{name}_pid", 0, f"First process of --{name}_url's server, if on this machine."
        )
    flags.choices(
        "references",
        ("float32",),
        REFERENCES,
        "Comma-separated runs to measure log-probabilities against: float32 (model and cache "
        "in float32, vLLM's own attention), bfloat16 (the arms' model with a bfloat16 cache, "
        "grouped_fp32).",
    )
    flags.string("vllm_python", "", "Python of an environment with vLLM and flashverify's wheel.")
    flags.string("model", "", "Model folder; empty: SmolLM2-135M-Instruct, written anew.")
    flags.string("kv_cache_dtype", "fp8", "Cache of both arms, as vLLM names it.")
    flags.integer("speculative_tokens", 7, "Drafts of a block, by n-gram lookup; 0: none.")
    flags.boolean("row_invariant_linears", True, "The plugin's option, for both arms.")
    flags.string("server_args", "", "Further arguments of every server that is started.")
    flags.strings(
        "texts",
        ["repetitive"],
        "name=file or name=file,file: a text of files; repetitive: one that repeats itself. "
        "May be given several times.",
    )
    flags.integer("context", 8192, "Tokens of each text, and of the servers' context.", low=2)
    flags.integer("max_tokens", 64, "Tokens of those that are generated, not given.", low=1)
    flags.integer("blocks", 5, "A B B A blocks for each text.", low=1)
    flags.integer("seed", 0, "Seed of the servers, the requests and the bootstrap.", high=MOST_SEED)
    for name, default_s, text in (
        ("start_timeout_s", 900.0, "Seconds that a server may take to start."),
        ("timeout_s", 1800.0, "Seconds from a request to the end of its answer."),
    ):
        flags.number(name, default_s, text, low=SHORTEST_S)
    flags.number(
        "settle_s", 10.0, "Seconds for a server to become idle and its counters to settle."
    )
    return flags
