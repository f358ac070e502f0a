"""The program: arguments in, exit code out."""

import sys
from collections.abc import Sequence

from flashverify.abba import program
from tools.benchmark_cpu import experiment, report
from tools.benchmark_cpu.options import PROGRAM, Options, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark with ``arguments``, by default those of the process."""
    return program.main(PROGRAM, arguments, parse, _carry_out)


def _carry_out(options: Options) -> program.Ending:
    experiment.check_memory(options)
    result = experiment.run(options)
    return program.Ending(
        found=report.to_json(result),
        page=report.for_markdown(result),
        summary=report.for_terminal(result),
    )


if __name__ == "__main__":
    sys.exit(main())
