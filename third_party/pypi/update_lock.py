#!/usr/bin/env python3
"""Writes requirements_lock.txt and files_lock.txt beside this file.

Run it by hand after an edit of requirements.in or files.in; it needs the
machine's package index, and nothing else in the repository runs it.

requirements_lock.txt is what pip-compile resolves, with the hash of every wheel
of each version, so that one lock serves several Pythons. A package of
LOCAL_BUILDS gets a second entry for the build with that local version label, if
pip is offered one here; its absence is an error, so that a hash never gets lost
unseen.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import venv

HERE = pathlib.Path(__file__).resolve().parent
PIP_TOOLS = "pip-tools==7.6.2"
# The index's torch needs a few GB of CUDA packages; the CPU build needs none.
LOCAL_BUILDS = {"torch": "cpu"}


def wheel_entries(python: pathlib.Path, requirements: list[str], scratch: pathlib.Path) -> str:
    """Lock entries of exactly the wheels that pip picks on this machine."""
    entries = []
    for requirement in requirements:
        folder = scratch / requirement.replace("=", "_")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
        subprocess.run([*pip, *download, str(folder), requirement], check=True)
        (wheel,) = folder.iterdir()
        digest = subprocess.run(
            [*pip, "hash", str(wheel)], check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        version = wheel.name.split("-")[1].replace("%2B", "+")
        entries.append(f"{requirement.split('==')[0]}=={version} \\\n    {digest}\n")
    return "".join(entries)


def main() -> None:
    """Writes both lock files."""
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
        text = "# Written by update_lock.py from requirements.in.\n\n" + lock.read_text()
        pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
        local = [f"{name}=={pins[name]}+{label}" for name, label in LOCAL_BUILDS.items()]
        text += "\n# Local builds, asked for before the build of the same version above.\n"
        text += wheel_entries(python, local, scratch)
        (HERE / "requirements_lock.txt").write_text(text)

        lines = (HERE / "files.in").read_text().splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]
        text = "# Written by update_lock.py from files.in.\n\n"
        (HERE / "files_lock.txt").write_text(text + wheel_entries(python, wanted, scratch))


if __name__ == "__main__":
    sys.exit(main())
