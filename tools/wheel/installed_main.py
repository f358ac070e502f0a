"""Runs pytest over test files against an installed wheel, as a Bazel test.

Usage: installed_main.py --wheel=WHEEL TEST_FILE_OR_PYTEST_OPTION ...
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.wheel.environment import Environment

PACKAGE = "flashverify"


def main() -> int:
    """Returns pytest's exit status, or 1 where the wheel is not what would be tested."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheel", required=True, type=Path)
    args, pytest_arguments = parser.parse_known_args()

    environment = Environment(Path(os.environ["TEST_TMPDIR"]) / "environment", args.wheel)
    code = f"import importlib.util as u; print(u.find_spec({PACKAGE!r}).origin)"
    origin = Path(environment.run("-c", code).strip())
    if environment.site_packages not in origin.parents:
        print(f"{PACKAGE} would be imported from {origin}, not from the wheel", file=sys.stderr)
        return 1
    command = [str(environment.python), "tools/pytest_main.py", *pytest_arguments]
    return subprocess.run(command, env=environment.variables()).returncode


if __name__ == "__main__":
    sys.exit(main())
