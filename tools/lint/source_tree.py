"""The files of the source tree itself, not of the runfiles.

A linter that is given a list of files says nothing about the file that somebody
forgot to list. The lint tests therefore walk the tree; Bazel cannot know what
they read, and their tag `external` has it run them every time.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_PRUNED = ("bazel-*", "flashverify-results", "node_modules", "__pycache__", "*venv*")


def root() -> Path:
    """The folder of the WORKSPACE file that the runfiles point to."""
    runfiles = Path(os.environ["TEST_SRCDIR"]) / os.environ["TEST_WORKSPACE"]
    return (runfiles / "WORKSPACE").resolve(strict=True).parent


def walk(folder: Path | None = None) -> Iterator[Path]:
    """Yields every file that is neither hidden nor a product of a build."""
    for path in sorted((folder or root()).iterdir()):
        if path.name.startswith(".") or any(path.match(pattern) for pattern in _PRUNED):
            continue
        if path.is_dir():
            yield from walk(path)
        else:
            yield path


def matching(*patterns: str) -> list[Path]:
    """The files whose names match, relative to the root.

    Raises:
      AssertionError: Nothing matches, which means that the walk went wrong.
    """
    base = root()
    found = [path for path in walk(base) if any(path.match(pattern) for pattern in patterns)]
    assert found, f"no file under {base} matches {patterns}"
    return [path.relative_to(base) for path in found]
