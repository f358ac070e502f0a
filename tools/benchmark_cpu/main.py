"""The program: arguments in, exit code out."""

import json
import sys
from collections.abc import Sequence

from flashverify.abba.options import HelpRequested
from flashverify.abba.outcome import ExitCode, NotRunError, UsageError
from flashverify.abba.output import OutputFolder
from tools.benchmark_cpu import experiment, report
from tools.benchmark_cpu.options import PROGRAM, Options, parse

FILES = (f"{PROGRAM}.json", f"{PROGRAM}.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark with ``arguments``, by default those of the process."""
    try:
        return _run(parse(sys.argv[1:] if arguments is None else arguments))
    except HelpRequested as help_text:
        print(help_text)
        return ExitCode.DONE
    except UsageError as error:
        return _failed(f"error: {error}", ExitCode.BAD_ARGUMENTS)
    except NotRunError as error:
        return _failed(f"not run: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted: nothing was written", ExitCode.INTERRUPTED)


def _run(options: Options) -> ExitCode:
    experiment.check_memory(options)
    folder = OutputFolder(options.out, options.caller_folder, program=PROGRAM, own_files=FILES)
    try:
        result = experiment.run(options)
        found = json.dumps(report.to_json(result), indent=1, allow_nan=False)
        contents = (found + "\n", report.for_markdown(result))
    except BaseException:
        folder.abandon()
        raise
    try:
        folder.write({name: text.encode() for name, text in zip(FILES, contents, strict=True)})
    except OSError as error:
        folder.abandon()
        return _failed(
            f"error: cannot write to {folder.path}: {error.strerror}", ExitCode.WRITE_FAILED
        )
    print(report.for_terminal(result))
    print(f"\n{', '.join(FILES)} are in {folder.path}")
    return ExitCode.DONE


def _failed(message: str, code: ExitCode) -> ExitCode:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
