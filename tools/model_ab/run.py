"""The program: arguments in, exit code out."""

import contextlib
import json
import signal
import sys
import types
from collections.abc import Iterator, Sequence

from flashverify.abba.outcome import ExitCode, UsageError
from flashverify.abba.output import OutputFolder
from tools.model_ab.options import HelpRequested, parse

OWN_FILES = ("model_ab.json", "model_ab.md", "model_ab.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with ``arguments``, by default those of the process."""
    with _terminable():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> int:
    folder = None
    try:
        options = parse(arguments)
        # Only now what takes seconds to import: a slip in the arguments is told at once.
        from tools.model_ab import experiment, plot, report

        folder = OutputFolder(
            options.out, options.caller_folder, program="model_ab", own_files=OWN_FILES
        )
        result, code = experiment.run(options)
        files = {
            "model_ab.json": json.dumps(result.to_json(), indent=1, allow_nan=False).encode()
            + b"\n",
            "model_ab.md": report.for_markdown(result).encode(),
        }
        if result.requests:
            files["model_ab.png"] = plot.draw(result)
    except HelpRequested as help_text:
        print(help_text)
        return ExitCode.DONE
    except UsageError as error:
        if folder is not None:
            folder.abandon()
        print(f"model_ab: error: {error}", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS
    except BaseException as error:
        if folder is not None:
            folder.abandon()
        if not isinstance(error, KeyboardInterrupt):
            raise
        print("model_ab: interrupted: nothing was written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    try:
        folder.write(files)
    except OSError as error:
        folder.abandon()
        print(f"model_ab: error: cannot write to {folder.path}: {error}", file=sys.stderr)
        return ExitCode.WRITE_FAILED
    print(report.for_terminal(result))
    print(f"\n{', '.join(files)} are in {folder.path}")
    return code


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the program as SIGINT does: the servers that it started end with it."""

    def interrupt(_number: int, _frame: types.FrameType | None) -> None:
        # Once: what cleans up is not interrupted.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
