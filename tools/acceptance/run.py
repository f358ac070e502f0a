"""The program: arguments in, exit code out."""

import datetime
import json
import platform
import sys
from collections.abc import Sequence

import flashverify
from flashverify.abba import environment
from flashverify.abba.outcome import ExitCode, UsageError
from flashverify.abba.output import OutputFolder
from tools.acceptance import plot, report
from tools.acceptance.measure import RequestResult, measure
from tools.acceptance.options import HelpRequested, Options, parse
from tools.acceptance.result import Result
from tools.acceptance.server import Server, ServerError

OWN_FILES = ("acceptance.json", "acceptance.md", "acceptance.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with ``arguments``, by default those of the process."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        folder = OutputFolder(
            options.out, options.caller_folder, program="acceptance", own_files=OWN_FILES
        )
    except HelpRequested as help_text:
        print(help_text)
        return ExitCode.DONE
    except UsageError as error:
        print(f"acceptance: error: {error}", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS
    try:
        result = run(options)
    except KeyboardInterrupt:
        folder.abandon()
        print("acceptance: interrupted: nothing was written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    files = {
        "acceptance.json": json.dumps(result.to_json(), indent=1, allow_nan=False).encode() + b"\n",
        "acceptance.md": report.for_markdown(result).encode(errors="backslashreplace"),
    }
    if result.speculation is not None:
        files["acceptance.png"] = plot.draw(result)
    try:
        folder.write(files)
    except OSError as error:
        folder.abandon()
        print(f"acceptance: error: cannot write to {folder.path}: {error}", file=sys.stderr)
        return ExitCode.WRITE_FAILED
    print(report.for_terminal(result))
    print(f"\n{', '.join(files)} are in {folder.path}")
    return ExitCode.DONE if result.is_whole else ExitCode.ARM_NOT_RUN


def run(options: Options) -> Result:
    """Sends the requests; a server that does not answer is a result too."""
    reason, model, version = None, options.model, None
    requests: list[RequestResult] = []
    try:
        server = Server(options.url, timeout_s=options.timeout_s, prefix=options.prefix)
        version = server.version()
        model = model or server.model()
        for repetition in range(options.repeat):
            for case in options.cases:
                found = measure(server, model, case, options.parameters, settle_s=options.settle_s)
                if options.repeat > 1:
                    name = f"{found.name}, {repetition + 1}"
                    found = RequestResult(**{**vars(found), "name": name})
                requests.append(found)
    except ServerError as error:
        reason = str(error)
    return Result(
        command=options.command,
        environment={
            "url": options.url,
            "model": model or None,
            "server_version": version,
            "flashverify": flashverify.__version__,
            "git": environment.git_revision(),
            "python": platform.python_version(),
            "client": f"{environment.cpu_name()}, {environment.usable_cpus()} CPUs",
            "time_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        },
        settings=options.parameters,
        requests=tuple(requests),
        reason=reason,
    )
