"""Servers that the program starts itself, and what it sees of their processes."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashverify.abba import probe
from tools.acceptance.server import Server

# How often a server that starts is asked whether it serves, and how long it may think.
_POLL_S = 0.2
_HEALTH_S = 5

# The last words of a log that are told where a server does not start.
_LOG_LINES = 3
_ERROR = re.compile(r"\b\w*Error: .*")


class StartError(Exception):
    """A server did not start; says nothing about a model."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A vLLM server to start: its Python, what it is called with, and its variables."""

    python: Path
    arguments: Sequence[str]
    environment: Mapping[str, str]


class StartedServer:
    """A server of this machine, in a process group of its own."""

    def __init__(self, name: str, configuration: Configuration, log: Path) -> None:
        """Starts it; `wait` waits until it answers. Raises StartError."""
        self.name = name
        self.log = log
        self._configuration = configuration
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(str(configuration.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *configuration.arguments,
        ]
        try:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(configuration),
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(f"{name}: cannot run {configuration.python}: {error}") from error

    @property
    def pid(self) -> int:
        """The first process of the server."""
        return self.process.pid

    def wait(self, timeout_s: float) -> None:
        """Returns when the server answers; raises StartError where it ends or takes longer."""
        server = Server(self.url, timeout_s=_HEALTH_S)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.process.poll()
            if status is not None:
                raise StartError(
                    f"{self.name} did not start: exit status {status}: {self._last_lines()}"
                )
            if server.is_healthy():
                return
            time.sleep(_POLL_S)
        raise StartError(
            f"{self.name} did not start: no answer in {timeout_s:g} s: {self._last_lines()}"
        )

    def stop(self) -> None:
        """Ends the server's processes and waits for them; a second call does nothing."""
        for number, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
            if not _group_lives(self.process.pid, patience_s):
                return

    def native_info(self) -> dict[str, Any]:
        """What ``python -m flashverify --json`` says in the server's environment.

        Raises StartError where it says nothing.
        """
        try:
            done = subprocess.run(
                [str(self._configuration.python), "-m", "flashverify", "--json"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=True,
                env=_environment(self._configuration),
            )
            found = json.loads(done.stdout)
            if not isinstance(found, dict):
                raise ValueError(f"{done.stdout[:80]!r} is no JSON object")
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            words = getattr(error, "stderr", None) or str(error)
            raise StartError(
                f"{self.name}: python -m flashverify --json: {str(words).strip()[-300:]}"
            ) from error
        return found

    def log_text(self) -> str:
        """What the server has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self.log_text().splitlines() if line.strip()]
        # An engine's processes repeat one another's errors, each with a prefix of its own.
        errors = [match[0] for line in lines if (match := _ERROR.search(line))]
        told = list(dict.fromkeys(errors)) or lines
        return " | ".join(told[-_LOG_LINES:]) or "it wrote nothing"


def _environment(configuration: Configuration) -> dict[str, str]:
    """This process's variables without those that would lend its own packages to another Python."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**own, **configuration.environment}


def native_files(pid: int) -> list[probe.NativeFile]:
    """Every ELF file that a process and those it started have mapped executable, by path.

    Raises RuntimeError for a process that cannot be looked into, or a file that was replaced.
    """
    by_path: dict[str, probe.NativeFile] = {}
    known: dict[tuple[int, ...], str] = {}
    for process in _with_children(pid):
        try:
            for file in probe.mapped_native_files(known, process=process):
                by_path[file["path"]] = file
                known[probe.identity(Path(file["path"]).stat())] = file["sha256"]
        except OSError as error:
            raise RuntimeError(f"process {process}: {error.strerror}") from error
    if not by_path:
        raise RuntimeError(f"process {pid} has no native file mapped")
    return [by_path[path] for path in sorted(by_path)]


def _with_children(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        process = waiting.pop()
        found.append(process)
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            # A thread may end while it is looked at.
            with contextlib.suppress(OSError):
                waiting += map(int, task.read_text().split())
    return found


def _group_lives(group: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
