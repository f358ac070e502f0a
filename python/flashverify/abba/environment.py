"""Where a result was measured."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

import flashverify
from flashverify.abba import cuda


def describe(device: str = "cpu") -> dict[str, object]:
    """The environment of a run, for the result. On CUDA, after the arms have run."""
    info = flashverify.native_info()
    on_cuda = device == "cuda"
    return {
        "device": cuda.device_name() if on_cuda else f"{cpu_name()}, {usable_cpus()} CPUs",
        "driver": cuda.driver_version() if on_cuda else None,
        "cuda": torch.version.cuda if on_cuda else None,
        "cuda_image": flashverify.last_cuda_image() if on_cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flashverify": flashverify.__version__,
        "git": git_revision(),
        "cpu_isa": info["cpu_isa"],
        "threads": flashverify.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "time_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's own name, as the kernel tells it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, text = line.partition(":")
        if key.strip() == "model name":
            return text.strip()
    return platform.machine()


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def git_revision() -> str | None:
    """Revision of the checkout that this package lies in, "-dirty" where it was changed.

    None for an installed package, and where there is no git.
    """
    source = Path(flashverify.__file__).resolve()
    folder = os.environ.get("BUILD_WORKSPACE_DIRECTORY") or str(source.parent)
    tracked = "python/flashverify/__init__.py" if folder != str(source.parent) else source.name
    if _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: str, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", folder, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
