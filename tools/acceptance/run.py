"""The program: arguments in, exit code out."""

import datetime
import platform
from collections.abc import Sequence

import flashverify
from flashverify.abba import environment, program
from flashverify.abba.outcome import ExitCode
from tools.acceptance import plot, report
from tools.acceptance.exchange import ServerError
from tools.acceptance.measure import RequestResult, measure
from tools.acceptance.options import PROGRAM, Options, parse
from tools.acceptance.result import Result
from tools.acceptance.server import Server


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with ``arguments``, by default those of the process."""
    return program.main(PROGRAM, arguments, parse, _carry_out)


def _carry_out(options: Options) -> program.Ending:
    result = run(options)
    found = result.to_json()
    return program.Ending(
        found=found,
        page=report.for_markdown(result),
        summary=report.for_terminal(result),
        picture=None if result.speculation is None else plot.draw(result),
        code=ExitCode.DONE if result.is_whole else ExitCode.ARM_NOT_RUN,
        complaint=None if result.is_whole else f"{found['status']}: {found['reason']}",
    )


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
