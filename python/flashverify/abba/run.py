"""The program: arguments in, exit code out."""

import contextlib
import json
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence

from flashverify.abba import text
from flashverify.abba.options import HelpRequested, parse
from flashverify.abba.outcome import ExitCode, Interrupted, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs abba with ``arguments``, by default those of the process."""
    try:
        with _interruptible() as ignore_interrupts:
            return _run(sys.argv[1:] if arguments is None else arguments, ignore_interrupts)
    except HelpRequested as help_text:
        print(help_text)
        return ExitCode.DONE
    except UsageError as error:
        print(f"abba: error: {error}", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS
    except KeyboardInterrupt:
        print("abba: interrupted: nothing was written", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _run(arguments: Sequence[str], ignore_interrupts: Callable[[], None]) -> ExitCode:
    options = parse(arguments)
    # Only now what takes seconds to import: a slip in the arguments is told at once.
    from flashverify.abba import cache_file, experiment, output, plot
    from flashverify.abba.case import available_memory_bytes

    contents = None
    if options.cache is not None:
        contents = cache_file.read(options.cache)
        options = options.with_file_case(contents.case(options.case.page_size))
    options.case.check_memory(available_memory_bytes(), peers=options.peers)
    folder = output.OutputFolder(options.out, options.caller_folder)
    try:
        result, code = experiment.run(options, contents)
        files = {
            "abba.json": json.dumps(result.to_json(), indent=1, allow_nan=False).encode() + b"\n",
            "abba.md": text.for_markdown(result).encode(),
        }
        if result.measurement is not None:
            files["abba.png"] = plot.draw(result)
    except BaseException:
        folder.abandon()
        raise
    # All that is left takes milliseconds, and half a result would be worse than a late exit.
    ignore_interrupts()
    try:
        folder.write(files)
    except OSError as error:
        folder.abandon()
        print(f"abba: error: cannot write to {folder.path}: {error.strerror}", file=sys.stderr)
        return ExitCode.WRITE_FAILED
    print(text.for_terminal(result))
    if result.differences:
        print(text.differences_for_terminal(result.differences))
    print(f"\n{', '.join(files)} are in {folder.path}")
    if code != ExitCode.DONE:
        print(f"abba: not run: {result.reason}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM raise Interrupted, once: what cleans up after it is not interrupted.

    Yields a function that makes the process deaf to both until the end of the block.
    """
    signals = (signal.SIGINT, signal.SIGTERM)

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
