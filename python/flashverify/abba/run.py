"""The program of abba: what `program.main` runs for it."""

from collections.abc import Sequence

from flashverify.abba import program
from flashverify.abba.options import PROGRAM, Options, parse
from flashverify.abba.outcome import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs abba with ``arguments``, by default those of the process."""
    return program.main(PROGRAM, arguments, parse, _carry_out)


def _carry_out(options: Options) -> program.Ending:
    # Only now what takes seconds to import: a slip in the arguments is told at once.
    from flashverify.abba import cache_file, experiment, plot, text
    from flashverify.abba.case import available_memory_bytes

    contents = None
    if options.cache is not None:
        contents = cache_file.read(options.cache)
        options = options.with_file_case(contents.case(options.case.page_size))
    options.case.check_memory(available_memory_bytes(), peers=options.peers)
    result, code = experiment.run(options, contents)
    summary = text.for_terminal(result)
    if result.differences:
        summary += "\n" + text.differences_for_terminal(result.differences)
    return program.Ending(
        found=result.to_json(),
        page=text.for_markdown(result),
        summary=summary,
        picture=None if result.measurement is None else plot.draw(result),
        code=code,
        complaint=None if code == ExitCode.DONE else f"not run: {result.reason}",
    )
