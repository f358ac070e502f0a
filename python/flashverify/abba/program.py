"""A program from its arguments to its exit code, as abba and the tools share it."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flashverify.abba.command_line import HelpRequested
from flashverify.abba.outcome import ExitCode, Interrupted, NotRunError, UsageError, WriteError
from flashverify.abba.output import OutputFolder


class Options(Protocol):
    """What every program's options have."""

    @property
    def out(self) -> Path | None:
        """Folder of the result; None for a new one."""

    @property
    def caller_folder(self) -> Path:
        """Where the user stands."""


_Options = TypeVar("_Options", bound=Options)


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a run leaves: a result for programs, for readers and, with numbers, as a picture.

    ``summary`` is printed. ``complaint`` says in a line what kept the run from being whole.
    """

    found: Mapping[str, Any]
    page: str
    summary: str
    picture: bytes | None = None
    code: ExitCode = ExitCode.DONE
    complaint: str | None = None

    def files(self, program: str) -> dict[str, bytes]:
        """The files of the result by name."""
        files = {
            f"{program}.json": json.dumps(self.found, indent=1, allow_nan=False).encode() + b"\n",
            # Names of files and of models may hold what is no character.
            f"{program}.md": self.page.encode(errors="backslashreplace"),
        }
        if self.picture is not None:
            files[f"{program}.png"] = self.picture
        return files


def main(
    name: str,
    arguments: Sequence[str] | None,
    parse: Callable[[Sequence[str]], _Options],
    carry_out: Callable[[_Options], Ending],
) -> int:
    """Runs the program ``name`` with ``arguments``, by default those of the process.

    The folder of the result is checked before ``carry_out`` measures anything. Nothing
    is left of a run that was interrupted or refused.
    """
    try:
        with _interruptible() as ignore_interrupts:
            options = parse(sys.argv[1:] if arguments is None else arguments)
            with OutputFolder(options.out, options.caller_folder, program=name) as folder:
                ending = carry_out(options)
                files = ending.files(name)
                # All that is left takes milliseconds, and half a result would be worse than
                # a late exit.
                ignore_interrupts()
                folder.write(files)
    except HelpRequested as help_text:
        _say(str(help_text))
        return ExitCode.DONE
    except UsageError as error:
        return _fail(name, f"error: {error}", ExitCode.BAD_ARGUMENTS)
    except WriteError as error:
        return _fail(name, f"error: {error}", ExitCode.WRITE_FAILED)
    except NotRunError as error:
        return _fail(name, f"not run: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _fail(name, "interrupted: nothing was written", ExitCode.INTERRUPTED)
    _say(f"{ending.summary}\n\n{', '.join(files)} are in {folder.path}")
    if ending.complaint is not None:
        return _fail(name, ending.complaint, ending.code)
    return ending.code


def _fail(name: str, words: str, code: ExitCode) -> ExitCode:
    print(f"{name}: {words}", file=sys.stderr)
    return code


def _say(text: str) -> None:
    """Prints; a reader that went away, such as ``head``, takes nothing from the result."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Signals to end raise Interrupted, once: what cleans up after it is not interrupted.

    Yields a function that makes the process deaf to them until the end of the block.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    # nohup asks for a program that outlives its terminal.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)

    def ignore() -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(_number: int, _frame: types.FrameType | None) -> None:
        ignore()
        raise Interrupted

    previous = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield ignore
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
