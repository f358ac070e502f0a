"""The command line."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from flashverify.abba.options import HelpRequested
from flashverify.abba.outcome import UsageError
from tools.benchmark_cpu.sections import Section, all_sections

PROGRAM = "benchmark_cpu"

_QUICK = {"rounds": 3, "warmups": 1}

_DESCRIPTION = """\
benchmark_cpu: times the CPU kernels beside what the machine can do and beside torch, and says
which of the targets are reached.

Writes benchmark_cpu.json and benchmark_cpu.md. Exit codes: 0 done (targets missed or not),
1 the result could not be written, 2 bad arguments, 4 a kernel could not run, 130 interrupted.

flags:
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, checked, with paths made absolute."""

    sections: tuple[Section, ...]
    rounds: int
    warmups: int
    seed: int
    shrink: int
    quick: bool
    out: Path | None
    command: str
    caller_folder: Path

    def flag_values(self) -> dict[str, object]:
        """Every flag with the value that the run uses, for the result."""
        return {
            "cases": [section.name for section in self.sections],
            **{
                name: getattr(self, name)
                for name in ("rounds", "warmups", "seed", "shrink", "quick")
            },
            "out": None if self.out is None else str(self.out),
        }


def parse(arguments: Sequence[str]) -> Options:
    """Options of the arguments after the program's name.

    Raises UsageError with one message for whatever cannot be meant, HelpRequested for
    ``--help``.
    """
    known = all_sections()
    values = _define(tuple(known))
    try:
        positional = values([PROGRAM, *arguments])[1:]
    except flags.Error as error:
        raise UsageError(str(error).replace("\n", " ")) from error

    def value(name: str) -> Any:
        flag = values[name]
        quick = name in _QUICK and values["quick"].value and not flag.present
        return _QUICK[name] if quick else flag.value

    if value("help"):
        raise HelpRequested(_DESCRIPTION + values.get_help())
    if positional:
        raise UsageError(f"unexpected argument {positional[0]!r}: all arguments are --flag=value")
    names = value("cases")
    for name in names:
        if name not in known:
            raise UsageError(f"--cases={name}: known are {', '.join(known)}")
    if not names:
        raise UsageError(f"--cases is empty: known are {', '.join(known)}")

    shrink = value("shrink")
    # `bazel run` starts the program in its runfiles and says where the caller stood.
    caller_folder = Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())
    out = value("out")
    return Options(
        sections=tuple(
            section.shrunk(shrink) if shrink > 1 else section
            for name, section in known.items()
            if name in names
        ),
        rounds=value("rounds"),
        warmups=value("warmups"),
        seed=value("seed"),
        shrink=shrink,
        quick=value("quick"),
        out=Path(os.path.normpath(caller_folder / Path(out).expanduser())) if out else None,
        command=shlex.join([PROGRAM, *arguments]),
        caller_folder=caller_folder,
    )


def _define(cases: Sequence[str]) -> flags.FlagValues:
    values: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]

    def integer(name: str, default: int, low: int, text: str) -> None:
        flags.DEFINE_integer(
            name, default, text, lower_bound=low, upper_bound=2**31 - 1, flag_values=values
        )

    flags.DEFINE_list("cases", list(cases), "What to measure, comma-separated.", flag_values=values)
    integer("rounds", 15, 1, "Rounds; each times every subject once.")
    integer("warmups", 2, 0, "Rounds before these that do not count.")
    integer("seed", 0, 0, "Seed of the synthetic data, page order and bootstrap.")
    integer("shrink", 1, 1, "Divides every context, to try the tool; nothing is judged then.")
    flags.DEFINE_string(
        "out",
        "",
        "Folder of the result; empty: a new one under flashverify-results/.",
        flag_values=values,
    )
    flags.DEFINE_boolean("quick", False, "3 rounds after 1, unless given.", flag_values=values)
    flags.DEFINE_boolean("help", False, "Shows this text.", flag_values=values)
    return values
