"""The command line."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flashverify.abba.command_line import Flags
from flashverify.abba.outcome import UsageError
from tools.benchmark_cpu.sections import Section, all_sections

PROGRAM = "benchmark_cpu"

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
    found = _flags(tuple(known)).parse(arguments)
    names = found.value("cases")
    if not names:
        raise UsageError(f"--cases is empty: known are {', '.join(known)}")
    shrink = found.value("shrink")
    return Options(
        sections=tuple(
            section.shrunk(shrink) if shrink > 1 else section
            for name, section in known.items()
            if name in names
        ),
        rounds=found.value("rounds"),
        warmups=found.value("warmups"),
        seed=found.value("seed"),
        shrink=shrink,
        quick=found.value("quick"),
        out=found.path("out"),
        command=found.command,
        caller_folder=found.caller_folder,
    )


def _flags(cases: Sequence[str]) -> Flags:
    flags = Flags(PROGRAM, _DESCRIPTION)
    flags.choices("cases", cases, cases, "What to measure, comma-separated.")
    flags.integer("rounds", 15, "Rounds; each times every subject once.", low=1)
    flags.integer("warmups", 2, "Rounds before these that do not count.")
    flags.integer("seed", 0, "Seed of the synthetic data, page order and bootstrap.")
    flags.integer(
        "shrink", 1, "Divides every context, to try the tool; nothing is judged then.", low=1
    )
    flags.quick("3 rounds after 1, unless given.", rounds=3, warmups=1)
    return flags
