"""Flags and arguments, as the command lines of abba and of the tools have them."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from flashverify.abba.outcome import UsageError

MOST_SEED = 2**63 - 1
_MOST_INTEGER = 2**31 - 1


class HelpRequested(Exception):  # noqa: N818 - no error
    """--help was given; the text is the only argument."""


class Flags:
    """The flags of a program, ``--out`` and ``--help`` among them, and what each accepts."""

    def __init__(self, program: str, description: str) -> None:
        """``description`` stands above the flags in the text of ``--help``."""
        self._program = program
        self._description = description
        self._values: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]
        self._ranges: dict[str, tuple[float, float]] = {}
        self._known: dict[str, Sequence[str]] = {}
        self._quick: Mapping[str, object] = {}
        self.string("out", "", "Folder of the result; empty: a new one under flashverify-results/.")
        self.boolean("help", False, "Shows this text.")

    def string(self, name: str, default: str, text: str) -> None:
        """Any text; empty where there is none."""
        flags.DEFINE_string(name, default, text, flag_values=self._values)

    def strings(self, name: str, default: Sequence[str], text: str) -> None:
        """A flag that may be given several times."""
        flags.DEFINE_multi_string(name, list(default), text, flag_values=self._values)

    def boolean(self, name: str, default: bool, text: str) -> None:
        """``--name`` or ``--noname``."""
        flags.DEFINE_boolean(name, default, text, flag_values=self._values)

    def integer(
        self, name: str, default: int, text: str, *, low: int = 0, high: int = _MOST_INTEGER
    ) -> None:
        """A whole number from ``low`` to ``high``."""
        flags.DEFINE_integer(name, default, text, flag_values=self._values)
        self._ranges[name] = (low, high)

    def number(
        self, name: str, default: float, text: str, *, low: float = 0, high: float = 10**6
    ) -> None:
        """A number from ``low`` to ``high``; never NaN."""
        flags.DEFINE_float(name, default, text, flag_values=self._values)
        self._ranges[name] = (low, high)

    def choice(self, name: str, default: str, known: Sequence[str], text: str) -> None:
        """One of the names ``known``."""
        self.string(name, default, f"{text} Known are {', '.join(known)}.")
        self._known[name] = known

    def choices(self, name: str, default: Sequence[str], known: Sequence[str], text: str) -> None:
        """Names of ``known`` with commas between them: a tuple without repeats."""
        flags.DEFINE_list(
            name, list(default), f"{text} Known are {', '.join(known)}.", flag_values=self._values
        )
        self._known[name] = known

    def quick(self, text: str, **instead: object) -> None:
        """``--quick``, under which the flags ``instead`` default to these values."""
        self.boolean("quick", False, text)
        self._quick = instead

    def parse(self, arguments: Sequence[str]) -> "Arguments":
        """The arguments after the program's name, checked.

        Raises UsageError with one message for whatever cannot be meant, HelpRequested
        for ``--help``.
        """
        try:
            positional = self._values([self._program, *arguments])[1:]
        except (flags.Error, UnicodeDecodeError) as error:
            raise UsageError(str(error).replace("\n", " ")) from error
        if self._values["help"].value:
            raise HelpRequested(self._description + self._help())
        if positional:
            raise UsageError(
                f"unexpected argument {positional[0]!r}: all arguments are --flag=value"
            )
        found: dict[str, Any] = {}
        for name in self._values:
            flag = self._values[name]
            found[name] = flag.value
            if name in self._quick and self._values["quick"].value and not flag.present:
                found[name] = self._quick[name]
        for name, (low, high) in self._ranges.items():
            if not low <= found[name] <= high:
                raise UsageError(f"--{name}={found[name]}: accepted are {low} to {high}")
        for name, known in self._known.items():
            is_list = isinstance(found[name], list)
            names = [one for one in found[name] if one] if is_list else [found[name]]
            for one in names:
                if one not in known:
                    raise UsageError(f"--{name}={one}: known are {', '.join(known)}")
            if is_list:
                found[name] = tuple(dict.fromkeys(names))
        given = frozenset(name for name in self._values if self._values[name].present)
        return Arguments(found, given, shlex.join([self._program, *arguments]))

    def _help(self) -> str:
        lines = self._values.get_help().splitlines()
        # The heading is the module that defined the flags: this one, whatever the program.
        return "\n".join(line for line in lines if line.startswith(" "))


class Arguments:
    """What was given to a program: the value of each flag, and the command as a whole."""

    def __init__(self, values: Mapping[str, Any], given: frozenset[str], command: str) -> None:
        """Raises UsageError where the caller's folder is gone."""
        self.command = command
        self.given = given
        self.caller_folder = caller_folder()
        self._values = values

    def value(self, name: str) -> Any:
        """The value of a flag."""
        return self._values[name]

    def path(self, name: str) -> Path | None:
        """The path that a flag names, from the caller's folder; None where it is empty.

        Raises UsageError for a home folder that nobody has.
        """
        text = self._values[name]
        if not text:
            return None
        try:
            return Path(os.path.normpath(self.caller_folder / Path(text).expanduser()))
        except RuntimeError as error:
            raise UsageError(f"--{name}={text}: {error}") from error


def caller_folder() -> Path:
    """Where the user stands; raises UsageError where that folder is gone."""
    # `bazel run` starts the program in its runfiles and says where the caller stood.
    given = os.environ.get("BUILD_WORKING_DIRECTORY")
    try:
        return Path(given) if given else Path.cwd()
    except OSError as error:
        raise UsageError(f"the current folder: {error.strerror}") from error
