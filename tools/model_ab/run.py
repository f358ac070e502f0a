"""The program: arguments in, exit code out."""

from collections.abc import Sequence

from flashverify.abba import program
from tools.model_ab.options import PROGRAM, Options, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with ``arguments``, by default those of the process."""
    return program.main(PROGRAM, arguments, parse, _carry_out)


def _carry_out(options: Options) -> program.Ending:
    # Only now what takes seconds to import: a slip in the arguments is told at once.
    from tools.model_ab import experiment, plot, report

    result, code = experiment.run(options)
    return program.Ending(
        found=result.to_json(),
        page=report.for_markdown(result),
        summary=report.for_terminal(result),
        picture=plot.draw(result) if result.requests else None,
        code=code,
        complaint=result.complaint,
    )
