"""Runs a module beside vLLM: in a fresh environment with the wheel installed.

Usage: launch.py --wheel=WHEEL --module=MODULE [ARGUMENT ...]. As `bazel run` starts it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.wheel.environment import Environment


def main() -> int:
    """Returns the module's exit status."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--wheel", required=True, type=Path)
    parser.add_argument("--module", required=True)
    args, others = parser.parse_known_args()
    workspace = Path.cwd()
    # What a test is told, and `bazel run` is not.
    os.environ.setdefault("TEST_SRCDIR", str(workspace.parent))
    os.environ.setdefault("TEST_WORKSPACE", workspace.name)
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder) / "environment", args.wheel)
        command = [environment.python, "-m", args.module, *others]
        # vLLM's ops alone are wanted here, not its plugins.
        variables = environment.variables() | {"VLLM_PLUGINS": ""}
        return subprocess.run(command, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main())
