"""Runs one linter over every file of its kind in the source tree."""

import argparse
import subprocess
import sys
from pathlib import Path

from tools.lint import source_tree

CPP_PATTERNS = ("*.c", "*.cc", "*.cu", "*.cuh", "*.h")
BAZEL_PATTERNS = ("BUILD.bazel", "WORKSPACE", "*.bzl")
PYTHON_PATTERNS = ("*.py",)

# What the linter would have us load from repositories that no build here needs:
# Bazel 4 to 6 define these rules themselves.
NATIVE_RULES = "-native-cc-binary,-native-cc-import,-native-cc-library,-native-cc-test,-native-py"
# The macros that WORKSPACE calls declare repositories of fixed names.
BUILDIFIER_WARNINGS = NATIVE_RULES + ",-unnamed-macro"


def commands(linter: str, program: str) -> list[list[str]]:
    """The commands of a linter, each over all files of its kind."""
    if linter == "clang-format":
        files = source_tree.matching(*CPP_PATTERNS)
        options = [["--dry-run", "-Werror"]]
    elif linter == "ruff":
        files = source_tree.matching(*PYTHON_PATTERNS)
        options = [["check", "--no-cache"], ["format", "--no-cache", "--check", "--diff"]]
    else:
        files = source_tree.matching(*BAZEL_PATTERNS)
        options = [["-mode=check", "-lint=warn", f"-warnings={BUILDIFIER_WARNINGS}"]]
    return [[program, *arguments, *map(str, files)] for arguments in options]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("linter", choices=["buildifier", "clang-format", "ruff"])
    parser.add_argument("program", type=Path)
    args = parser.parse_args()

    failures = 0
    for command in commands(args.linter, str(args.program.absolute())):
        failures += subprocess.run(command, cwd=source_tree.root()).returncode != 0
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
