"""What the tests of abba share: a small case, and ways to run the program."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flashverify.abba import run

# Small enough that the slowest route takes milliseconds, with a last page that is not full.
SMALL = (
    "--context=200",
    "--q_len=3",
    "--q_heads=4",
    "--kv_heads=2",
    "--head_dim=64",
    "--page_size=48",
    "--warmups=1",
    "--blocks=3",
)

DATA = Path(__file__).parent.parent / "data"


def environment() -> dict[str, str]:
    """An environment in which a Python of its own finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def start(*arguments: str, cwd: Path, stderr: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    """Starts ``python -m flashverify.abba``."""
    return subprocess.Popen(
        [sys.executable, "-m", "flashverify.abba", *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


class Finished:
    """Exit code and text of a run."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


def call(*arguments: str) -> Finished:
    """Runs the program inside this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = run.main(arguments)
    return Finished(code, stdout.getvalue(), stderr.getvalue())


def load(folder: Path) -> dict[str, Any]:
    """The abba.json of a folder, as strict JSON."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    loaded: dict[str, Any] = json.loads((folder / "abba.json").read_text(), parse_constant=refuse)
    return loaded
