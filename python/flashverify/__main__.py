"""python -m flashverify: what is installed, and where."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import flashverify
from flashverify import info


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what the arguments ask for. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flashverify",
        description="Prints version, precision revision, native files and what they run on.",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--json", action="store_true", help="print the same as JSON")
    choice.add_argument("--include-dir", action="store_true", help="print the headers' folder")
    choice.add_argument("--library", action="store_true", help="print the library's path")
    choice.add_argument("--cmake-dir", action="store_true", help="print the CMake package's folder")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.include_dir:
            print(info.include_dir())
        elif chosen.library:
            print(info.library_file())
        elif chosen.cmake_dir:
            print(info.cmake_dir())
        else:
            found = {
                "version": flashverify.__version__,
                **info.native_info(),
                "cuda_devices": info.cuda_devices(),
            }
            print(json.dumps(found, indent=2) if chosen.json else _table(found))
    except flashverify.FlashVerifyError as error:
        print(f"flashverify: {error}", file=sys.stderr)
        return 1
    return 0


def _table(rows: dict[str, object]) -> str:
    width = max(map(len, rows))
    return "\n".join(
        f"{name.replace('_', ' '):{width}}  {_words(value)}" for name, value in rows.items()
    )


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
