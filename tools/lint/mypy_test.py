"""Runs mypy over the Python files of this workspace that are in the runfiles.

What is in the runfiles, dependencies included, is what the test's deps bring;
conventions_test.py sees to it that no file is left out.
"""

import os
import sys
from pathlib import Path

from mypy import api


def main() -> int:
    files = [str(path) for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py"))]
    assert files, f"no Python file in {sys.argv[1:]}"
    # Without --python-executable, mypy looks for packages on this process's path.
    os.environ["MYPYPATH"] = "python"
    options = [
        "--config-file=pyproject.toml",
        "--explicit-package-bases",
        f"--cache-dir={os.environ['TEST_TMPDIR']}/mypy",
    ]
    report, errors, status = api.run(options + files)
    print(report + errors)
    return status


if __name__ == "__main__":
    sys.exit(main())
