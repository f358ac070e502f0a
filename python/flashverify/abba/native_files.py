"""Proof that both arms run the same native code.

Each arm is probed in a Python of its own, which imports flashverify from the arm's root,
runs the arm's route and reports the SHA-256 of every native file that it then has mapped:
the library and the extension, but also torch, the thread pool, the C library and the
interpreter. The process that measures must have the same files mapped.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import flashverify
from flashverify.abba import probe
from flashverify.abba.outcome import ExitCode, NotRunError

_PROBE_TIMEOUT_SECONDS = 300


class NativeMismatchError(NotRunError):
    """The arms' processes mapped different native files."""

    exit_code = ExitCode.NATIVE_DIFFERS

    def __init__(self, differences: "Sequence[Difference]", reports: dict[str, probe.Report]):
        names = ", ".join(sorted({difference.name for difference in differences}))
        super().__init__(f"the arms' native dependencies differ: {names}")
        self.differences = tuple(differences)
        self.reports = reports


@dataclasses.dataclass(frozen=True)
class Difference:
    """A file name whose digests, by side, are not the same. None: not mapped there."""

    name: str
    sha256: dict[str, str | None]
    path: dict[str, str | None]


def package_root() -> Path:
    """The folder that holds the flashverify package of this process."""
    return Path(flashverify.__file__).absolute().parent.parent


def compare(sides: dict[str, Sequence[probe.NativeFile]]) -> list[Difference]:
    """Differences between the sides' files, matched by name; several of one name as a set."""
    by_name: dict[str, dict[str, list[probe.NativeFile]]] = {}
    for side, files in sides.items():
        for file in files:
            by_name.setdefault(file["name"], {}).setdefault(side, []).append(file)
    differences = []
    for name, found in sorted(by_name.items()):
        digests = {side: sorted(f["sha256"] for f in found.get(side, [])) for side in sides}
        if len({tuple(values) for values in digests.values()}) > 1:
            differences.append(
                Difference(
                    name=name,
                    sha256={side: " ".join(values) or None for side, values in digests.items()},
                    path={
                        side: " ".join(f["path"] for f in found.get(side, [])) or None
                        for side in sides
                    },
                )
            )
    return differences


def check_arms(
    arms: dict[str, tuple[Path | None, str]], device: str = "cpu"
) -> dict[str, probe.Report]:
    """Probes the arms, name to (root, route), side by side on a device.

    Returns each one's report. Raises NativeMismatchError where they differ, NotRunError where
    one cannot run.
    """
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(_started(root or package_root(), route, device))
            for name, (root, route) in arms.items()
        }
        reports = {name: _finish(name, process) for name, process in running.items()}
    differences = compare({name: report["files"] for name, report in reports.items()})
    if differences:
        raise NativeMismatchError(differences, reports)
    return reports


def check_this_process(reports: dict[str, probe.Report]) -> None:
    """Raises NativeMismatchError unless this process has every file of the arms mapped.

    Called after both arms ran here. This process may have mapped more: the progress bar's and
    the tables' libraries are none of the arms' business.
    """
    arm, report = next(iter(reports.items()))
    known = {}
    for file in report["files"]:
        known[probe.identity(Path(file["path"]).stat())] = file["sha256"]
    try:
        here = probe.mapped_native_files(known)
    except RuntimeError as error:
        raise NotRunError(str(error)) from error
    mapped = {(file["name"], file["sha256"]) for file in here}
    missing = {f["name"] for f in report["files"] if (f["name"], f["sha256"]) not in mapped}
    if missing:
        compared = compare({arm: report["files"], "this process": here})
        raise NativeMismatchError([d for d in compared if d.name in missing], reports)


@contextlib.contextmanager
def _started(root: Path, route: str, device: str) -> Iterator["subprocess.Popen[str]"]:
    request = {
        "root": str(root),
        "paths": [str(Path(path).absolute()) for path in sys.path if path],
        "route": route,
        "device": device,
    }
    process = subprocess.Popen(
        # Isolated, so that neither the caller's folder nor PYTHON* variables take part.
        [sys.executable, "-I", "-B", probe.__file__, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _finish(name: str, process: "subprocess.Popen[str]") -> probe.Report:
    try:
        stdout, stderr = process.communicate(timeout=_PROBE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"arm {name}: no answer in {_PROBE_TIMEOUT_SECONDS} s") from error
    if process.returncode:
        lines = stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise NotRunError(f"arm {name} could not run: {lines[-1]}")
    report: probe.Report = json.loads(stdout)
    return report
