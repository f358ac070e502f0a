"""A fresh virtual environment that a wheel is installed into, offline."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def _shared_paths(runfiles: Path, workspace: Path) -> list[str]:
    """The entries of this test's path that come from other repositories."""
    return [
        path
        for path in sys.path
        if runfiles in Path(path).parents and workspace not in [Path(path), *Path(path).parents]
    ]


class Environment:
    """A virtual environment that shares this test's packages of @pypi.

    Test helpers can be imported by their path in the workspace; nothing below its
    python/ folder can, so that the package comes from the wheel.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        """Creates the environment in `folder`, which must not exist, with the wheel."""
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.python = folder / "bin/python"
        base = {"base": str(folder), "platbase": str(folder)}
        self.site_packages = Path(sysconfig.get_path("purelib", "venv", vars=base))

        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--no-input"]
        options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", *options, str(wheel)], check=True)

        runfiles = Path(os.environ["TEST_SRCDIR"])
        workspace = runfiles / os.environ["TEST_WORKSPACE"]
        lines = [*_shared_paths(runfiles, workspace), str(workspace)]
        (self.site_packages / "shared.pth").write_text("".join(line + "\n" for line in lines))

    def variables(self) -> dict[str, str]:
        """This process's environment variables, less those that name a path to Python code."""
        return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        """Runs the environment's Python; returns its standard output.

        Raises:
          subprocess.CalledProcessError: it failed; its standard error was passed on.
        """
        return subprocess.run(
            [self.python, *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd or self.folder,
            env=self.variables(),
        ).stdout
